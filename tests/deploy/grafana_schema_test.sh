#!/usr/bin/env bash
# grafana_schema_test.sh: the dashboards have the fields and types of Grafana's own schema, which a
# package of PyPI carries. Skipped, loudly, without Python or PyPI; grafana_dashboards_test.sh is not.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
readonly PACKAGE='grafana-foundation-sdk==1769699998!10.1.0'

venv="${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/zeroshard/grafana-schema"
python="$venv/bin/python"
# Made beside its place and moved there: a test that runs at the same time sees all or nothing.
if ! "$python" -c 'import grafana_foundation_sdk' 2>/dev/null; then
  new="$scratch/venv"
  if ! { python3 -m venv "$new" &&
    timeout 120 "$new/bin/pip" --quiet --disable-pip-version-check install "$PACKAGE"; } >"$scratch/log" 2>&1; then
    echo "SKIPPED: no Python with venv, or $PACKAGE cannot be had from PyPI: $(tail -n 1 "$scratch/log")"
    exit 77
  fi
  python="$new/bin/python"
  mkdir -p "$(dirname "$venv")"
  if [[ ! -e $venv ]] && cp -r "$new" "$venv.$$"; then
    mv -T "$venv.$$" "$venv" 2>/dev/null || rm -rf "$venv.$$"
  fi
fi

cd "$REPOSITORY"
check=("$python" tests/deploy/grafana_schema.py)
"${check[@]}" deploy/grafana/dashboards/*.json || complain "not as Grafana's schema wants it, see above"

# The check itself sees a key, a value and a type that are wrong.
for edit in 's/"refresh": "10s"/"refersh": "10s"/' 's/"type": "datasource"/"type": "datasuorce"/' \
  's/"multi": true/"multi": "yes"/' 's/"lineWidth": 1/"linewidth": 1/'; do
  sed "$edit" deploy/grafana/dashboards/memory.json >"$scratch/wrong.json"
  expect_end 1 'no such field in the schema|is no ' "${check[@]}" "$scratch/wrong.json"
done
finish
