#!/usr/bin/env bash
# prometheus_rules_test.sh: rules and configuration are valid, their unit tests pass, each alert has
# the labels and texts that an operator needs, a section in the runbook and a unit test.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
cd "$REPOSITORY/deploy/prometheus"

command -v promtool >/dev/null || {
  echo "SKIPPED: promtool is not installed; 'deploy/install_deps.sh --tests' installs it"
  exit 77
}

expect_end 0 'SUCCESS' promtool check config prometheus.yml
expect_end 0 'SUCCESS' promtool check rules rules/*.yml
expect_end 0 'SUCCESS' promtool test rules tests/*.yml
expect_end 0 '^$' ./operator_rules.sh --check

# As the pages that show Markdown make them of headings.
anchors="$(sed -nE 's/^##? (.*)$/\1/p' README.md | tr '[:upper:] ' '[:lower:]-')"

# alert_texts: a line "ALERT KEY VALUE" for each key below an alert; labels are on one line.
alert_texts() {
  awk '$1 == "-" {alert = ($2 == "alert:") ? $3 : ""}
       alert != "" && match($0, /(severity|summary|description|runbook_url): */) {
         key = substr($0, RSTART, index(substr($0, RSTART), ":") - 1)
         value = substr($0, RSTART + RLENGTH); gsub(/[}'\'']/, key == "severity" ? "" : "&", value)
         print alert, key, value
       }' rules/*.yml
}
texts="$(alert_texts)"
mapfile -t alerts < <(sed -nE 's/^ *- alert: (.*)$/\1/p' rules/*.yml)
((${#alerts[@]} > 0)) || complain "no alerts in $PWD/rules"

for alert in "${alerts[@]}"; do
  for key in severity summary description runbook_url; do
    (("$(grep -cE "^$alert $key .+" <<<"$texts" || true)" == 1)) ||
      complain "$alert: wanted one $key, seen: $(grep "^$alert $key" <<<"$texts" || true)"
  done
  severity="$(sed -nE "s/^$alert severity (.*)$/\1/p" <<<"$texts")"
  [[ $severity == critical || $severity == warning ]] ||
    complain "$alert: severity is '$severity', wanted critical or warning"
  link="$(sed -nE "s/^$alert runbook_url (.*)$/\1/p" <<<"$texts")"
  [[ $link == "deploy/prometheus/README.md#${alert,,}" ]] || complain "$alert: its runbook_url is '$link'"
  grep -qxF -- "${link#*#}" <<<"$anchors" || complain "$alert: README.md has no section '${link#*#}'"
  grep -qE "labels: 'ALERTS\{alertname=\"$alert\"" tests/*.yml ||
    complain "$alert: no unit test in which it fires"
done
duplicates="$(printf '%s\n' "${alerts[@]}" | sort | uniq -d)"
[[ -z $duplicates ]] || complain "alerts that exist twice: $duplicates"
while read -r section; do
  printf '%s\n' "${alerts[@]}" | grep -qxF -- "$section" ||
    complain "README.md has a section '$section', but there is no such alert"
done < <(sed -n '/^# Runbook/,$s/^## //p' README.md)
finish
