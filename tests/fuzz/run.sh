#!/usr/bin/env bash
# Builds the fuzz targets with clang and runs each for a while. See --help.
set -euo pipefail

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../deploy/lib.sh"

usage() {
  cat <<USAGE
Usage: tests/fuzz/run.sh [--seconds N] [--build-dir DIR] [--keep] [TARGET...]

Builds every target of tests/fuzz (or those named) with libFuzzer and the address and undefined-
behaviour sanitizers in build-fuzz/, and runs each from its own seeds and tests/fuzz/corpus/TARGET.
An input that crashes, takes over 10 s or 2 GiB stays in a folder that is named, and the exit code is 1.

  --seconds N      how long each target runs (15)
  --build-dir DIR  build there
  --keep           then add to the corpus some of what reached new code: up to 30 files of 2 KiB a target
  --help           this text
USAGE
}

seconds=15
build="$REPOSITORY/build-fuzz"
keep=no
targets=()
while (($#)); do
  case "$1" in
    --seconds)
      [[ ${2-} =~ ^[1-9][0-9]*$ ]] || fail "--seconds takes a number of seconds, seen '${2-}'"
      seconds="$2"
      shift
      ;;
    --build-dir)
      [[ -n ${2-} ]] || fail "--build-dir takes a folder"
      build="$2"
      shift
      ;;
    --keep) keep=yes ;;
    -h | --help)
      usage
      exit 0
      ;;
    -*) fail "unknown argument '$1'; see tests/fuzz/run.sh --help" ;;
    *) targets+=("$1") ;;
  esac
  shift
done
for tool in clang clang++; do
  command -v "$tool" >/dev/null ||
    fail "'$tool' is not installed; 'deploy/install_deps.sh --tests' installs what this needs"
done

configure_once "$build" -DZEROSHARD_FUZZ=ON -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
  -DCMAKE_BUILD_TYPE=RelWithDebInfo
if ((${#targets[@]} == 0)); then
  mapfile -t targets < <(cd "$REPOSITORY/tests/fuzz" && printf '%s\n' *_fuzz.cc | sed 's/\.cc$//')
fi
cmake --build "$build" --parallel "$(build_jobs)" --target "${targets[@]}"

work="$(mktemp -d "${TMPDIR:-/tmp}/zeroshard-fuzz.XXXXXXXX")"
readonly work

# run_target NAME: its log, its grown corpus and the input it failed on go below $work/NAME.
run_target() {
  local name="$1" folder="$work/$1" corpus="$REPOSITORY/tests/fuzz/corpus/$1"
  mkdir -p "$folder/seeds" "$folder/grown"
  [[ -d $corpus ]] || corpus="$folder/seeds"
  ZEROSHARD_FUZZ_SEEDS="$folder/seeds" "$build/tests/fuzz/$name" -max_total_time="$seconds" \
    -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="$folder/" \
    "$folder/grown" "$folder/seeds" "$corpus" >"$folder/log" 2>&1
}

# keep_new NAME: of the fewest inputs that reach what all of them reach, some of every size go into
# the corpus.
keep_new() {
  local name="$1" folder="$work/$1" corpus="$REPOSITORY/tests/fuzz/corpus/$1" inputs=() i
  mkdir -p "$corpus" "$folder/merged"
  "$build/tests/fuzz/$name" -merge=1 "$folder/merged" "$corpus" "$folder/seeds" "$folder/grown" \
    >>"$folder/log" 2>&1
  mapfile -t inputs < <(find "$folder/merged" -type f -size -5 -printf '%s %p\n' | sort -n |
    cut -d ' ' -f 2-)
  for ((i = 0; i < 30; ++i)); do
    if ((${#inputs[@]} > 0)); then cp "${inputs[$((i * ${#inputs[@]} / 30))]}" "$corpus/"; fi
  done
}

failed=0
check() {
  local name="$1" status=0
  wait "${running[$name]}" || status=$?
  unset "running[$name]"
  if ((status == 0)); then
    printf '%-20s %s\n' "$name" "$(sed -n 's/^stat::number_of_executed_units: *//p' "$work/$name/log") runs"
    return
  fi
  failed=1
  printf '%s failed (exit code %d); the input and the log are in %s:\n' "$name" "$status" \
    "$work/$name" >&2
  tail -n 40 "$work/$name/log" >&2
}

declare -A running=()
for name in "${targets[@]}"; do
  if ((${#running[@]} >= $(nproc))); then
    for oldest in "${targets[@]}"; do [[ -v running[$oldest] ]] && break; done
    check "$oldest"
  fi
  run_target "$name" &
  running[$name]=$!
done
for name in "${targets[@]}"; do
  if [[ -v running[$name] ]]; then check "$name"; fi
done
((failed == 0)) || exit 1
if [[ $keep == yes ]]; then
  for name in "${targets[@]}"; do keep_new "$name"; done
fi
rm -rf "$work"
