"""docs/grafana.json can be imported and queries metrics that /metrics has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import server_harness

DASHBOARD = json.loads(
    (Path(__file__).parents[1] / "docs" / "grafana.json").read_text(encoding="utf-8")
)
WORD = re.compile(r"localgen:[a-z0-9_]+")
SELECTOR = re.compile(r"(localgen:[a-z0-9_]+)\{([^}]*)\}")


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Labels of each metric that a server exports."""
    found: dict[str, set[str]] = {}
    with server_harness() as served:
        served.start()
        served.chat(served.model(), "hello my world")
        served.chat("no-such-model")
        for family in text_string_to_metric_families(served.http.get("/metrics").text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_exists(exported: dict[str, set[str]]) -> None:
    named = {name for text in expressions() for name in WORD.findall(text)}
    assert len(named) > 12
    assert named - exported.keys() == set()


def test_every_label_exists(exported: dict[str, set[str]]) -> None:
    for text in expressions():
        grouped = {label for by in re.findall(r"by \(([^)]*)\)", text) for label in by.split(", ")}
        for name, selectors in SELECTOR.findall(text):
            asked = set(re.findall(r"(\w+)=", selectors))
            assert asked | grouped <= exported[name], text


def test_brackets_are_closed() -> None:
    for text in expressions():
        for opening, closing in ("()", "[]", "{}"):
            assert text.count(opening) == text.count(closing), text


@pytest.mark.parametrize(
    "figure",
    [
        *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket"),
        *("prompt_tokens_total", "generation_tokens_total", "num_requests_running"),
        *("num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total"),
        *("request_success_total", "request_failure_total", "num_preemptions_total"),
        "model_loads_total",
    ],
)
def test_what_an_operator_needs_is_shown(figure: str) -> None:
    assert any(f"localgen:{figure}" in text for text in expressions())


def test_it_can_be_imported() -> None:
    assert DASHBOARD["title"] == "localgen"
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["id"] is None
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        asks_by = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source["uid"] == "${datasource}" for source in asks_by)
        assert_lies_on_the_grid(panel["gridPos"])
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def assert_lies_on_the_grid(place: dict[str, Any]) -> None:
    assert 0 <= place["x"] <= place["x"] + place["w"] <= 24
    assert place["h"] > 0


def test_both_percentiles_wherever_there_is_one() -> None:
    for panel in DASHBOARD["panels"][:3]:
        shares = re.findall(r"histogram_quantile\(([\d.]+)", " ".join(expr(panel)))
        assert shares == ["0.5", "0.99"]


def expr(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"]]
