# shellcheck shell=bash
# Sourced by the scripts of this folder, tests/run.sh and .ci/run; sets nothing but functions and
# the constant below.

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
readonly REPOSITORY

# Prints a message under the name of the calling script and ends it.
fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# parse_options NAME[=WHAT]... -- ARGUMENTS...: sets $NAME to what follows --NAME, which "takes WHAT", or,
# without WHAT, to yes. --help ends the script with what its function usage prints, anything else with
# an error.
parse_options() {
  local known=() option name what
  while [[ $1 != -- ]]; do
    known+=("$1")
    shift
  done
  shift
  while (($#)); do
    if [[ $1 == -h || $1 == --help ]]; then
      usage
      exit 0
    fi
    option=''
    for name in "${known[@]}"; do
      [[ $1 != "--${name%%=*}" ]] || option="$name"
    done
    [[ -n $option ]] ||
      fail "unknown argument '$1'; see $(realpath --relative-to="$REPOSITORY" "$0") --help"
    name="${option%%=*}" what="${option#*=}"
    if [[ $option == *=* ]]; then
      [[ -n ${2-} ]] || fail "--$name takes $what"
      printf -v "$name" '%s' "$2"
      shift
    else
      printf -v "$name" yes
    fi
    shift
  done
}

# Prints how many compilers may run at once: one a core, and about 1.5 GiB of memory for each, which
# is what the largest generated sources take.
build_jobs() {
  local cores memory_kib jobs
  cores="$(nproc)"
  memory_kib="$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)"
  jobs=$((${memory_kib:-1572864} / 1572864))
  ((jobs <= cores)) || jobs=$cores
  ((jobs >= 1)) || jobs=1
  echo "$jobs"
}

# configure_once FOLDER [CMAKE ARGUMENTS...]: configures the build folder FOLDER with Ninja, and with
# ccache where it is installed. A folder that is configured already is left alone: its own build
# files run CMake again when that is needed.
configure_once() {
  local folder="$1" launcher=()
  shift
  # The cache then serves every checkout of the same sources, wherever it lies.
  export CCACHE_BASEDIR="$REPOSITORY" CCACHE_NOHASHDIR=true
  [[ -f $folder/build.ninja ]] && return
  if command -v ccache >/dev/null; then
    launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  fi
  cmake -G Ninja -S "$REPOSITORY" -B "$folder" "${launcher[@]}" "$@"
}

# run_tests FOLDER [CTEST ARGUMENTS...]: the tests of a build folder. One that ran out of time is run
# once more and named at the end: on a loaded machine that has been seen once in some ten thousand
# tests. Twice is a failure.
run_tests() {
  local folder="$1" log status=0
  shift
  log="$(mktemp)"
  ctest --test-dir "$folder" --parallel "$(nproc)" --output-on-failure --no-tests=error \
    --repeat after-timeout:2 "$@" | tee "$log" || status=$?
  sed -n 's/^.*Test *#[0-9]*: \([^ ]*\) .*\*\*\*Timeout.*$/\1/p' "$log" | sort -u | while read -r name; do
    echo "$name ran out of time; $folder/Testing/Temporary/LastTest.log has its output and stacks"
  done
  rm -f "$log"
  return "$status"
}
