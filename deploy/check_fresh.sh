#!/usr/bin/env bash
# Proves that install_deps.sh names every package the build needs. See --help.
set -euo pipefail

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

readonly SUITE=bookworm
readonly BASE_MAX_AGE_DAYS=7

usage() {
  cat <<USAGE
Usage: deploy/check_fresh.sh [--mirror URL]

Makes a bare Debian 12 system with debootstrap in a temporary folder, runs deploy/install_deps.sh in
it, configures this checkout there, builds the client and runs 'zeroshard version'. A machine that
already has a package hides that the list lacks it; this does not. Takes root and a Debian mirror.

  --mirror URL  take Debian from URL alone, not from the sources apt is configured with
  --help        this text

The bare base system (nothing from install_deps.sh) is kept for $BASE_MAX_AGE_DAYS days in
\$XDG_CACHE_HOME/zeroshard, or ~/.cache/zeroshard; delete it to start from the mirror. The compiler
cache is shared with this machine's ccache.
USAGE
}

mirror=''
while (($#)); do
  case "$1" in
    --mirror)
      [[ -n ${2-} ]] || fail "--mirror takes a URL"
      mirror="$2"
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) fail "unknown argument '$1'; see deploy/check_fresh.sh --help" ;;
  esac
  shift
done

((EUID == 0)) || fail "making a Debian root takes root; run this script as root"
for tool in debootstrap unshare apt-get; do
  command -v "$tool" >/dev/null ||
    fail "'$tool' is not installed; 'deploy/install_deps.sh --tests' installs what this needs"
done

# Mounts are made in a namespace of their own, one for each command (in_root), so that none can be
# left behind, whatever ends the script.
unshare --mount --propagation private --pid --fork true 2>/dev/null ||
  fail "this system does not allow mount namespaces ('unshare --mount --pid --fork true' fails);" \
    "in a container, allow CAP_SYS_ADMIN"

work="$(mktemp -d "${TMPDIR:-/tmp}/zeroshard-fresh.XXXXXXXX")"
readonly work root="$work/root"
trap 'rm -rf --one-file-system -- "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

started=$SECONDS
say() {
  printf 'check_fresh.sh: [%3d s] %s\n' $((SECONDS - started)) "$*"
}

# Lines "URI SUITE COMPONENT" of the Debian sources that apt is configured with; sources of others
# are left out, since they could supply a package that Debian lacks.
debian_sources() {
  # shellcheck disable=SC2016  # apt-get expands these
  apt-get indextargets --format '$(ORIGIN)|$(RELEASE)|$(REPO_URI)|$(COMPONENT)' \
    'Created-By: Packages' |
    awk -F'|' -v suite="$SUITE" '$1 == "Debian" && index($2, suite) == 1 {print $3, $2, $4}' |
    sort -u
}

if [[ -n $mirror ]]; then
  sources="$mirror $SUITE main"
else
  sources="$(debian_sources)"
  if [[ -z $sources ]]; then
    apt-get -q update || fail "'apt-get update' failed (its own message is above)"
    sources="$(debian_sources)"
  fi
  mirror="$(awk -v suite="$SUITE" '$2 == suite && $3 == "main" {print $1; exit}' <<<"$sources")"
  [[ -n $mirror ]] ||
    fail "apt on this machine has no source for Debian $SUITE main; name a mirror with --mirror URL"
fi

# debootstrap downloads with wget, which knows apt's proxy only from its environment.
proxy=''
eval "$(apt-config shell proxy Acquire::http::Proxy)"
[[ -z $proxy || $proxy == DIRECT ]] || export http_proxy="${http_proxy:-$proxy}"

# make_base FILE: the base system as a tar archive, from the mirror.
make_base() {
  say "bare $SUITE from $(sed -E 's,//[^/@]*@,//,' <<<"$mirror")"
  debootstrap --variant=minbase "$SUITE" "$root" "$mirror" >"$work/debootstrap.log" 2>&1 || {
    tail -n 15 "$work/debootstrap.log" >&2
    fail "debootstrap failed (the end of its log is above); is the mirror reachable?" \
      "Another one can be named with --mirror URL"
  }
  mkdir -p "$(dirname "$1")"
  tar --create --one-file-system --numeric-owner --directory="$root" --file="$1.$$" . &&
    mv "$1.$$" "$1"
}

cache="${XDG_CACHE_HOME:-$HOME/.cache}/zeroshard"
base="$cache/$SUITE-minbase-$(dpkg --print-architecture).tar"
mkdir -p "$root"
if [[ -n "$(find "$base" -mtime "-$BASE_MAX_AGE_DAYS" 2>/dev/null)" ]]; then
  say "bare $SUITE from $base"
  tar --extract --numeric-owner --directory="$root" --file="$base"
else
  make_base "$base"
fi

# The same network as this machine: names, certificates, and apt's sources, proxies and keys.
for file in /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt /etc/apt/auth.conf; do
  [[ -f $file ]] && install -D -m 644 "$file" "$root$file"
done
for folder in /etc/apt/auth.conf.d /etc/apt/trusted.gpg.d /etc/apt/keyrings; do
  [[ -d $folder ]] && mkdir -p "$root$folder" && cp -aL "$folder/." "$root$folder/"
done
rm -rf "$root/etc/apt/sources.list.d"
mkdir -p "$root/etc/apt/sources.list.d"
awk '{print "deb", $0}' <<<"$sources" >"$root/etc/apt/sources.list"
# Only how to fetch: this machine's hooks may call programs that a bare system lacks.
apt-config dump | grep '^Acquire::' | grep -v '^Acquire::IndexTargets' \
  >"$root/etc/apt/apt.conf.d/99fetch-as-host"

# The working tree as it is, without what git ignores.
mkdir -p "$root/src"
if git -c safe.directory='*' -C "$REPOSITORY" rev-parse --git-dir >/dev/null 2>&1; then
  git -c safe.directory='*' -C "$REPOSITORY" ls-files -z --cached --others --exclude-standard |
    (cd "$REPOSITORY" && while IFS= read -r -d '' file; do
      [[ -e $file ]] && printf '%s\0' "$file"
    done) | tar --create --directory="$REPOSITORY" --null --files-from=- --file=-
else
  tar --create --directory="$REPOSITORY" --exclude='./build*' --file=- .
fi | tar --extract --no-same-owner --directory="$root/src" --file=-

ccache_folder=''
if command -v ccache >/dev/null; then
  ccache_folder="$(ccache --get-config cache_dir)"
  mkdir -p "$ccache_folder"
fi

# in_root COMMAND...: runs it in the bare system with /proc and the compiler cache, without this
# machine's environment. Everything it leaves running ends with it.
in_root() {
  local keep=() name
  for name in http_proxy https_proxy ftp_proxy no_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY; do
    [[ -z ${!name-} ]] || keep+=("$name=${!name}")
  done
  # shellcheck disable=SC2016  # expanded by the inner shell
  unshare --mount --propagation private --pid --fork --kill-child -- bash -c '
    set -euo pipefail
    root="$1" ccache_folder="$2"
    shift 2
    mount -t proc proc "$root/proc"
    if [[ -n $ccache_folder ]]; then
      mkdir -p "$root/ccache"
      mount --bind "$ccache_folder" "$root/ccache"
    fi
    exec chroot "$root" "$@"' in_root "$root" "$ccache_folder" \
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 CCACHE_DIR=/ccache \
    "${keep[@]}" "$@"
}

# in_root_logged WHAT COMMAND...: as in_root, with the output in a file that is shown on failure.
in_root_logged() {
  local what="$1"
  shift
  say "$what"
  in_root "$@" >"$work/log" 2>&1 || {
    tail -n 60 "$work/log" >&2
    fail "$what failed in a bare $SUITE (the end of its output is above). If a header, library or" \
      "package is missing there, add it to BUILD_PACKAGES in deploy/install_deps.sh"
  }
}

in_root_logged "install_deps.sh" /src/deploy/install_deps.sh
# shellcheck disable=SC2016  # expanded in the root
in_root_logged "configure" bash -c \
  'set -euo pipefail; source /src/deploy/lib.sh; configure_once /src/build'
# shellcheck disable=SC2016
in_root_logged "build the client" bash -c \
  'set -euo pipefail; source /src/deploy/lib.sh; configure_once /src/build
   cmake --build /src/build --parallel "$(build_jobs)" --target zeroshard'
in_root_logged "zeroshard version" /src/build/client/zeroshard version
[[ -s $work/log ]] || fail "'zeroshard version' printed nothing"
cat "$work/log"
say "a bare Debian 12 with the packages of install_deps.sh configures the project and builds the client"
