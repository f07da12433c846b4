#!/usr/bin/env bash
# jobs_test.sh ZEROSHARD: the example jobs, and the one that the README shows, pass 'validate'.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
zeroshard="$1"

for job in "$REPOSITORY"/deploy/jobs/*.yaml; do
  expect_end 0 . "$zeroshard" validate "$job"
done

awk '/^```yaml$/ {inside = 1; next} /^```$/ {inside = 0} inside' "$REPOSITORY/README.md" \
  >"$scratch/readme.yaml"
[[ -s $scratch/readme.yaml ]] || complain "README.md shows no job"
expect_end 0 . "$zeroshard" validate "$scratch/readme.yaml"

sed 's/^steps:/stepz:/' "$REPOSITORY/deploy/jobs/licences.yaml" >"$scratch/misspelt.yaml"
expect_end 2 "misspelt.yaml:[0-9]+.*stepz.*steps" "$zeroshard" validate "$scratch/misspelt.yaml"
finish
