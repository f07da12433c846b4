#!/usr/bin/env bash
# Makes the Prometheus operator's objects from rules/*.yml. See --help.
set -euo pipefail

# shellcheck source=deploy/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

readonly RULES="$REPOSITORY/deploy/prometheus/rules"
readonly OBJECTS="$REPOSITORY/deploy/kubernetes/components/monitoring/rules.yaml"

usage() {
  cat <<USAGE
Usage: deploy/prometheus/operator_rules.sh [--check]

Writes deploy/kubernetes/components/monitoring/rules.yaml: for each file of deploy/prometheus/rules a
PrometheusRule whose spec is that file. kustomize cannot load a file into an object by itself.

  --check  writes nothing; fails where what is there is not what would be written
  --help   this text
USAGE
}

render() {
  local file
  echo "# Made by deploy/prometheus/operator_rules.sh of deploy/prometheus/rules: change those, then run it."
  for file in "$RULES"/*.yml; do
    # Recording rules have no runbook, so that who gives all alerts another one can leave them out by name.
    cat <<YAML
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: zeroshard-$(basename "$file" .yml)
spec:
YAML
    sed 's/^..*/  &/' "$file"
  done
}

check=''
parse_options check -- "$@"

if [[ -z $check ]]; then
  render >"$OBJECTS"
elif ! render | cmp -s - "$OBJECTS"; then
  fail "$OBJECTS is not made of the rules in $RULES; run deploy/prometheus/operator_rules.sh"
fi
