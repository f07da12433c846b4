#!/usr/bin/env bash
# grafana_dashboards_test.sh: the dashboards have what Grafana needs to show them with any Prometheus,
# their expressions are valid, and a value that is no number breaks no panel.
set -euo pipefail

# shellcheck source=tests/deploy/expect.sh
source "$(dirname "${BASH_SOURCE[0]}")/expect.sh"
cd "$REPOSITORY/deploy/grafana"

for tool in jq promtool; do
  command -v "$tool" >/dev/null || {
    echo "SKIPPED: $tool is not installed; 'deploy/install_deps.sh --tests' installs it"
    exit 77
  }
done

# What is wrong with a dashboard, a line each.
problems() {
  jq -r --arg file "$1" '
    def names: [.templating.list[].name];
    def overlap($a; $b): $a.x < $b.x + $b.w and $b.x < $a.x + $a.w and $a.y < $b.y + $b.h and $b.y < $a.y + $a.h;
    . as $board |
    (select(.uid != "zeroshard-" + $file) | "uid is \(.uid), wanted zeroshard-\($file)"),
    (select(has("id")) | "has an id: that is one installation'"'"'s number"),
    (select((.schemaVersion // 0) < 38) | "schemaVersion is \(.schemaVersion), wanted 38 or more"),
    (select((.title // "") == "" or (.description // "") == "") | "no title or no description"),
    (select(.tags | index("zeroshard") | not) | "not tagged zeroshard, by which the dashboards link each other"),
    (.templating.list[0] | select(.type != "datasource" or .query != "prometheus" or .name != "datasource")
      | "the first variable is not the data source"),
    (.templating.list[1:][] | select(.multi != true or .includeAll != true or .allValue != ".+" or .refresh != 2
        or (.query.query | startswith("label_values(") | not)) | "variable \(.name): wanted label_values, multi, All as .+"),
    ([.. | objects | select(has("datasource")) | .datasource] | unique[]
      | select(. != {type: "prometheus", uid: "${datasource}"}) | "a data source that is not the variable: \(.)"),
    ([.panels[].id] | group_by(.)[] | select(length > 1) | "panel id \(.[0]) is there \(length) times"),
    (.panels as $p | range($p | length) as $i | range($i + 1; $p | length) as $j
      | select(overlap($p[$i].gridPos; $p[$j].gridPos)) | "\($p[$i].title) and \($p[$j].title) overlap"),
    (.panels[] | select(.gridPos | .x < 0 or .w < 1 or .x + .w > 24 or .h < 1) | "\(.title): outside the grid"),
    (.panels[] | select(.type != "row") |
      (select((.title // "") == "" or (.description // "") == "") | "panel \(.id): no title or no description"),
      (select((.fieldConfig.defaults.unit // "") == "") | "\(.title): no unit"),
      (select((.targets | length) == 0) | "\(.title): no query"),
      (select(([.targets[].refId] | unique | length) != (.targets | length)) | "\(.title): a refId twice"),
      (select(.repeat and ([.repeat] - ($board | names) | length > 0)) | "\(.title): repeats an unknown variable"),
      (.title as $title | .targets[] |
        (select((.expr // "") == "" or (.legendFormat // "") == "") | "\($title): a query without expression or legend"),
        (select(.expr | test("\\[[0-9]")) | "\($title): a fixed interval, wanted $__rate_interval or $__range: \(.expr)"),
        (select(.expr | test("(job|rank|instance)=\"")) | "\($title): a job, rank or instance is fixed: \(.expr)"),
        (select(.expr | test("histogram_quantile|_loss\\{") and (contains("> -Inf") | not))
          | "\($title): NaN is not kept out by > -Inf: \(.expr)"),
        ([.expr | scan("\\$([a-z]+)")[0]] - ($board | names) | .[] | "\($title): unknown variable $\(.)")))
    ' "dashboards/$1.json"
}

mapfile -t boards < <(cd dashboards && printf '%s\n' *.json | sed 's/\.json$//')
((${#boards[@]} == 5)) || complain "wanted five dashboards, seen: ${boards[*]}"
for board in "${boards[@]}"; do
  jq . "dashboards/$board.json" | cmp -s - "dashboards/$board.json" ||
    complain "$board.json is not as 'jq .' writes it; edits would be hard to see"
  while read -r problem; do complain "$board: $problem"; done < <(problems "$board")
done

# Each expression is a rule for promtool, and those of losses are asked with a job whose loss is NaN.
{
  echo 'groups: [{name: dashboards, rules: ['
  for board in "${boards[@]}"; do
    jq -r --arg rate 1m --arg range 1h -f "$REPOSITORY/tests/deploy/grafana_expressions.jq" \
      "dashboards/$board.json" | jq -c '{record: "x", labels: {expression: .[1]}, expr: .[1]}' | sed 's/$/,/'
  done
  echo ']}]'
} >"$scratch/rules.json"
# promtool sees that every rule has the same name; only what it says of expressions counts.
promtool check rules --lint=none "$scratch/rules.json" >"$scratch/log" 2>&1 ||
  complain "expressions of dashboards: $(cat "$scratch/log")"

jq -r --arg rate 1m --arg range 1h -f "$REPOSITORY/tests/deploy/grafana_expressions.jq" \
  dashboards/overview.json | jq -sc '
  [.[][1] | select(test("_loss\\{"))] as $losses |
  [("zeroshard_job_loss", "zeroshard_job_eval_loss") |
    {series: "\(.){job=\"sound\"}", values: "3"}, {series: "\(.){job=\"nan\"}", values: "NaN"}] as $series |
  {tests: [{interval: "1m", input_series: $series, promql_expr_test:
    [$losses[] | {expr: "sum(\(.))", eval_time: "0m", exp_samples: [{value: 3}]}]}]}' >"$scratch/nan.json"
(("$(jq '.tests[0].promql_expr_test | length' "$scratch/nan.json")" == 2)) ||
  complain "wanted two panels of losses in overview.json"
expect_end 0 SUCCESS promtool test rules "$scratch/nan.json"
finish
