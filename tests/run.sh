#!/usr/bin/env bash
# Builds everything in build/ and runs the tests; arguments go to ctest:
#   tests/run.sh                   every test
#   tests/run.sh -R trainer        those whose names match
#   tests/run.sh -LE 'cluster|slow'  only the quick ones, without processes
set -euo pipefail

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/lib.sh"

if [[ ${1-} == -h || ${1-} == --help ]]; then
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
  exit 0
fi

build="$REPOSITORY/build"
configure_once "$build"
cmake --build "$build" --parallel "$(build_jobs)"

# ctest shows nothing of what passes; what was killed, when and from which seeds is to be seen.
summaries="$build/tests/faults/summaries"
rm -rf "$summaries"
status=0
run_tests "$build" "$@" || status=$?
for summary in "$summaries"/*.txt; do
  if [[ -f $summary ]]; then cat "$summary"; fi
done
exit "$status"
