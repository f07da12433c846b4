#!/usr/bin/env bash
# kubernetes_daemons_test.sh ZEROSHARD COORDINATOR STORE WORKER: real daemons take the very flags of
# deploy/kubernetes/base, answer the probes as the manifests ask for them, and, asked to leave in the
# middle of a job, end with exit code 0 within terminationGracePeriodSeconds.
# shellcheck disable=SC2016,SC2317  # names to be replaced, and functions called by name
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
zeroshard="$1"
declare -A program=([coordinator]="$2" [store]="$3" [worker]="$4")
readonly BASE="$REPOSITORY/deploy/kubernetes/base"
declare -A pid=() health=()

cleanup() {
  ((${#pid[@]} == 0)) || kill -9 "${pid[@]}" 2>/dev/null || true
  rm -rf "$scratch"
}
trap cleanup EXIT

# As the pods have it.
set -a
# shellcheck source=deploy/kubernetes/base/config.env
source "$BASE/config.env"
set +a

# args_of KIND NAME: the container's arguments, one a line, with its variables replaced; addresses are
# this host's, with free ports, and the volume is a folder of the test.
args_of() {
  local args name
  args="$(sed -nE 's/^ +- (--[a-z-]+=.*)$/\1/p' "$BASE/$1.yaml")"
  for name in "${!ZEROSHARD_@}"; do
    args="${args//"\$($name)"/${!name}}"
  done
  args="${args//'$(POD_NAME)'/$2}"
  args="${args//'$(CPU_LIMIT)'/1}"
  sed -E -e "s,^--coordinator=.*,--coordinator=${coordinator-}," \
    -e 's,^--advertise-host=.*,--advertise-host=127.0.0.1,' \
    -e 's,=0\.0\.0\.0:[0-9]+$,=127.0.0.1:0,' \
    -e "s,=/var/lib/zeroshard,=$scratch/$2.state," <<<"$args"
}

# start KIND NAME: until it answers health checks.
start() {
  local args deadline=$((SECONDS + 60))
  mapfile -t args < <(args_of "$1" "$2")
  : >"$scratch/$2.log"
  "${program[$1]}" "${args[@]}" >>"$scratch/$2.log" 2>&1 &
  pid[$2]=$!
  until health[$2]="$(sed -nE 's/.*health checks at ([0-9.:]+).*/\1/p' "$scratch/$2.log")" &&
    [[ -n ${health[$2]} ]]; do
    if ! kill -0 "${pid[$2]}" 2>/dev/null || ((SECONDS > deadline)); then
      complain "$2 does not start with the manifest's flags (${args[*]}): $(cat "$scratch/$2.log")"
      finish
    fi
    sleep 0.1
  done
}

# await WHAT COMMAND...: until the command succeeds.
await() {
  local what="$1" deadline=$((SECONDS + 90))
  shift
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < deadline)) || {
      tail -n 20 "$scratch"/*.log >&2
      complain "$what: not within 90 s"
      finish
    }
    sleep 0.2
  done
}

ready() {
  "$zeroshard" health "${health[$1]}" --service ready
}

# leave KIND NAME: SIGTERM, as the kubelet sends it.
leave() {
  local grace before=$SECONDS status=0
  grace="$(sed -nE 's/^ +terminationGracePeriodSeconds: ([0-9]+)$/\1/p' "$BASE/$1.yaml")"
  kill -TERM "${pid[$2]}"
  while kill -0 "${pid[$2]}" 2>/dev/null && ((SECONDS - before <= grace)); do
    sleep 0.1
  done
  if kill -0 "${pid[$2]}" 2>/dev/null; then
    complain "$2 is still there $grace s after SIGTERM: $(tail -n 5 "$scratch/$2.log")"
    kill -9 "${pid[$2]}"
  else
    wait "${pid[$2]}" || status=$?
    ((status == 0)) || complain "$2 ended with $status after SIGTERM: $(tail -n 5 "$scratch/$2.log")"
  fi
  unset "pid[$2]"
  echo "$2 ended $((SECONDS - before)) s after SIGTERM, of $grace"
}

start coordinator coordinator
coordinator="$(sed -nE 's/.*listening on ([0-9.:]+),.*/\1/p' "$scratch/coordinator.log")"
await "the coordinator's readiness" ready coordinator
for pod in "store store-0" "worker worker-0" "worker worker-1" "worker worker-2"; do
  # shellcheck disable=SC2086  # two words
  start $pod
done
for name in store-0 worker-0 worker-1 worker-2; do
  expect_end 0 '^SERVING$' "$zeroshard" health "${health[$name]}"
  await "the readiness of $name" ready "$name"
done

{
  small_job draining
  echo "checkpoint: {dir: $scratch/checkpoints, interval_steps: 1000000}"
} >"$scratch/job.yaml"
expect_end 0 'submitted' "$zeroshard" submit "$scratch/job.yaml" --coordinator "$coordinator"
steps() {
  wc -l <"$scratch/coordinator.state/coordinator/jobs/draining/history.jsonl"
}
steps_beyond() {
  (($(steps) > $1))
}
await "three steps" steps_beyond 2

# Each in the middle of training; in the place of the first worker the third goes on.
rank_zero="$("$zeroshard" status draining --output json --coordinator "$coordinator" |
  grep -oE '"member":"worker-[0-9]"' | head -n 1 | grep -oE 'worker-[0-9]')"
leave worker "$rank_zero"
await "three steps without $rank_zero" steps_beyond $(($(steps) + 2))
# The only store: what nobody else holds is saved first.
leave store store-0
compgen -G "$scratch/checkpoints/step-*/manifest.json" >/dev/null ||
  complain "the store left without a checkpoint of what it alone held"

# Peers come and go: alive all the same, and ready no more without a coordinator.
leave coordinator coordinator
not_ready() {
  local status=0
  ready "$1" || status=$?
  ((status == 1))
}
for name in worker-0 worker-1 worker-2; do
  [[ -n ${pid[$name]-} ]] || continue
  await "$name to be not ready without a coordinator" not_ready "$name"
  expect_end 0 '^SERVING$' "$zeroshard" health "${health[$name]}"
  leave worker "$name"
done

# What the demo's pod runs, on a volume that has checkpoints and a coordinator that knows of none.
start coordinator fresh
ZEROSHARD_COORDINATOR="$(sed -nE 's/.*listening on ([0-9.:]+),.*/\1/p' "$scratch/fresh.log")"
export ZEROSHARD_COORDINATOR
await "the readiness of a fresh coordinator" ready fresh
command="$(sed -n '/>-$/,/env:/ {/>-$/d; /env:/d; p}' "$BASE/../overlays/cpu-demo/train.yaml" |
  sed -e "s,/etc/zeroshard/demo.yaml,$scratch/job.yaml," -e 's/\bdemo\b/draining/')"
PATH="$(dirname "$zeroshard"):$PATH" sh -c "$(tr '\n' ' ' <<<"$command")" >"$scratch/demo.log" 2>&1 &
pid[demo]=$!
goes_on() {
  "$zeroshard" status draining | grep -qE "^went on from +$scratch/checkpoints/step-"
}
await "the demo's job to go on from its checkpoint" goes_on
kill -TERM "${pid[demo]}"
wait "${pid[demo]}" || true
unset "pid[demo]"
leave coordinator fresh
finish
