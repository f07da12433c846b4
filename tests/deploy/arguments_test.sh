#!/usr/bin/env bash
# The scripts of deploy/ explain themselves and refuse wrong arguments before they change anything.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
deploy="$REPOSITORY/deploy"

for script in install_deps check_fresh check_runtime quickstart prometheus/operator_rules; do
  expect_end 0 "^Usage: deploy/$script\.sh" "$deploy/$script.sh" --help
done
expect_end 1 "unknown argument '--tset'.*--help" "$deploy/install_deps.sh" --tset
expect_end 1 "unknown argument '--miror'.*--help" "$deploy/check_fresh.sh" --miror
expect_end 1 "mirror takes a URL" "$deploy/check_fresh.sh" --mirror
expect_end 1 "unknown argument '--biuld'.*--help" "$deploy/check_runtime.sh" --biuld
expect_end 1 "build takes a folder" "$deploy/check_runtime.sh" --build
expect_end 1 "unknown argument '--chekc'.*--help" "$deploy/prometheus/operator_rules.sh" --chekc
expect_end 1 "exclude each other" "$deploy/install_deps.sh" --tests --runtime --list

expect_end 2 "unknown option '--workers'.*--help" "$deploy/quickstart.sh" --workers
expect_end 2 "workdir takes a folder" "$deploy/quickstart.sh" --workdir
expect_end 2 "no such file or folder: '$scratch/absent'" \
  "$deploy/quickstart.sh" --workdir "$scratch/unused" "$scratch/absent"
[[ ! -e $scratch/unused ]] || complain "quickstart.sh made its folder before it read its arguments"
touch "$scratch/file"
expect_end 2 "cannot make the folder '$scratch/file/below'" \
  "$deploy/quickstart.sh" --workdir "$scratch/file/below" "$scratch/file"
# After -- everything is a text, also what looks like an option.
expect_end 2 "no such file or folder: '--help'" "$deploy/quickstart.sh" -- --help

all_packages() {
  "$deploy/install_deps.sh" --tests --list
  "$deploy/install_deps.sh" --runtime --list
}
duplicates="$(all_packages | sort | uniq -d)"
[[ -z $duplicates ]] || complain "install_deps.sh lists a package twice: $duplicates"
undocumented="$(all_packages | while read -r package; do
  grep -qF -- "$package" "$deploy/README.md" || printf '%s ' "$package"
done)"
[[ -z $undocumented ]] || complain "deploy/README.md does not say what these are for: $undocumented"
finish
