#!/usr/bin/env bash
# libraries_test.sh ZEROSHARD_WORKER: no worker needs cuBLASLt or NCCL to start, also where it is
# built with CUDA. What it loads by itself when it is told to use a GPU is not in this list.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
worker="$1"

needed="$(ldd "$worker")"
grep -q 'libc\.so' <<<"$needed" || complain "ldd lists no libc of $worker; it printed: $needed"
if unwanted="$(grep -Ei 'cublas|nccl' <<<"$needed")"; then
  complain "$worker is linked with what it should load when a GPU is used: $unwanted"
fi
finish
