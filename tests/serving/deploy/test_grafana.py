"""The Grafana dashboard: its queries parse, and every metric exists in a server's `/metrics`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving.conftest import Served

PATH = Path(__file__).parents[3] / "deploy/grafana.json"
DASHBOARD: dict[str, Any] = json.loads(PATH.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


def selectors(expression: str) -> Iterator[promql_parser.VectorSelector]:
    """Yield the metrics of an expression with their labels."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    parsed = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    promql_parser.walk(parsed, visit)
    yield from found


def unknown(expression: str, samples: dict[str, set[str]]) -> list[str]:
    """Return the metrics and labels of an expression that no server exports."""
    found: list[str] = []
    for selector in selectors(expression):
        assert selector.name
        # Prometheus adds the instance to what it scrapes.
        labels = {*samples.get(selector.name, ()), "instance"}
        if selector.name not in samples:
            found.append(selector.name)
        found += [m.name for m in selector.matchers.matchers if m.name not in labels]
    return found


@pytest.fixture(scope="module")
def samples(served: Served) -> dict[str, set[str]]:
    """The labels of each sample that a real server exports after a request."""
    assert served.call("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    families = text_string_to_metric_families(served.call("/metrics")[1]["text"])
    found: dict[str, set[str]] = {}
    for sample in [sample for family in families for sample in family.samples]:
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_and_label_exists(samples: dict[str, set[str]]) -> None:
    assert len(EXPRESSIONS) > 20
    for expression in EXPRESSIONS:
        assert unknown(expression, samples) == [], expression
    assert unknown("sum(rate(vllm:tokens_total{mode='x'}[5m]))", samples) == [
        "vllm:tokens_total",
        "mode",
    ]


def test_counters_are_rates_and_gauges_are_not(samples: dict[str, set[str]]) -> None:
    for expression in EXPRESSIONS:
        for selector in selectors(expression):
            counts = str(selector.name).endswith(("_total", "_bucket", "_sum", "_count"))
            whole = expression.startswith("sum(ingot:engine_failed_steps_total")
            assert counts == (f"rate({selector.name}" in expression) or whole, expression


def test_variables_are_defined_and_refer_to_metrics(samples: dict[str, set[str]]) -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "model", "instance"]
    for name in ("model", "instance"):
        metric, label = variables[name]["definition"][len("label_values(") : -1].split(", ")
        assert label in {*samples[metric], "instance"}
    used = {name for e in EXPRESSIONS for name in variables if f"${name}" in e}
    assert used == {"model", "instance"}


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        new = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & new, panel["title"]
        cells |= new
    for key in ("id", "title"):
        values = [panel[key] for panel in DASHBOARD["panels"]]
        assert len(set(values)) == len(values)
    assert all(panel["description"] for panel in PANELS)
