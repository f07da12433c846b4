#!/usr/bin/env bash
# device_test.sh ZEROSHARD_WORKER ON|OFF: what a worker says, and how it ends, where it cannot have
# the device that it is told to use; ON: it is built with CUDA. Nothing listens where it is sent, so
# a worker that went on to its coordinator would end with 3.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
worker="$1" with_cuda="$2"
options=(--coordinator 127.0.0.1:1 --connect-timeout 1 --listen 127.0.0.1:0
  --metrics-listen 127.0.0.1:0 --port-file "$scratch/ports")

refuse() { # refuse PATTERN OPTION...
  local pattern="$1" lines
  shift
  expect_end 2 "$pattern" timeout 60 "$worker" "${options[@]}" "$@"
  lines="$(timeout 60 "$worker" "${options[@]}" "$@" 2>&1 </dev/null | wc -l)"
  ((lines == 1)) || complain "$lines lines instead of one from: $worker $*"
  [[ ! -e $scratch/ports ]] || complain "it opened its ports before it looked at: $*"
}

refuse '--device is "tpu"; wanted cpu, cuda or cuda:N' --device tpu
for wrong in cuda: cuda:x cuda:-1 cuda1 cuda:99999999999; do
  refuse "--device is \"$wrong\"; wanted" --device "$wrong"
done
refuse '--collectives is "mpi"; wanted nccl or gloo' --collectives mpi
refuse '--collectives nccl takes --device cuda' --collectives nccl
if [[ $with_cuda != ON ]]; then
  refuse '--device cuda: this program was built without CUDA; use --device cpu' --device cuda
elif ! nvidia-smi -L >/dev/null 2>&1; then
  refuse '--device cuda: cuda:0: no usable GPU.*--device cpu' --device cuda
  refuse '--device cuda: cuda:3: no usable GPU' --device cuda:3
  CUDA_VISIBLE_DEVICES=0 refuse 'no usable GPU' --device cuda --collectives gloo
else
  refuse '--device cuda: cuda:99: this process sees .*nvidia-smi -L' --device cuda:99
  CUDA_VISIBLE_DEVICES="" refuse 'no usable GPU.*CUDA_VISIBLE_DEVICES' --device cuda
fi
# The same command with a device that is there goes on to its coordinator.
expect_end 3 "127.0.0.1:1" timeout 60 "$worker" "${options[@]}" --device cpu
finish
