# Every query of a dashboard as [panel, expression], variables replaced by what Grafana puts in for
# "All", a range of $range and a scrape interval that makes $__rate_interval $rate.
.panels[] | select(.targets) | . as $panel | .targets[] |
  [$panel.title, (.expr
    | gsub("\\$__rate_interval"; $rate)
    | gsub("\\$__range"; $range)
    | gsub("\\$(job|rank|stage|store)\\b"; ".+"))]
