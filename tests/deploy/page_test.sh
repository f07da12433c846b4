#!/usr/bin/env bash
# page_test.sh ZEROSHARD PROBE: the status page of a coordinator whose job trains with its state in
# the stores, in headless Chromium: jobs, curve, members, shard map, checkpoints and events are
# there, and it holds on a desk and on a phone. With ZEROSHARD_SCREENSHOTS=FOLDER the pictures stay.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
zeroshard="$1"
probe="$2"
pictures="${ZEROSHARD_SCREENSHOTS:-$scratch/pictures}"
mkdir -p "$pictures"

for tool in chromium curl; do
  command -v "$tool" >/dev/null || {
    echo "SKIPPED: $tool is not installed; 'deploy/install_deps.sh --tests' installs it"
    exit 77
  }
done

{
  small_job page
  echo 'store: {replicas: 2}'
  echo 'eval: {data: [text], interval_steps: 5, batches: 1}'
  echo 'checkpoint: {dir: checkpoints, interval_steps: 10, keep_last: 2}'
} >"$scratch/job.yaml"

"$zeroshard" local "$scratch/job.yaml" --workers 2 --stores 3 --threads 1 \
  --workdir "$scratch/work" >"$scratch/log" 2>&1 &
local_pid=$!
trap 'kill -9 "$local_pid" 2>/dev/null || true; rm -rf "$scratch"' EXIT

# get PATH: an answer of the coordinator's HTTP port.
get() {
  local address
  address="$(sed -n 's/.*"metrics": *"\([^"]*\)".*/\1/p' "$scratch/work/run/coordinator.port")"
  curl --silent --show-error --fail --max-time 10 "http://$address$1"
}

deadline=$((SECONDS + 90))
until get /api/v1/jobs/page/checkpoints 2>/dev/null | grep -q '"complete":true'; do
  if ! kill -0 "$local_pid" 2>/dev/null || ((SECONDS >= deadline)); then
    cat "$scratch/log" "$scratch"/work/logs/* >&2 || true
    complain "no checkpoint was complete in 90 s, or 'zeroshard local' ended"
    finish
  fi
  sleep 0.2
done

get / >"$scratch/page.html"
grep -q '</html>' "$scratch/page.html" || complain "the page is not whole"
# Whole: a grep that ends early would make curl fail.
get /metrics >"$scratch/metrics"
grep -q '^zeroshard_build_info' "$scratch/metrics" || complain "no metrics beside the page"

address="$(sed -n 's/.*"metrics": *"\([^"]*\)".*/\1/p' "$scratch/work/run/coordinator.port")"
"$probe" "http://$address/" "$pictures" \
  'document.body.dataset.ready === "yes"' \
  'document.title === "page running – ZeroShard"' \
  'document.querySelectorAll("#jobs tbody tr").length === 1' \
  'document.querySelector("path.line").getAttribute("d").split(/[ML]/).length > 10' \
  'document.querySelectorAll("circle.eval-dot").length >= 2' \
  'document.querySelectorAll("#members tbody tr").length === 5' \
  'document.querySelectorAll(".events li").length >= 3' \
  'document.querySelectorAll("[aria-label=Ranks] tbody tr").length === 2' \
  'document.querySelectorAll("[aria-label=\"Stores of this job\"] tbody tr").length === 3' \
  'document.querySelectorAll(".strip rect").length >= 3' \
  'document.querySelectorAll("[aria-label=Checkpoints] tbody tr").length >= 1' \
  'document.querySelectorAll("[aria-label=\"Plan by rank\"] tbody tr").length === 2' \
  'document.querySelector("#problems").hidden' ||
  complain "the page does not hold; it is in the pictures"
for look in desk desk-dark phone phone-dark; do
  [[ -s "$pictures/$look.png" ]] || complain "no picture of $look"
done

kill -TERM "$local_pid"
wait "$local_pid" || true
finish
