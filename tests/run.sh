#!/usr/bin/env bash
# Builds everything in build/ and runs the tests; arguments go to ctest:
#   tests/run.sh                   every test
#   tests/run.sh -R trainer        those whose names match
#   tests/run.sh -LE 'cluster|slow'  only the quick ones, without processes
set -euo pipefail

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../deploy/lib.sh"

build="$REPOSITORY/build"
configure_once "$build"
cmake --build "$build" --parallel "$(build_jobs)"
exec ctest --test-dir "$build" --parallel "$(nproc)" --output-on-failure --no-tests=error "$@"
