#!/usr/bin/env bash
# ports_test.sh COORDINATOR WORKER STORE: each daemon whose port another process has, for gRPC or for
# metrics, says so in one line that names the address, and ends with 3.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
coordinator="$1" worker="$2" store="$3"

"$coordinator" --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 --data-dir "$scratch/first" \
  --port-file "$scratch/ports" >"$scratch/log" 2>&1 &
holder=$!
trap 'kill -9 "$holder" 2>/dev/null || true; rm -rf "$scratch"' EXIT
deadline=$((SECONDS + 60))
until [[ -s $scratch/ports ]]; do
  if ((SECONDS >= deadline)) || ! kill -0 "$holder" 2>/dev/null; then
    cat "$scratch/log" >&2
    complain "the coordinator that is to hold the ports did not start within 60 s"
    finish
  fi
  sleep 0.1
done
taken() { sed -n "s/.*\"$1\": *\"\([^\"]*\)\".*/\1/p" "$scratch/ports"; }

# refuse ADDRESS WHAT COMMAND...
refuse() {
  local address="$1" what="$2" lines
  shift 2
  expect_end 3 "cannot listen on $address for $what: Address already in use" timeout 60 "$@"
  lines="$( (timeout 60 "$@" 2>&1 || true) </dev/null | grep -vc ' INFO ' || true)"
  ((lines == 1)) || complain "$lines lines of errors instead of one from: $*"
}

# A port that is taken is found before a coordinator is looked for: there is none at port 1.
for what in gRPC metrics; do
  if [[ $what == gRPC ]]; then
    address="$(taken grpc)"
    options=(--listen "$address" --metrics-listen 127.0.0.1:0)
  else
    address="$(taken metrics)"
    options=(--listen 127.0.0.1:0 --metrics-listen "$address")
  fi
  refuse "$address" "$what" "$coordinator" "${options[@]}" --data-dir "$scratch/second"
  for member in "$worker" "$store"; do
    refuse "$address" "$what" "$member" "${options[@]}" --coordinator 127.0.0.1:1 \
      --connect-timeout 1
  done
done
kill -0 "$holder" || complain "the coordinator that had the ports is gone"
finish
