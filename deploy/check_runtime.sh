#!/usr/bin/env bash
# Proves that install_deps.sh --runtime names every library that installed programs load. See --help.
set -euo pipefail

# shellcheck source=deploy/bare_root.sh
source "$(dirname "${BASH_SOURCE[0]}")/bare_root.sh"

readonly PROGRAMS=(zeroshard zeroshard-coordinator zeroshard-worker zeroshard-store)

usage() {
  cat <<USAGE
Usage: deploy/check_runtime.sh [--build FOLDER] [--mirror URL]

Makes a bare Debian 12 system with debootstrap in a temporary folder, installs there nothing but the
packages of 'deploy/install_deps.sh --runtime' and, with 'cmake --install', the four programs, and
trains a small job there on two workers and a shard store. So an image made of that list (deploy/docker)
lacks no library. Takes root, a Debian mirror, and a build on Debian 12.

  --build FOLDER  what to install (default: build, as tests/run.sh builds it); the programs are built
                  there where they are not up to date
  --mirror URL    take Debian from URL alone, not from the sources apt is configured with
  --help          this text

The bare base system is kept as deploy/check_fresh.sh says.
USAGE
}

build="$REPOSITORY/build" mirror=''
parse_options 'build=a folder' 'mirror=a URL' -- "$@"

make_bare_root "$mirror"
advice="If a library is missing there, add its package to RUNTIME_PACKAGES in deploy/install_deps.sh"

install_programs() {
  configure_once "$build" &&
    cmake --build "$build" --parallel "$(build_jobs)" --target "${PROGRAMS[@]}" &&
    DESTDIR="$root" cmake --install "$build" --prefix /usr/local --strip
}
say "build and install into the bare system"
install_programs >"$work/log" 2>&1 || {
  tail -n 40 "$work/log" >&2
  fail "the programs could not be built and installed (the end of the output is above)"
}
for program in "${PROGRAMS[@]}"; do
  [[ -x $root/usr/local/bin/$program ]] || fail "cmake --install left no /usr/local/bin/$program"
done

# Before the packages are there, so that a base that has them all by itself is noticed.
if in_root zeroshard version >/dev/null 2>&1; then
  fail "zeroshard starts in the bare system without any package: this check checks nothing"
fi
install -D "$REPOSITORY/deploy/install_deps.sh" "$root/src/install_deps.sh"
in_root_logged "install_deps.sh --runtime" /src/install_deps.sh --runtime
for program in "${PROGRAMS[@]}"; do
  in_root_logged "$program --help" "$program" --help
  grep -q 'Usage' "$work/log" || fail "'$program --help' explains nothing: $(cat "$work/log")"
done

cat >"$root/job.yaml" <<'JOB'
name: runtime
model: {architecture: gpt2, hidden_size: 64, layers: 1, heads: 1, sequence_length: 16, vocab_size: 256}
data: {train: [/usr/share/common-licenses], tokenizer: bytes}
resources: {workers: 2}
train_batch_size: 4
train_micro_batch_size_per_gpu: 2
steps: 10
optimizer: {type: AdamW}
bf16: {enabled: true}
zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}
checkpoint: {dir: checkpoints, interval_steps: 5}
JOB
# As in the image: not root, and nothing is written but in its own folder.
in_root_logged "a job on two workers" bash -c \
  'install -d -o 10001 -g 10001 /work && exec setpriv --reuid 10001 --regid 10001 --clear-groups \
   timeout 120 zeroshard local /job.yaml --workers 2 --stores 1 --threads 1 --workdir /work'
steps="$(wc -l <"$root/work/jobs/runtime/history.jsonl")"
[[ $steps == 10 ]] || fail "the job's history has $steps steps, wanted 10"
say "a bare Debian 12 with the packages of install_deps.sh --runtime trains with the installed programs"
