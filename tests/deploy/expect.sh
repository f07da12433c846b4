# shellcheck shell=bash
# Sourced by the tests of this folder: a scratch folder that goes away, and checks that count.

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
# shellcheck disable=SC2034  # for the scripts that source this
readonly REPOSITORY
scratch="$(mktemp -d)"
readonly scratch
trap 'rm -rf "$scratch"' EXIT
failures=0

# complain MESSAGE...: notes a failed check and goes on.
complain() {
  printf 'FAILED: %s\n' "$*" >&2
  failures=$((failures + 1))
}

# expect_end CODE PATTERN COMMAND...: the command ends with CODE and its output, both streams, has a
# line that matches PATTERN (an extended regular expression).
expect_end() {
  local code="$1" pattern="$2" status=0 output
  shift 2
  output="$("$@" 2>&1 </dev/null)" || status=$?
  ((status == code)) || complain "exit code $status instead of $code from: $*; it printed: $output"
  grep -qE -- "$pattern" <<<"$output" ||
    complain "no line that matches '$pattern' from: $*; it printed: $output"
}

# small_job NAME: a job of two workers whose state is in the stores, which learns the file `text` beside
# it and does not end by itself. Tests append what else theirs has.
small_job() {
  printf 'The quick brown fox jumps over the lazy dog. %.0s' {1..100} >"$scratch/text"
  cat <<JOB
name: $1
model: {architecture: gpt2, hidden_size: 64, layers: 1, heads: 1, sequence_length: 16, vocab_size: 256}
data: {train: [text], tokenizer: bytes}
resources: {workers: 2}
train_batch_size: 4
train_micro_batch_size_per_gpu: 2
steps: 100000000
optimizer: {type: AdamW}
bf16: {enabled: true}
zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}
JOB
}

# finish: the exit code of the test.
finish() {
  ((failures == 0)) || {
    printf '%d checks failed\n' "$failures" >&2
    exit 1
  }
  exit 0
}
