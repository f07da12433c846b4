#!/usr/bin/env bash
# The Dockerfiles, without an engine to build them: stages, user, health check, packages, and that
# what they copy and call is there.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
zeroshard="$1"
cd "$REPOSITORY"

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
done
grep -qx '.git' .dockerignore || complain ".dockerignore lets the history into the image's sources"
finish
