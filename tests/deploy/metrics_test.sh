#!/usr/bin/env bash
# metrics_test.sh ZEROSHARD: /metrics of a coordinator, workers and stores, scraped while a job with
# its state in the stores runs, has the promised families, counts what happened and passes 'promtool
# check metrics'; afterwards SIGTERM leaves no process behind.
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

{
  small_job metrics
  echo 'store: {replicas: 2}'
} >"$scratch/job.yaml"

"$zeroshard" local "$scratch/job.yaml" --workers 2 --stores 2 --threads 1 \
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

readonly DAEMONS=(coordinator worker-0 worker-1 store-0 store-1)
deadline=$((SECONDS + 90))
# The third is not committed before every store has applied the second. Members are counted twice a
# second.
until scrape coordinator >"$scratch/coordinator" 2>/dev/null &&
  grep -qE '^zeroshard_job_committed_step\{.*\} ([3-9]|[1-9][0-9]+)$' "$scratch/coordinator" &&
  grep -E '^zeroshard_coordinator_members\{.*state="running"' "$scratch/coordinator" |
  awk '$NF > 0 {++kinds} END {exit kinds < 2}'; do
  kill -0 "$local_pid" 2>/dev/null || {
    cat "$scratch/log" >&2
    complain "'zeroshard local' ended before the job had run three steps"
    finish
  }
  ((SECONDS < deadline)) || {
    cat "$scratch/log" "$scratch"/work/logs/* >&2
    complain "three steps were not committed, or no worker and no store counted as running, in 90 s"
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

# values DAEMON NAME [LABEL="VALUE"...]: the values of the samples of that name with those labels.
values() {
  local lines label
  lines="$(grep -E "^$2(\{| )" "$scratch/$1.metrics" || true)"
  for label in "${@:3}"; do
    lines="$(grep -E "[{,]${label}[,}]" <<<"$lines" || true)"
  done
  awk 'NF {print $NF}' <<<"$lines"
}

# expect_samples, expect_positive, expect_zero DAEMON NAME [LABEL="VALUE"...]: there are such
# samples; all of them are above 0; all are 0.
expect_samples() {
  [[ -n $(values "$@") ]] || complain "$1 exports no ${*:2}"
}
expect_positive() {
  expect_samples "$@"
  values "$@" | awk '$1 <= 0 {bad = 1} END {exit bad}' ||
    complain "$1: ${*:2} is $(values "$@" | paste -sd' '), wanted more than 0"
}
expect_zero() {
  expect_samples "$@"
  values "$@" | awk '$1 != 0 {bad = 1} END {exit bad}' ||
    complain "$1: ${*:2} is $(values "$@" | paste -sd' '), wanted 0"
}

for daemon in "${DAEMONS[@]}"; do
  expect_positive "$daemon" zeroshard_build_info
  for name in cpu_seconds_total open_fds max_fds virtual_memory_bytes resident_memory_bytes \
    start_time_seconds; do
    expect_positive "$daemon" "process_$name"
  done
  # Health checks are answered by all; nobody has asked.
  for code in OK CANCELLED INTERNAL UNAVAILABLE; do
    expect_zero "$daemon" zeroshard_grpc_server_handled_total \
      'service="grpc.health.v1.Health"' 'method="Check"' "code=\"$code\""
  done
  expect_zero "$daemon" zeroshard_grpc_server_started_total 'method="unknown"'
done
cluster='service="zeroshard.v1.Cluster"'
expect_positive coordinator zeroshard_grpc_server_handled_total "$cluster" 'method="CommitStep"' \
  'code="OK"'
expect_zero coordinator zeroshard_grpc_server_handled_total "$cluster" 'method="CommitStep"' \
  'code="INTERNAL"'
expect_positive coordinator zeroshard_grpc_server_handling_seconds_count "$cluster" \
  'method="CommitStep"'
# Four members are connected, and go on to be.
expect_positive coordinator zeroshard_grpc_server_started_total "$cluster" 'method="Session"'
expect_zero coordinator zeroshard_grpc_server_handled_total "$cluster" 'method="Session"'
for store in store-0 store-1; do
  expect_positive "$store" zeroshard_grpc_server_started_total \
    'service="zeroshard.v1.ShardStore"' 'method="Bulk"'
done

for name in zeroshard_job_loss zeroshard_job_committed_step zeroshard_coordinator_term \
  zeroshard_coordinator_step_commit_seconds_count; do
  expect_positive coordinator "$name"
done
expect_positive coordinator zeroshard_jobs 'state="running"'
for state in queued placing recovering; do
  expect_zero coordinator zeroshard_jobs "state=\"$state\""
done
for state in completed failed cancelled; do
  expect_zero coordinator zeroshard_jobs_ended_total "state=\"$state\""
done
for name in zeroshard_job_steps zeroshard_job_workers zeroshard_job_workers_wanted \
  zeroshard_job_generations_total; do
  expect_positive coordinator "$name" 'job="metrics"'
done
expect_zero coordinator zeroshard_coordinator_barrier_missing 'job="metrics"'
for kind in worker store; do
  expect_positive coordinator zeroshard_coordinator_members "kind=\"$kind\"" 'state="running"'
done
# Counted from 0 on: nothing went wrong.
for name in zeroshard_job_steps_lost_total zeroshard_job_nonfinite_total \
  zeroshard_job_recovery_seconds_count; do
  expect_zero coordinator "$name"
done

for rank in 0 1; do
  labels=('job="metrics"' "rank=\"$rank\"")
  # Which worker has which rank is the coordinator's choice.
  worker="worker-0"
  [[ -n $(values worker-0 zeroshard_worker_tokens_total "${labels[@]}") ]] || worker="worker-1"
  expect_positive "$worker" zeroshard_worker_tokens_total "${labels[@]}"
  expect_positive "$worker" zeroshard_worker_steps_total "${labels[@]}"
  expect_positive "$worker" zeroshard_worker_device_memory_bytes
  # What is allocated once is what was planned. A step's traffic is looked at where steps can be told
  # apart: a scrape comes in the middle of one.
  for kind in parameters gradients optimizer activations; do
    planned="$(values coordinator zeroshard_job_plan_memory_bytes "${labels[@]}" "kind=\"$kind\"")"
    seen="$(values "$worker" zeroshard_worker_memory_bytes "${labels[@]}" "kind=\"$kind\"")"
    [[ -n $planned && $planned == "$seen" ]] ||
      complain "rank $rank holds $seen bytes of $kind; its plan says $planned"
  done
  expect_positive coordinator zeroshard_job_plan_traffic_bytes "${labels[@]}" 'stage="2"' \
    'op="reduce_scatter"' 'phase="backward"'
  for direction in push pull; do
    expect_positive coordinator zeroshard_job_plan_offload_bytes "${labels[@]}" \
      "direction=\"$direction\""
  done
  for kind in parameters gradients activations buffers; do
    expect_positive "$worker" zeroshard_worker_memory_bytes "${labels[@]}" "kind=\"$kind\""
  done
  # All of it is in the stores.
  expect_zero "$worker" zeroshard_worker_memory_bytes "${labels[@]}" 'kind="optimizer"'
  for direction in push pull; do
    expect_positive "$worker" zeroshard_worker_offload_bytes_total "${labels[@]}" \
      "direction=\"$direction\""
  done
  for phase in data forward backward communication offload; do
    expect_positive "$worker" zeroshard_worker_phase_seconds_total "${labels[@]}" \
      "phase=\"$phase\""
  done
  for phase in optimizer barrier; do
    expect_samples "$worker" zeroshard_worker_phase_seconds_total "${labels[@]}" \
      "phase=\"$phase\""
  done
  for op in all_gather reduce_scatter all_reduce broadcast send; do
    for phase in forward backward step; do
      expect_samples "$worker" zeroshard_worker_collective_bytes_total "${labels[@]}" \
        "op=\"$op\"" "phase=\"$phase\""
    done
  done
  expect_positive "$worker" zeroshard_worker_collective_bytes_total "${labels[@]}" \
    'op="reduce_scatter"' 'phase="backward"'
done

for store in store-0 store-1; do
  for kind in master exp_avg exp_avg_sq parameters; do
    expect_positive "$store" zeroshard_store_memory_bytes "kind=\"$kind\""
  done
  # Between two steps there is none.
  expect_samples "$store" zeroshard_store_memory_bytes 'kind="staging"'
  # Each rank pulls from one of the two.
  expect_positive "$store" zeroshard_store_traffic_bytes_total 'direction="push"'
  expect_samples "$store" zeroshard_store_traffic_bytes_total 'direction="pull"'
  expect_zero "$store" zeroshard_store_traffic_bytes_total 'direction="copy"'
  for name in zeroshard_store_update_seconds_count zeroshard_store_update_seconds_sum \
    zeroshard_store_chunks zeroshard_store_jobs zeroshard_store_memory_limit_bytes \
    zeroshard_store_memory_used_bytes; do
    expect_positive "$store" "$name"
  done
  for name in zeroshard_store_nvme_bytes zeroshard_store_nvme_limit_bytes \
    zeroshard_store_nvme_io_bytes_total zeroshard_store_nvme_errors_total \
    zeroshard_store_snapshot_seconds_count; do
    expect_zero "$store" "$name"
  done
done
{
  values store-0 zeroshard_store_traffic_bytes_total 'direction="pull"'
  values store-1 zeroshard_store_traffic_bytes_total 'direction="pull"'
} | awk '{sum += $1} END {exit sum <= 0}' || complain "no store gave parameters out"

kill -TERM "$local_pid"
status=0
wait "$local_pid" || status=$?
((status == 143)) || complain "'zeroshard local' ended with $status after SIGTERM, not with 143"
for pid in "${daemon_pids[@]}"; do
  ! kill -0 "$pid" 2>/dev/null || complain "process $pid outlived 'zeroshard local'"
done
finish
