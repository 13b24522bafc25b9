"""The files for Prometheus and Grafana."""

from __future__ import annotations

from itertools import combinations

from minibroker.deploy.local.plan import DEFAULT_BASE_PORT, DEFAULT_BROKERS, METRICS_PORT_DISTANCE
from tests import monitoring


def test_prometheus_scrapes_the_ports_of_up_and_loads_the_rules() -> None:
    found = monitoring.loaded("prometheus.yml")
    first = DEFAULT_BASE_PORT + METRICS_PORT_DISTANCE
    [job] = found["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"127.0.0.1:{first + number}" for number in range(DEFAULT_BROKERS)]
    assert all((monitoring.DIRECTORY / name).exists() for name in found["rule_files"])


def test_each_alert_has_a_severity_and_a_summary_with_a_remedy() -> None:
    alerts = [rule for rule in monitoring.rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 5
    for rule in alerts:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "see " in rule["annotations"]["summary"] or "`minibroker " in rule["annotations"]["summary"]


def test_the_panels_of_the_dashboard_have_a_place_each_and_their_expressions_are_balanced() -> None:
    panels = monitoring.dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)

    def cells(panel: dict[str, dict[str, int]]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        return {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}

    assert all(not cells(one) & cells(other) for one, other in combinations(panels, 2))
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    for expression in monitoring.expressions():
        assert [expression.count(opening) for opening in "({["] == [expression.count(closing) for closing in ")}]"]
        assert monitoring.metrics_of(expression) or expression.startswith("up"), expression


def test_every_panel_selects_the_cluster_that_was_chosen() -> None:
    targets = [target for panel in monitoring.dashboard()["panels"] for target in panel.get("targets", ())]
    assert targets
    assert all('cluster=~"$cluster"' in target["expr"] for target in targets)


def test_the_dashboard_has_percentiles_of_the_requests_of_each_api() -> None:
    found = [expression for expression in monitoring.expressions() if "histogram_quantile" in expression]
    assert [expression.partition(",")[0] for expression in found] == [
        "histogram_quantile(0.5",
        "histogram_quantile(0.99",
    ]
    for expression in found:
        assert "sum by (le, request)" in expression, "percentiles are computed from the bounds of the buckets"
        assert monitoring.metrics_of(expression) == ["kafka_network_requestmetrics_totaltimems_bucket"]
