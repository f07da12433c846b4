#!/usr/bin/env bash
# kubernetes_test.sh KUBERNETES_POLICY ZEROSHARD: the manifests of deploy/kubernetes as kubectl renders
# them have what kubernetes_policy asks for, breaches of it are noticed, and all of them pass
# Kubernetes' own schemas, strictly. Skipped without kubectl; also where the schemas cannot be
# fetched from PyPI, once the rest has passed.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
policy="$1" zeroshard="$2"
readonly VALIDATOR=kubernetes-validate==1.37.0
# The oldest that the manifests are for, and the newest that the validator knows.
readonly VERSIONS=(1.29.0 1.37.0)

command -v kubectl >/dev/null || {
  echo "SKIPPED: kubectl is not installed; the manifests are not rendered"
  exit 77
}

# What a user's own overlay looks like that has everything.
cp -r "$REPOSITORY/deploy" "$scratch/deploy"
everything="$scratch/deploy/kubernetes/overlays/everything"
mkdir "$everything"
cat >"$everything/kustomization.yaml" <<'YAML'
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: zeroshard
resources: [../../base]
components:
  - ../../components/gpu
  - ../../components/tls
  - ../../components/monitoring
YAML
# As deploy/prometheus/README.md says it.
mkdir "$scratch/deploy/kubernetes/overlays/runbook"
awk '/^```yaml$/ {inside = 1; text = ""; next} /^```$/ {if (text ~ /replacements:/) printf "%s", text; inside = 0}
     inside {text = text $0 "\n"}' "$REPOSITORY/deploy/prometheus/README.md" \
  >"$scratch/deploy/kubernetes/overlays/runbook/kustomization.yaml"
if [[ -f $scratch/deploy/grafana/kustomization.yaml ]]; then
  echo "  - ../../../grafana" >>"$everything/kustomization.yaml"
fi

rendered=()
for folder in base overlays/cpu-demo overlays/gpu overlays/tls overlays/everything overlays/runbook; do
  file="$scratch/$(basename "$folder").yaml"
  if kubectl kustomize "$scratch/deploy/kubernetes/$folder" >"$file" 2>"$scratch/errors"; then
    rendered+=("$file")
  else
    complain "kubectl kustomize $folder: $(cat "$scratch/errors")"
  fi
  # Warnings are about fields that the next kubectl no longer knows.
  [[ ! -s $scratch/errors ]] || complain "kubectl kustomize $folder says: $(cat "$scratch/errors")"
done
((failures == 0)) || finish

breaches="$("$policy" "${rendered[@]}")" || complain "the manifests: $breaches"
rules="$REPOSITORY/deploy/prometheus/rules"
breaches="$("$policy" --rules "$rules" "$scratch/everything.yaml")" || complain "the rules: $breaches"
links="$(grep -cE 'runbook_url: https://.+/README\.md#zeroshard[a-z]+$' "$scratch/runbook.yaml" || true)"
alerts="$(cat "$rules"/*.yml | grep -c ' alert: ')"
((links == alerts)) || complain "$links of $alerts alerts have the runbook that an overlay names"

# expect_breach PATTERN FILE SED_SCRIPT: the file, changed like that, is refused for that reason.
expect_breach() {
  sed -E "$3" "$scratch/$2.yaml" >"$scratch/changed.yaml"
  if cmp -s "$scratch/$2.yaml" "$scratch/changed.yaml"; then
    complain "the change '$3' of $2 changes nothing: this check checks nothing"
  fi
  expect_end 1 "$1" "$policy" "$scratch/changed.yaml"
}
expect_breach "runAsNonRoot" base 's/runAsNonRoot: true/runAsNonRoot: false/'
expect_breach "runAsUser" base 's/runAsUser: 10001/runAsUser: 0/'
expect_breach "seccompProfile" base 's/type: RuntimeDefault/type: Unconfined/'
expect_breach "token is mounted" base 's/automountServiceAccountToken: false/enableX: false/'
expect_breach "file system is writable" base 's/readOnlyRootFilesystem: true/readOnlyRootFilesystem: false/'
expect_breach "privileges" base 's/allowPrivilegeEscalation: false/allowPrivilegeEscalation: true/'
expect_breach "capabilities are left" base 's/- ALL$/- NET_RAW/'
expect_breach "requests has no memory" base '/requests:/,/memory:/ s/memory:/x:/'
expect_breach "limits has no cpu" base '/limits:/,/cpu:/ s/cpu:/x:/'
expect_breach "no tag of one version" base 's/image: zeroshard:.*/image: zeroshard:latest/'
expect_breach "livenessProbe does not ask the health port" base '/livenessProbe:/,/port:/ s/port: .*/port: 7070/'
expect_breach "livenessProbe does not ask for service" base '/livenessProbe:/,/port:/ s/( *)port: .*/&\n\1service: ready/'
expect_breach "startupProbe waits less" base 's/failureThreshold: 1[0-9]*/failureThreshold: 3/'
expect_breach "health-listen is not the port" base 's/health-listen=0.0.0.0/health-listen=127.0.0.1/'
expect_breach "terminationGracePeriodSeconds 40 is less than --shutdown-grace 30 and 22" base \
  's/terminationGracePeriodSeconds: 60/terminationGracePeriodSeconds: 40/'
expect_breach "terminationGracePeriodSeconds 60 is less than --shutdown-grace 50 and 12" base \
  's/STORE_SHUTDOWN_GRACE: .*/STORE_SHUTDOWN_GRACE: "50"/'
expect_breach "memory-limit is not below" base 's/STORE_MEMORY: .*/STORE_MEMORY: 8GiB/'
expect_breach "nvme-limit is not below" base 's/STORE_NVME: .*/STORE_NVME: 100GiB/'
expect_breach "names an unknown variable" base 's/ZEROSHARD_DEVICE: cpu/OTHER: cpu/'
expect_breach "no claim" base '/kind: PersistentVolumeClaim/,/---/ s/name: zeroshard-shared/name: other/'
expect_breach "volumes are not those" base 's/mountPath: \/tmp/&x/; /mountPath: \/tmpx/,+1 s/name: tmp/name: temp/'
expect_breach "not headless" base 's/publishNotReadyAddresses: true/publishNotReadyAddresses: false/'
expect_breach "no such priority class" base 's/priorityClassName: .*/priorityClassName: other/'
expect_breach "start one after another" base 's/podManagementPolicy: .*/podManagementPolicy: OrderedReady/'
expect_breach "PodDisruptionBudget/.*selects no pod" base \
  '/kind: PodDisruptionBudget/,/---/ s/component: store/component: stores/'
expect_breach "lets more than one go" base 's/maxUnavailable: 1/maxUnavailable: 2/'
expect_breach "worker to worker port 50000.*closed" base '/endPort:/ s/65535/40000/'
expect_breach "other to worker port 50000" base \
  '/name: worker$/,/policyTypes/ { /ingress:/,/policyTypes/ s/- from:/- other:/ }'
expect_breach "arriving closed, wanted open" base \
  '/name: coordinator$/,/policyTypes/ s/port: 7070/port: 7077/'
expect_breach "not those that Services name" base '/name: metrics$/,/policyTypes/ s/port: 7071/port: 7072/'
expect_breach "does not deny everything" base \
  '/name: default-deny/,/Egress/ s/podSelector: \{\}/podSelector: {matchLabels: {a: b}}/'
expect_breach "cannot look up names" base 's/protocol: UDP/protocol: SCTP/'
expect_breach "its URI is not the role" tls 's,zeroshard/worker$,zeroshard/coordinator,'
expect_breach "no such issuer" tls '/issuerRef:/,/name:/ s/name: .*/name: other/'
expect_breach "is no certificate for it" tls 's/secretName: zeroshard-store-tls/secretName: zeroshard-worker-tls/'
expect_breach "hide the job's" everything 's/honorLabels: true/honorLabels: false/'
expect_rules_breach() {
  sed -E "$2" "$scratch/everything.yaml" >"$scratch/changed.yaml"
  expect_end 1 "$1" "$policy" --rules "$rules" "$scratch/changed.yaml"
}
expect_rules_breach "zeroshard-stores: its spec is not .*/stores.yml: they differ at groups/0/rules/0/expr" \
  's/(zeroshard_store_memory_used:ratio > 0\.)9/\18/'
expect_rules_breach "zeroshard-jobs: it is not there" 's/name: zeroshard-jobs$/name: zeroshard-job/'
expect_breach "nothing with that port" everything '/Monitor$/,/---/ s/port: metrics/port: metric/'

expect_end 0 "demo" "$zeroshard" validate "$REPOSITORY/deploy/kubernetes/overlays/cpu-demo/demo.yaml"

# The schemas come with the validator, in a cache outside the repository.
venv="${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/zeroshard/${VALIDATOR/==/-}"
if [[ ! -x $venv/bin/kubernetes-validate ]]; then
  mkdir -p "$(dirname "$venv")"
  made="$(mktemp -d "$venv.XXXXXX")"
  if { python3 -m venv "$made" && timeout 240 "$made/bin/python" -m pip install --quiet \
    --disable-pip-version-check --retries 2 --timeout 20 "$VALIDATOR"; } >"$scratch/pip" 2>&1; then
    # Scripts of a venv name its folder: they are called through its python.
    mv -T "$made" "$venv" 2>/dev/null || rm -rf "$made"
  else
    rm -rf "$made"
    ((failures == 0)) || finish
    tail -n 5 "$scratch/pip"
    echo "SKIPPED: $VALIDATOR could not be had from PyPI (its last words are above): the manifests" \
      "were rendered and pass our policy, but NOTHING COMPARED THEM WITH KUBERNETES' SCHEMAS"
    exit 77
  fi
fi

# expect_valid FILE VERSION: every object passes, but those whose kind no Kubernetes has.
expect_valid() {
  local said passed unknown objects
  said="$("$venv/bin/python" "$venv/bin/kubernetes-validate" --strict -k "$2" "$1" 2>&1)" || true
  passed="$(grep -c ' passed for resource ' <<<"$said" || true)"
  unknown="$(grep -cE "Couldn't find schema .* (cert-manager\.io/v1|monitoring\.coreos\.com/v1) " \
    <<<"$said" || true)"
  objects="$(grep -c '^kind:' "$1")"
  ((passed > 0 && passed + unknown == objects)) ||
    complain "$1 against Kubernetes $2: $passed of $objects objects pass: $(grep -v ' passed ' <<<"$said")"
}
for file in "${rendered[@]}"; do
  for version in "${VERSIONS[@]}"; do
    expect_valid "$file" "$version"
  done
done
# The validator is strict.
sed 's/publishNotReadyAddresses/publishNotReadyAddress/' "$scratch/base.yaml" >"$scratch/wrong.yaml"
expect_end 1 'publishNotReadyAddress' \
  "$venv/bin/python" "$venv/bin/kubernetes-validate" --strict "$scratch/wrong.yaml"
finish
