#!/usr/bin/env bash
# metrics_test.sh ZEROSHARD: /metrics of a coordinator, a worker and a store, scraped while a job
# runs, has the promised families and passes 'promtool check metrics'; afterwards SIGTERM leaves no
# process behind.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
zeroshard="$1"

for tool in promtool curl; do
  command -v "$tool" >/dev/null || {
    echo "SKIPPED: $tool is not installed; 'deploy/install_deps.sh --tests' installs it"
    exit 77
  }
done

printf 'The quick brown fox jumps over the lazy dog. %.0s' {1..100} >"$scratch/text"
cat >"$scratch/job.yaml" <<'JOB'
name: metrics
model: {architecture: gpt2, hidden_size: 64, layers: 1, heads: 1, sequence_length: 16, vocab_size: 256}
data: {train: [text], tokenizer: bytes}
resources: {workers: 2}
train_batch_size: 4
train_micro_batch_size_per_gpu: 2
steps: 100000000
optimizer: {type: AdamW}
zero_optimization: {stage: 3, stage3_param_persistence_threshold: 0}
JOB

"$zeroshard" local "$scratch/job.yaml" --workers 2 --stores 1 --threads 1 \
  --workdir "$scratch/work" >"$scratch/log" 2>&1 &
local_pid=$!
trap 'kill -9 "$local_pid" 2>/dev/null || true; rm -rf "$scratch"' EXIT

# port NAME KEY: a value of a daemon's port file; empty while it has none.
port() {
  sed -n "s/.*\"$2\": *\"\{0,1\}\([^\",}]*\).*/\1/p" "$scratch/work/run/$1.port" 2>/dev/null || true
}

scrape() {
  curl --silent --show-error --fail --max-time 10 "http://$(port "$1" metrics)/metrics"
}

readonly DAEMONS=(coordinator worker-0 worker-1 store-0)
deadline=$((SECONDS + 90))
until scrape coordinator 2>/dev/null | grep -qE '^zeroshard_job_committed_step\{.*\} [1-9]'; do
  kill -0 "$local_pid" 2>/dev/null || {
    cat "$scratch/log" >&2
    complain "'zeroshard local' ended before the job had run a step"
    finish
  }
  ((SECONDS < deadline)) || {
    cat "$scratch/log" "$scratch"/work/logs/* >&2
    complain "no step was committed in 90 s"
    finish
  }
  sleep 0.2
done

daemon_pids=()
for daemon in "${DAEMONS[@]}"; do
  daemon_pids+=("$(port "$daemon" pid)")
  scrape "$daemon" >"$scratch/$daemon.metrics" || complain "$daemon does not serve /metrics"
  promtool check metrics <"$scratch/$daemon.metrics" >"$scratch/lint" 2>&1 ||
    complain "promtool on $daemon's metrics: $(cat "$scratch/lint")"
done

# expect_families DAEMON NAME...: its metrics have samples of every name.
expect_families() {
  local daemon="$1" name
  shift
  for name in "$@"; do
    grep -qE "^$name(\{|_bucket\{| )" "$scratch/$daemon.metrics" ||
      complain "$daemon exports no $name"
  done
}

expect_families coordinator zeroshard_build_info zeroshard_job_loss zeroshard_job_committed_step \
  zeroshard_job_steps_lost_total zeroshard_job_nonfinite_total zeroshard_job_recovery_seconds
for worker in worker-0 worker-1; do
  expect_families "$worker" zeroshard_build_info zeroshard_worker_memory_bytes \
    zeroshard_worker_collective_bytes_total zeroshard_worker_phase_seconds_total \
    zeroshard_worker_tokens_total
  grep -qE '^zeroshard_worker_tokens_total\{.*\} [1-9]' "$scratch/$worker.metrics" ||
    complain "$worker has run steps and counts no tokens"
done
expect_families store-0 zeroshard_build_info

kill -TERM "$local_pid"
status=0
wait "$local_pid" || status=$?
((status == 143)) || complain "'zeroshard local' ended with $status after SIGTERM, not with 143"
for pid in "${daemon_pids[@]}"; do
  ! kill -0 "$pid" 2>/dev/null || complain "process $pid outlived 'zeroshard local'"
done
finish
