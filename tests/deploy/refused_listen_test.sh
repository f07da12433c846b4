#!/usr/bin/env bash
# refused_listen_test.sh COORDINATOR: a coordinator that cannot listen where it is told to leaves the
# data folder as it is: no term is taken from whoever wrote it last, no folder is made.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
coordinator="$1"

# start FOLDER LISTEN: a coordinator that serves there, in the background as $holder.
start() {
  rm -f "$scratch/ports"
  "$coordinator" --listen "$2" --metrics-listen 127.0.0.1:0 --data-dir "$1" \
    --port-file "$scratch/ports" >"$scratch/log" 2>&1 &
  holder=$!
  local deadline=$((SECONDS + 60))
  until [[ -s $scratch/ports ]]; do
    if ((SECONDS >= deadline)) || ! kill -0 "$holder" 2>/dev/null; then
      cat "$scratch/log" >&2
      complain "the coordinator did not start within 60 s"
      finish
    fi
    sleep 0.1
  done
}
holder=
trap '[[ -z $holder ]] || kill -9 "$holder" 2>/dev/null || true; rm -rf "$scratch"' EXIT

start "$scratch/data" 127.0.0.1:0
kill -TERM "$holder"
wait "$holder" || complain "the coordinator did not end well"
state() { (cd "$scratch/data" && find . -type f -exec sha256sum {} + | sort); }
before="$(state)"
[[ $before == *coordinator.db* ]] || complain "no coordinator.db in: $before"

start "$scratch/other" 127.0.0.1:0
taken="$(sed -n 's/.*"grpc": *"\([^"]*\)".*/\1/p' "$scratch/ports")"

# refuse CODE PATTERN OPTION...: with the folder that is there, and with one that is not.
refuse() {
  local code="$1" pattern="$2" folder
  shift 2
  for folder in data new; do
    expect_end "$code" "$pattern" timeout 60 "$coordinator" --data-dir "$scratch/$folder" "$@"
  done
  [[ $(state) == "$before" ]] || complain "the data folder was changed by: $*"
  [[ ! -e $scratch/new ]] || complain "a data folder was made by: $*"
  rm -rf "$scratch/new"
}
metrics=(--metrics-listen 127.0.0.1:0)
refuse 2 '--listen 0\.0\.0\.0:0: other hosts reach it' --listen 0.0.0.0:0 "${metrics[@]}"
refuse 2 '--listen: address "nonsense": no port' --listen nonsense "${metrics[@]}"
refuse 2 'cannot listen on 192\.0\.2\.1:0 for gRPC' --listen 192.0.2.1:0 --insecure "${metrics[@]}"
refuse 3 "cannot listen on $taken for gRPC: Address already in use" --listen "$taken" "${metrics[@]}"
refuse 3 "cannot listen on $taken for health checks: Address already in use" \
  --listen 127.0.0.1:0 --health-listen "$taken" "${metrics[@]}"
refuse 3 "cannot listen on $taken for metrics: Address already in use" \
  --listen 127.0.0.1:0 --metrics-listen "$taken"
refuse 2 'tls-cert' --listen 127.0.0.1:0 --tls-key /absent "${metrics[@]}"
finish
