#!/usr/bin/env bash
# From a bare Debian 12 to a trained language model. See --help.
set -euo pipefail

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

readonly JOB_FILE="$REPOSITORY/deploy/jobs/licences.yaml"
readonly JOB_NAME=licences WORKERS=2 STORES=1
readonly PROGRAMS=(zeroshard zeroshard-coordinator zeroshard-worker zeroshard-store)

usage() {
  cat <<USAGE
Usage: deploy/quickstart.sh [--workdir DIR] [TEXT...]

Installs the Debian packages that are missing (that alone takes root), builds ZeroShard, starts a
coordinator, $WORKERS workers and a shard store on this machine, and trains a small GPT-2 with
ZeRO-3 on two of its cores.

  TEXT           files or folders to learn from, read byte by byte (default: the licence texts in
                 /usr/share/common-licenses)
  --workdir DIR  where history and logs go (default: \$XDG_STATE_HOME/zeroshard/quickstart, or
                 ~/.local/state/zeroshard/quickstart)
  --help         this text

The exit code is 0 if the job completed and its loss fell. The job is deploy/jobs/licences.yaml.
USAGE
}

misuse() {
  printf 'quickstart.sh: %s; see deploy/quickstart.sh --help\n' "$*" >&2
  exit 2
}

workdir="${XDG_STATE_HOME:-${HOME:-/root}/.local/state}/zeroshard/quickstart"
texts=()
while (($#)); do
  case "$1" in
    --workdir)
      [[ -n ${2-} ]] || misuse "--workdir takes a folder"
      workdir="$2"
      shift
      ;;
    --workdir=*) workdir="${1#*=}" ;;
    -h | --help)
      usage
      exit 0
      ;;
    --)
      shift
      texts+=("$@")
      break
      ;;
    -*) misuse "unknown option '$1'" ;;
    *) texts+=("$1") ;;
  esac
  shift
done

# The texts as a YAML list of absolute, quoted paths, checked before anything is installed.
train=''
for text in "${texts[@]}"; do
  [[ -e $text ]] || misuse "no such file or folder: '$text'"
  [[ -r $text && (! -d $text || -x $text) ]] || misuse "cannot read '$text'"
  [[ $text != *$'\n'* ]] || misuse "a path with a line break cannot be named in a job file: '$text'"
  text="$(realpath -- "$text")"
  text="${text//\\/\\\\}"
  train+="${train:+, }\"${text//\"/\\\"}\""
done
if ((${#texts[@]} == 0)) && [[ ! -d /usr/share/common-licenses ]]; then
  misuse "this system has no /usr/share/common-licenses; name a text to learn from"
fi
mkdir -p -- "$workdir" || misuse "cannot make the folder '$workdir'"
workdir="$(cd -- "$workdir" && pwd -P)"
[[ -w $workdir ]] || misuse "cannot write to '$workdir'"

say() {
  printf '%s\n' "$*"
}

# follow_build LOG: one line with the build's progress, until this script ends it or ends itself.
follow_build() {
  local now shown=''
  while kill -0 $$ 2>/dev/null; do
    now="$(grep -o '^\[[0-9]*/[0-9]*\]' "$1" 2>/dev/null | tail -n 1 || true)"
    # Ninja counts its own look at the source folders as two steps.
    if [[ -n $now && $now != *"/2]" && $now != "$shown" ]]; then
      printf '\r%s\033[K' "$now"
      shown="$now"
    fi
    sleep 0.5
  done
}

# build_programs FOLDER: builds the four programs, without the compiler's output.
build_programs() {
  local folder="$1" log="$1/quickstart.log" follower='' status=0
  mkdir -p "$folder"
  : >"$log"
  if [[ -t 1 ]]; then
    follow_build "$log" &
    follower=$!
  fi
  {
    configure_once "$folder" &&
      cmake --build "$folder" --parallel "$(build_jobs)" --target "${PROGRAMS[@]}"
  } >"$log" 2>&1 || status=$?
  if [[ -n $follower ]]; then
    kill "$follower"
    wait "$follower" 2>/dev/null || true
    printf '\r\033[K'
  fi
  if ((status != 0)); then
    tail -n 40 "$log" >&2
    fail "the build failed; the end of its output is above, all of it is in $log"
  fi
}

"$REPOSITORY/deploy/install_deps.sh"

build="$REPOSITORY/build"
if ! mkdir -p "$build" 2>/dev/null || [[ ! -w $build ]]; then
  # A folder for each checkout, as a build folder belongs to one source tree.
  build="${XDG_CACHE_HOME:-$HOME/.cache}/zeroshard/build-$(cksum <<<"$REPOSITORY" | cut -d' ' -f1)"
fi
zeroshard="$build/client/zeroshard"
[[ -x $zeroshard ]] || say "Building in $build: this takes minutes, once"
started=$SECONDS
build_programs "$build"
say "Built in $build, in $((SECONDS - started)) s"

settings=()
[[ -z $train ]] || settings=(--set "data.train=[$train]")
say "Training $JOB_FILE on ${train:-/usr/share/common-licenses}"
status=0
# --fresh: an earlier quickstart may have learnt another text.
"$zeroshard" local "$JOB_FILE" --workers "$WORKERS" --stores "$STORES" --workdir "$workdir" --fresh \
  "${settings[@]}" || status=$?
((status == 0)) || fail "the job did not complete (exit code $status); its logs are under $workdir"

# The job's history is one JSON object a line; the program above has said what is in it.
history="$workdir/jobs/$JOB_NAME/history.jsonl"
[[ -s $history ]] || fail "the job completed but left no $history"
loss_of() {
  sed -nE 's/.*"loss" *: *([^,}]+).*/\1/p'
}
first="$(head -n 1 "$history" | loss_of)"
last="$(tail -n 1 "$history" | loss_of)"
awk -v first="$first" -v last="$last" 'BEGIN {exit !(last + 0 < first + 0)}' ||
  fail "the loss did not fall: ${first:-none} at first, ${last:-none} at last, see $history"

# Quoted, so that every line can be pasted into a shell.
here="$(printf %q "$REPOSITORY")"
program="$(printf %q "$zeroshard")"
into="--workdir $(printf %q "$workdir")"
checkpoints="$(printf %q "$workdir/checkpoints/$JOB_NAME")"
cat <<NEXT

What to try next:

  What the model has learnt, and its weights as a Hugging Face folder:
    $program generate --model $checkpoints --prompt 'The ' --max-tokens 100
    $program export $checkpoints ./licences-model

  Your own text, files or folders:
    $here/deploy/quickstart.sh $here/README.md $here/worker

  ZeRO-1 on two workers, then ZeRO-3 on one: with 'deterministic' the losses are the same to the bit:
    $program local $here/deploy/jobs/licences.yaml --workers 2 $into \\
      --set name=two --set deterministic=true --set zero_optimization.stage=1
    $program local $here/deploy/jobs/licences.yaml --workers 1 $into \\
      --set name=one --set deterministic=true

  A Llama, with metrics where they can be scraped (http://127.0.0.1:9101/metrics is the first worker's):
    $program local $here/deploy/jobs/llama.yaml --workers 2 $into --metrics-base-port 9100

  A job of your own, and a cluster of separate processes: $here/README.md
NEXT
