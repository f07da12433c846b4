#!/usr/bin/env bash
# docker_test.sh ZEROSHARD COORDINATOR WORKER: the Dockerfiles, without an engine to build them: stages,
# user, health check, packages, that what they copy and call is there, and that a container which is
# told nothing says what is missing, and serves with ZEROSHARD_INSECURE=true.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
zeroshard="$1"
declare -A program=([zeroshard-coordinator]="$2" [zeroshard-worker]="$3")
cd "$REPOSITORY"
unset "${!ZEROSHARD_@}"
pid=''
trap '[[ -z $pid ]] || kill -9 "$pid" 2>/dev/null || true; rm -rf "$scratch"' EXIT

# serves COMMAND...: until it answers health checks; then it is ended.
serves() {
  local health deadline=$((SECONDS + 60))
  : >"$scratch/log"
  "$@" >>"$scratch/log" 2>&1 &
  pid=$!
  until health="$(sed -nE 's/.*health checks at ([0-9.:]+).*/\1/p' "$scratch/log")" && [[ -n $health ]]; do
    if ! kill -0 "$pid" 2>/dev/null || ((SECONDS > deadline)); then
      complain "$* does not serve: $(cat "$scratch/log")"
      break
    fi
    sleep 0.1
  done
  [[ -z $health ]] || expect_end 0 '^SERVING$' "$zeroshard" health "$health"
  kill -9 "$pid" 2>/dev/null || true
  { wait "$pid" || true; } 2>/dev/null
  pid=''
}

for file in deploy/docker/Dockerfile deploy/docker/Dockerfile.cuda; do
  # One instruction a line.
  text="$(grep -v '^#' "$file" | sed -E ':a; /\\$/ {N; s/\\\n//; ba}')"
  last="$(awk '/^FROM/ {stage = ""} {stage = stage $0 "\n"} END {printf "%s", stage}' <<<"$text")"
  has() {
    grep -qE -- "$2" <<<"$1" || complain "$file: no line that matches '$2' $3"
  }
  (($(grep -c '^FROM' <<<"$text") >= 2)) || complain "$file has one stage: the image keeps compilers"
  has "$text" '^RUN deploy/install_deps\.sh$' "where it builds"
  has "$last" '^RUN .*install_deps\.sh --runtime' "in the last stage"
  has "$last" '^USER [1-9][0-9]*:[1-9][0-9]*$' "in the last stage"
  has "$last" '^HEALTHCHECK .*CMD \["zeroshard", "health", ' "in the last stage"
  has "$last" '^COPY --from=build /out/usr/local/ /usr/local/$' "in the last stage"
  ! grep -qE 'apt(-get)? install|:latest' <<<"$text" ||
    complain "$file installs past install_deps.sh, or takes whatever is newest"
  while read -r image; do
    [[ $image == *:* ]] || complain "$file: $image has no tag"
  done < <(sed -nE 's/^ARG (DEBIAN|CUDA)=//p' <<<"$text")
  while read -r source; do
    [[ -e $source ]] || complain "$file copies $source, which is not there"
  done < <(sed -nE 's/^COPY ([^-][^ ]*) .*/\1/p' <<<"$text")
  # Its options are the program's; nobody listens on that port of the discard service.
  mapfile -t check < <(sed -nE 's/^HEALTHCHECK .*CMD \[(.*)\]$/\1/p' <<<"$text" | tr -d '" ' | tr ',' '\n')
  check[2]=127.0.0.1:9
  expect_end 3 'no health check is answered' "$zeroshard" "${check[@]:1}"
  # What it starts, on free ports, a folder of the test and no GPU.
  mapfile -t command < <(sed -nE 's/^CMD \[(.*)\]$/\1/p' <<<"$last" | tr -d '" ' | tr ',' '\n' |
    sed -E -e 's/^0\.0\.0\.0:[0-9]+$/0.0.0.0:0/' -e "s,^/var/lib/zeroshard,$scratch/state," -e 's/^cuda:0$/cpu/')
  command[0]="${program[${command[0]}]}"
  expect_end 2 '(--listen 0\.0\.0\.0:0|--coordinator coordinator:7070): .*--tls-cert.*--insecure' "${command[@]}"
  serves env ZEROSHARD_INSECURE=true "${command[@]}"
done
grep -qx '.git' .dockerignore || complain ".dockerignore lets the history into the image's sources"
finish
