#!/usr/bin/env bash
# store_options_test.sh ZEROSHARD_STORE: what a store says, and how it ends, where its command line
# is wrong. Nothing listens where it is sent, so a store that went on to its coordinator would end
# with 3.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
store="$1"
options=(--coordinator 127.0.0.1:1 --connect-timeout 1 --listen 127.0.0.1:0
  --metrics-listen 127.0.0.1:0 --port-file "$scratch/ports")

refuse() { # refuse PATTERN OPTION...
  local pattern="$1" lines
  shift
  expect_end 2 "^zeroshard-store: $pattern" timeout 60 "$store" "${options[@]}" "$@"
  lines="$( (timeout 60 "$store" "${options[@]}" "$@" 2>&1 || true) </dev/null | wc -l)"
  ((lines == 1)) || complain "$lines lines instead of one from: $store $*"
  [[ ! -e $scratch/ports ]] || complain "it opened its ports before it looked at: $*"
}

refuse '--name: seen an empty value' --name ''
refuse '--nvme-dir: seen an empty value, wanted a folder' --nvme-dir ''
refuse '--memory-limit: seen 0, wanted 1 bytes or more' --memory-limit 0
refuse '--memory-limit: seen -5, wanted' --memory-limit=-5
refuse '--memory-limit: seen lots, wanted' --memory-limit lots
refuse '--memory-limit 1024 bytes: this process alone takes' --memory-limit 1KiB
refuse '--nvme-limit needs --nvme-dir' --nvme-limit 10GiB
# 2^20 elements of a bf16 job with AdamW: three sections of 4 bytes an element, two of 2, each in
# four blocks with a label of 4096 bytes; and six spare sections of 4 bytes and a header.
block=$((2 ** 18))
least=$((3 * 4 * (4 * block + 4096) + 2 * 4 * (2 * block + 4096) + 6 * 4 * (4 * block + 4096) + 4096))
mkdir "$scratch/nvme"
refuse "--nvme-limit: seen 1, wanted $least bytes or more" --nvme-dir "$scratch/nvme" --nvme-limit 1
refuse "--nvme-limit: seen $((least - 1)), wanted" \
  --nvme-dir "$scratch/nvme" --nvme-limit $((least - 1))
touch "$scratch/file"
refuse "--nvme-dir $scratch/file: is there but is no folder" --nvme-dir "$scratch/file"
refuse "--nvme-dir $scratch/file/below: cannot create" --nvme-dir "$scratch/file/below"
if ((EUID != 0)); then
  chmod 500 "$scratch/nvme"
  refuse "--nvme-dir $scratch/nvme: cannot write into" --nvme-dir "$scratch/nvme"
  chmod 700 "$scratch/nvme"
fi

# The same options with values that will do go on to the coordinator.
expect_end 3 'no coordinator at 127.0.0.1:1' timeout 60 "$store" "${options[@]}" --name s0 \
  --memory-limit 1GiB --nvme-dir "$scratch/nvme" --nvme-limit "$least"
finish
