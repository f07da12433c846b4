#!/usr/bin/env bash
# prometheus_live_test.sh ZEROSHARD BUILD: a real Prometheus, with the deployed configuration and rules,
# scrapes a cluster that trains an offloaded job through the kill of a worker. Then every query of the
# dashboards, every recording rule and every series that an alert asks for has data, no alert fires that
# should not, and a failed job and 50 short ones leave no series behind.
# Functions are called by await and traps, which shellcheck does not follow.
# shellcheck disable=SC2317
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
zeroshard="$1"
build="$2"

for tool in prometheus promtool jq curl; do
  command -v "$tool" >/dev/null || {
    echo "SKIPPED: $tool is not installed; 'deploy/install_deps.sh --tests' installs it"
    exit 77
  }
done

declare -A pids=()
readonly DAEMONS=(coordinator worker-0 worker-1 store-0)
end_all() {
  kill -9 "${pids[@]}" 2>/dev/null || true
  rm -rf "$scratch"
}
trap end_all EXIT

# give_up MESSAGE...: with the end of every log.
give_up() {
  complain "$@"
  tail -n 8 "$scratch"/*.log >&2
  finish
}

# await SECONDS WHAT COMMAND...: until the command succeeds.
await() {
  local deadline=$((SECONDS + $1)) what="$2" name
  shift 2
  until "$@"; do
    for name in "${!pids[@]}"; do
      kill -0 "${pids[$name]}" 2>/dev/null || give_up "$name ended while this waited for: $what"
    done
    ((SECONDS < deadline)) || give_up "in time there was not: $what"
    sleep 0.3
  done
}

port() {
  jq -r ".$2" "$scratch/$1.port" 2>/dev/null
}

# start NAME PROGRAM ARGUMENTS...: and waits until it listens. Prometheus knows each daemon by one
# address, so that one that is started again gets the same.
start() {
  local name="$1" program="$2" listen="127.0.0.1:0"
  shift 2
  [[ ! -s $scratch/$name.port ]] || listen="$(port "$name" metrics)"
  rm -f "$scratch/$name.port"
  "$program" --listen 127.0.0.1:0 --metrics-listen "$listen" --port-file "$scratch/$name.port" "$@" \
    >>"$scratch/$name.log" 2>&1 &
  pids[$name]=$!
  disown
  await 60 "the port file of $name" test -s "$scratch/$name.port"
}

start_worker() {
  start "$1" "$build/worker/zeroshard-worker" --coordinator "$ZEROSHARD_COORDINATOR" --name "$1" --threads 1
}

scrape() {
  curl --silent --show-error --fail --max-time 10 "http://$(port "$1" metrics)/metrics"
}

# series DAEMON: how many it serves.
series() {
  scrape "$1" | grep -vc '^#' || true
}

start coordinator "$build/coordinator/zeroshard-coordinator" --data-dir "$scratch/state" \
  --heartbeat-interval 0.5 --member-timeout 5
ZEROSHARD_COORDINATOR="$(port coordinator grpc)"
export ZEROSHARD_COORDINATOR
start_worker worker-0
start_worker worker-1
start store-0 "$build/shard_store/zeroshard-store" --coordinator "$ZEROSHARD_COORDINATOR" \
  --name store-0 --memory-limit 512MiB --nvme-dir "$scratch/nvme" --nvme-limit 64MiB
all_registered() {
  [[ $("$zeroshard" nodes --output json 2>/dev/null | grep -o '"idle"' | wc -l) == 3 ]]
}
await 60 "two workers and a store" all_registered
declare -A before=()
for daemon in "${DAEMONS[@]}"; do before[$daemon]="$(series "$daemon")"; done

# The deployed configuration, with this cluster's addresses, and in a hurry.
{
  sed -E -e 's/(scrape|evaluation)_interval: .*/\1_interval: 1s/' -e '/^ *- targets:/,$d' \
    -e "s|rules/|$REPOSITORY/deploy/prometheus/rules/|" "$REPOSITORY/deploy/prometheus/prometheus.yml"
  printf '      - targets: ['
  for daemon in "${DAEMONS[@]}"; do printf '"%s", ' "$(port "$daemon" metrics)"; done
  printf ']\n'
} >"$scratch/prometheus.yml"
expect_end 0 SUCCESS promtool check config "$scratch/prometheus.yml"

# Prometheus takes no port 0, or does not say which it got.
for _ in 1 2 3 4 5; do
  address="127.0.0.1:$((20000 + RANDOM))"
  prometheus --config.file="$scratch/prometheus.yml" --storage.tsdb.path="$scratch/tsdb" \
    --web.listen-address="$address" >"$scratch/prometheus.log" 2>&1 &
  prometheus_pid=$!
  disown
  for _ in {1..100}; do
    kill -0 "$prometheus_pid" 2>/dev/null || break
    ! curl --silent --fail --max-time 5 "http://$address/-/ready" >/dev/null || break
    sleep 0.2
  done
  kill -0 "$prometheus_pid" 2>/dev/null && break
done
pids[prometheus]=$prometheus_pid
began="$(date +%s)"

# ask EXPRESSION: its result now. ask_range: of each second since Prometheus began.
ask() {
  curl --silent --max-time 20 "http://$address/api/v1/query" --data-urlencode "query=$1"
}
ask_range() {
  curl --silent --max-time 20 "http://$address/api/v1/query_range" --data-urlencode "query=$1" \
    --data "start=$began" --data "end=$(date +%s)" --data step=1
}
# holds EXPRESSION: it has a result.
holds() {
  ask "$1" | jq -e '.status == "success" and (.data.result | length > 0)' >/dev/null
}
# has_data EXPRESSION: at some second there was a finite number.
has_data() {
  ask_range "$1" | jq -e 'any(.data.result[]?.values[]; .[1] | test("NaN|Inf") | not)' >/dev/null
}

printf 'The quick brown fox jumps over the lazy dog. %.0s' {1..100} >"$scratch/text"
# job NAME STEPS TEXT: a job with its state in the stores.
job() {
  cat <<JOB
name: $1
model: {architecture: gpt2, hidden_size: 64, layers: 2, heads: 1, sequence_length: 16, vocab_size: 256}
data: {train: [$3], tokenizer: bytes}
resources: {workers: 2}
train_batch_size: 4
train_micro_batch_size_per_gpu: 2
steps: $2
optimizer: {type: AdamW}
bf16: {enabled: true}
zero_optimization: {stage: 3, stage3_param_persistence_threshold: 0, offload_optimizer: {device: cpu}}
JOB
}
{
  job long 100000000 text
  echo 'eval: {data: [text], interval_steps: 20, batches: 1}'
  echo 'checkpoint: {dir: checkpoints, interval_steps: 200, keep_last: 2}'
} >"$scratch/long.yaml"
"$zeroshard" submit "$scratch/long.yaml" >"$scratch/submit.log" 2>&1 || give_up "the job was not taken"
# Some seconds each, for the rates.
await 120 "steps and a checkpoint" holds 'zeroshard_job_committed_step > 20
  and on (job) zeroshard_job_checkpoints_total{result="complete"} > 0'
kill -9 "${pids[worker-1]}"
start_worker worker-1
await 90 "a recovery" holds 'zeroshard_job_recovery_seconds_count{job="long"} == 1'
await 60 "fifteen seconds of steps after the recovery" \
  holds 'sum by (job) (resets(zeroshard_worker_tokens_total[15s])) == 0
    and on (job) min by (job) (changes(zeroshard_worker_tokens_total[15s])) > 5'

# without_data EXPRESSION: it asks for a series that only a cluster with TLS has, and this has none.
without_data() {
  local name
  for name in zeroshard_tls_certificate_expiry_timestamp_seconds \
    zeroshard_tls_certificate_reload_failures_total zeroshard_rpc_refused_total; do
    [[ $1 != *"$name"* ]] || grep -q "^$name" "$scratch/coordinator.metrics" || return 0
  done
  return 1
}
scrape coordinator >"$scratch/coordinator.metrics"

queries=0
for board in "$REPOSITORY"/deploy/grafana/dashboards/*.json; do
  while IFS=$'\t' read -r panel expression; do
    queries=$((queries + 1))
    without_data "$expression" || has_data "$expression" ||
      complain "$(basename "$board"), panel '$panel' has no data: $expression: $(ask "$expression" | head -c 300)"
  done < <(jq -r --arg rate 5s --arg range 1m -f "$REPOSITORY/tests/deploy/grafana_expressions.jq" "$board" |
    jq -r '@tsv')
done
((queries > 50)) || complain "only $queries queries were found in the dashboards"

echo "$queries queries of the dashboards were asked"

# Recording rules by their result, alerts by each series that they select: that their condition does
# not hold is as it should be.
curl --silent --max-time 20 "http://$address/api/v1/rules" >"$scratch/rules.json"
jq -r '.data.groups[].rules[] | select(.health != "ok") | "rule \(.name) is \(.health): \(.lastError)"' \
  "$scratch/rules.json" >"$scratch/bad_rules"
[[ ! -s $scratch/bad_rules ]] || complain "$(cat "$scratch/bad_rules")"
while read -r record; do
  has_data "$record" || complain "the recording rule $record has no data"
done < <(jq -r '.data.groups[].rules[] | select(.type == "recording") | .name' "$scratch/rules.json")
selectors=0
while read -r selector; do
  selectors=$((selectors + 1))
  without_data "$selector" || has_data "$selector" || complain "an alert asks for $selector, which has no data"
done < <(jq -r '.data.groups[].rules[] | select(.type == "alerting") | .query' "$scratch/rules.json" |
  grep -oE '\b([a-z_]+:)?(zeroshard|process)_[a-z0-9_:]+(\{[^}]*\})?|\bup(\{[^}]*\})' | sort -u)
((selectors > 20)) || complain "only $selectors series were found in the alerts"

# Memory is what was planned, to the byte. So is traffic, less precisely: bytes and steps are not scraped
# at the same moment, and one step was cut short. (Evaluation adds to the forward phase.)
holds 'max by (job, rank, stage, kind) (zeroshard_worker_memory_bytes)
  == max by (job, rank, stage, kind) (zeroshard_job_plan_memory_bytes)' || complain "no memory is as planned"
off="$(ask 'max by (job, rank, stage, kind) (zeroshard_worker_memory_bytes)
  != max by (job, rank, stage, kind) (zeroshard_job_plan_memory_bytes)' | jq -c '.data.result[]')"
[[ -z $off ]] || complain "memory that is not as planned: $off"
traffic='job_rank_stage_op_phase:zeroshard_worker_collective_bytes_per_step:rate5m{phase="backward"}
  / max by (job, rank, stage, op, phase) (zeroshard_job_plan_traffic_bytes > 0)'
holds "$traffic" || complain "no traffic was planned and measured"
off="$(ask "abs($traffic - 1) > 0.1" | jq -c '.data.result[]')"
[[ -z $off ]] || complain "bytes of a step are off the plan by this share: $off"

# One worker was killed and came back; nothing else happened. No alert has fired, and no condition holds
# now, but for those of speed: on a busy machine half a minute shows nothing of that.
alerts_in() {
  ask "$1" | jq -r '.data.result[].metric.alertname' | sort -u | paste -sd' '
}
fired="$(alerts_in 'max_over_time(ALERTS{alertstate="firing"}[10m])')"
[[ -z $fired ]] || complain "alerts that had no reason to fire: $fired"
pending="$(alerts_in 'ALERTS{alertname!~"ZeroShard(StragglerRank|ThroughputDropped)"}')"
[[ -z $pending ]] || complain "alerts whose condition should not hold: $pending"

"$zeroshard" cancel long >>"$scratch/submit.log" 2>&1 || complain "the job was not cancelled"
job broken 1 missing >"$scratch/broken.yaml"
"$zeroshard" submit "$scratch/broken.yaml" >>"$scratch/submit.log" 2>&1 || give_up "the broken job was not taken"
for i in {1..50}; do
  job "short-$i" 2 text >"$scratch/short.yaml"
  "$zeroshard" submit "$scratch/short.yaml" >>"$scratch/submit.log" 2>&1 || give_up "short job $i was not taken"
done
await 300 "52 jobs that ended: one cancelled, one failed, 50 completed" \
  holds 'sum(zeroshard_jobs_ended_total) == 52 and sum(zeroshard_jobs_ended_total{state="failed"}) == 1
    and sum(zeroshard_jobs_ended_total{state="completed"}) == 50'
await 30 "an alert for the failed job" holds 'ALERTS{alertname="ZeroShardJobFailed",alertstate="firing"}'
curl --silent --max-time 20 "http://$address/api/v1/alerts" >"$scratch/alerts.json"
jq -e '[.data.alerts[].annotations[] | select(test("<error|<no value|\\{\\{"))] == []' "$scratch/alerts.json" \
  >/dev/null || complain "texts of alerts are broken: $(cat "$scratch/alerts.json")"

no_jobs_left() {
  local daemon text
  for daemon in "${DAEMONS[@]}"; do
    text="$(scrape "$daemon")" || return 1
    ! grep -qE '[{,]job="' <<<"$text" || return 1
  done
}
# Workers hear that a job ended a moment after the coordinator knows.
await 30 "no series of a job at any daemon" no_jobs_left
for daemon in "${DAEMONS[@]}"; do
  now="$(series "$daemon")"
  [[ $now == "${before[$daemon]}" ]] ||
    complain "$daemon serves $now series after 52 jobs, ${before[$daemon]} before the first"
done
finish
