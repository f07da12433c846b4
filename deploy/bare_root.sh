# shellcheck shell=bash
# Sourced by the checks that need a bare Debian 12: makes one with debootstrap in a temporary folder
# that goes when the script ends, and runs commands in it.
#   make_bare_root MIRROR          sets $work (temporary) and $root (in it); MIRROR may be empty
#   in_root COMMAND...             runs it in there
#   in_root_logged WHAT COMMAND... likewise, with the output in $work/log

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

readonly SUITE=bookworm
readonly BASE_MAX_AGE_DAYS=7

started=$SECONDS
say() {
  printf '%s: [%3d s] %s\n' "$(basename "$0")" $((SECONDS - started)) "$*"
}

check_can_make_root() {
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

# find_mirror MIRROR: sets `mirror` and `sources`, from apt's configuration where MIRROR is empty.
find_mirror() {
  mirror="$1"
  if [[ -n $mirror ]]; then
    sources="$mirror $SUITE main"
    return
  fi
  sources="$(debian_sources)"
  if [[ -z $sources ]]; then
    apt-get -q update || fail "'apt-get update' failed (its own message is above)"
    sources="$(debian_sources)"
  fi
  mirror="$(awk -v suite="$SUITE" '$2 == suite && $3 == "main" {print $1; exit}' <<<"$sources")"
  [[ -n $mirror ]] ||
    fail "apt on this machine has no source for Debian $SUITE main; name a mirror with --mirror URL"
}

# make_base FILE: the base system as a tar archive, from the mirror.
make_base() {
  local proxy=''
  # debootstrap downloads with wget, which knows apt's proxy only from its environment.
  eval "$(apt-config shell proxy Acquire::http::Proxy)"
  [[ -z $proxy || $proxy == DIRECT ]] || export http_proxy="${http_proxy:-$proxy}"
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

# The same network as this machine: names, certificates, and apt's sources, proxies and keys.
give_network() {
  local file folder
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
}

make_bare_root() {
  check_can_make_root
  work="$(mktemp -d "${TMPDIR:-/tmp}/zeroshard-root.XXXXXXXX")"
  readonly work root="$work/root"
  trap 'rm -rf --one-file-system -- "$work"' EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  find_mirror "$1"
  local base
  base="${XDG_CACHE_HOME:-$HOME/.cache}/zeroshard/$SUITE-minbase-$(dpkg --print-architecture).tar"
  mkdir -p "$root"
  if [[ -n "$(find "$base" -mtime "-$BASE_MAX_AGE_DAYS" 2>/dev/null)" ]]; then
    say "bare $SUITE from $base"
    tar --extract --numeric-owner --directory="$root" --file="$base"
  else
    make_base "$base"
  fi
  give_network
  ccache_folder=''
  if command -v ccache >/dev/null; then
    ccache_folder="$(ccache --get-config cache_dir)"
    mkdir -p "$ccache_folder"
  fi
}

# Everything that a command leaves running ends with it. It sees /proc, a loopback interface and the
# compiler cache, not this machine's environment.
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
    mkdir -p "$root/dev/shm"
    mount -t tmpfs tmpfs "$root/dev/shm"
    if [[ -n $ccache_folder ]]; then
      mkdir -p "$root/ccache"
      mount --bind "$ccache_folder" "$root/ccache"
    fi
    exec chroot "$root" "$@"' in_root "$root" "$ccache_folder" \
    env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
    CCACHE_DIR=/ccache "${keep[@]}" "$@"
}

# in_root_logged WHAT COMMAND...: what it printed is shown where it fails, with $advice.
in_root_logged() {
  local what="$1"
  shift
  say "$what"
  in_root "$@" >"$work/log" 2>&1 || {
    tail -n 60 "$work/log" >&2
    fail "$what failed in a bare $SUITE (the end of its output is above). ${advice-}"
  }
}
