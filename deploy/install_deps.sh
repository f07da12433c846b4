#!/usr/bin/env bash
# Installs the Debian 12 packages that ZeroShard is built from. See --help.
set -euo pipefail

# What it takes to configure, build and run everything. deploy/check_fresh.sh proves this list on a
# bare system. The README of this folder says what each package is for.
readonly BUILD_PACKAGES=(
  cmake ninja-build g++ ccache
  protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libgrpc++-dev libssl-dev libabsl-dev
  prometheus-cpp-dev libcurl4-openssl-dev libmicrohttpd-dev zlib1g-dev
  libgloo-dev libdnnl-dev ocl-icd-opencl-dev libhwy-dev
  libsqlite3-dev libyaml-cpp-dev nlohmann-json3-dev libcli11-dev
  pkg-config libisal-dev libpcre2-dev libutf8proc-dev liburing-dev
  libgtest-dev libgmock-dev libbenchmark-dev
)
# The libraries that installed programs load. deploy/check_runtime.sh proves this list.
readonly RUNTIME_PACKAGES=(
  libstdc++6 libgomp1
  libprotobuf32 libgrpc++1.51 libabsl20220623 libssl3
  libprometheus-cpp-core1.0 libmicrohttpd12 zlib1g
  libgloo0 libdnnl2 libhwy1
  libsqlite3-0 libyaml-cpp0.7
  libisal2 libpcre2-8-0 libutf8proc2 liburing2
)
# What only the checks in tests/ and .ci/ call.
readonly TEST_PACKAGES=(
  chromium clang clang-format curl debootstrap jq libclang-rt-14-dev prometheus python3-venv shellcheck
)

usage() {
  cat <<USAGE
Usage: deploy/install_deps.sh [--tests | --runtime] [--list | --check]

Installs the Debian 12 packages that ZeroShard is built from, or runs on. Does nothing, and needs no
root, when all of them are there already.

  --tests   also what only the tests and .ci/run call: ${TEST_PACKAGES[*]}
  --runtime only the libraries that built programs (cmake --install) need to run
  --list    print the packages, one a line, and stop
  --check   print the packages that are missing and stop; exit code 1 if there are any
  --help    this text
USAGE
}

fail() {
  printf 'install_deps.sh: %s\n' "$*" >&2
  exit 1
}

# Sets `missing` to those of `packages` that are not installed, for any architecture.
find_missing() {
  local package
  missing=()
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed ||
      missing+=("$package")
  done
}

apt() {
  DEBIAN_FRONTEND=noninteractive apt-get -q -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 "$@"
}

mode=install tests='' runtime=''
while (($#)); do
  case "$1" in
    --tests) tests=1 ;;
    --runtime) runtime=1 ;;
    --list) mode=list ;;
    --check) mode=check ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) fail "unknown argument '$1'; see deploy/install_deps.sh --help" ;;
  esac
  shift
done

[[ -z $tests || -z $runtime ]] || fail "--tests and --runtime exclude each other: tests are built"
packages=("${BUILD_PACKAGES[@]}")
[[ -z $tests ]] || packages+=("${TEST_PACKAGES[@]}")
[[ -z $runtime ]] || packages=("${RUNTIME_PACKAGES[@]}")

if [[ $mode == list ]]; then
  printf '%s\n' "${packages[@]}"
  exit 0
fi

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  fail "no dpkg and apt-get here; ZeroShard is built from Debian 12 packages. On another system" \
    "install the equivalents of: ${packages[*]}"
fi

find_missing
if ((${#missing[@]} == 0)); then
  [[ $mode == check ]] || echo "install_deps.sh: all ${#packages[@]} packages are installed"
  exit 0
fi
if [[ $mode == check ]]; then
  printf '%s\n' "${missing[@]}"
  exit 1
fi

if ((EUID != 0)); then
  fail "missing: ${missing[*]}. Installing packages takes root: run this script as root, or ask for" \
    "'apt-get install ${missing[*]}'"
fi

# The versions are Debian 12's; a newer release has other ones, which may not build together.
# shellcheck source=/dev/null
release="$(. /etc/os-release && echo "${ID:-unknown} ${VERSION_ID:-}")"
[[ $release == "debian 12" ]] ||
  echo "install_deps.sh: written for debian 12, this is $release: trying all the same" >&2

echo "install_deps.sh: installing ${#missing[@]} of ${#packages[@]} packages: ${missing[*]}"
apt update || fail "'apt-get update' failed (its own message is above): check the network and the" \
  "sources in /etc/apt"
for package in "${missing[@]}"; do
  apt-cache show "$package" >/dev/null 2>&1 ||
    fail "the configured sources have no package '$package'; ZeroShard needs Debian 12 (bookworm)" \
      "main in /etc/apt/sources.list or /etc/apt/sources.list.d"
done
apt install -y --no-install-recommends "${missing[@]}" ||
  fail "'apt-get install' failed (its own message is above); after mending it, run this again"

find_missing
((${#missing[@]} == 0)) || fail "apt-get reported success but these are not installed: ${missing[*]}"
echo "install_deps.sh: all ${#packages[@]} packages are installed"
