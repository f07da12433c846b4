#!/usr/bin/env bash
# Proves that install_deps.sh names every package the build needs. See --help.
set -euo pipefail

# shellcheck source=deploy/bare_root.sh
source "$(dirname "${BASH_SOURCE[0]}")/bare_root.sh"

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
parse_options 'mirror=a URL' -- "$@"

make_bare_root "$mirror"

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

# shellcheck disable=SC2034  # for in_root_logged
advice="If a header, library or package is missing there, add it to BUILD_PACKAGES in deploy/install_deps.sh"
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
