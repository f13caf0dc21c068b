"""Which replicas have a model, and from whom a replica fetches the beginning of a prompt."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from localgen.cluster.model_table import LOAD_SPILL, ModelTable, serving
from localgen.cluster.route import (
    MIN_FETCH_CHUNKS,
    InFlight,
    RoutedRequest,
    kv_address,
    routing_stats,
)

CHUNKS = tuple(bytes([number]) for number in range(9))


def test_a_model_is_where_it_is_reported_or_being_loaded() -> None:
    table = ModelTable()
    reported = {"a": ["tiny"], "b": ["tiny", "smollm2"], "c": []}
    assert table.holders("smollm2", reported, 0.0) == ["b"]
    table.give("smollm2", "c", 0.0)
    assert table.holders("smollm2", reported, 1.0) == ["b", "c"]
    assert table.holders("other", reported, 1.0) == []
    assert table.holders("smollm2", reported, 60.0) == ["b"], "it was not loaded, or unloaded"
    table.give("other", "a", 60.0)
    assert table.holders("smollm2", {"c": []}, 60.0) == []


@pytest.mark.parametrize(
    ("holders", "wanted"),
    [
        ([], "abc"),
        (["a"], "a"),
        (["a", "b"], "ab"),
        (["b"], "abc"),
    ],
)
def test_replicas_without_a_model_get_no_request_before_the_others_are_full(
    holders: list[str], wanted: str
) -> None:
    loads = {"a": LOAD_SPILL, "b": LOAD_SPILL + 1, "c": 0}
    assert serving(loads, holders) == {name: loads[name] for name in wanted}


@pytest.mark.parametrize(
    ("own", "other", "source", "kv_peer", "new_chunks"),
    [
        (0, MIN_FETCH_CHUNKS, "", "b:1", 9 - MIN_FETCH_CHUNKS),
        (3, 3 + MIN_FETCH_CHUNKS - 1, "", "", 6),
        (9, 0, "", "", 0),
        (0, 0, "", "", 9),
        # it fetches the prompt for another request, and may get this one before that
        (9, 9, "b", "b:1", 0),
        (7, 8, "b", "b:1", 2),
    ],
)
def test_a_prefix_is_fetched_from_where_much_more_of_it_lies(
    own: int, other: int, source: str, kv_peer: str, new_chunks: int
) -> None:
    route = RoutedRequest(
        CHUNKS,
        cached={"a": own, "b": other},
        sources={"a": source},
        kv_addresses={"a": "a:1", "b": "b:1"},
    )
    choice = route.choice("a", "http://a")
    assert (choice.kv_peer, choice.new_chunks) == (kv_peer, new_chunks)
    assert (choice.replica, choice.url, choice.kv_address) == ("a", "http://a", "a:1")


def test_a_replica_that_does_not_answer_is_not_asked() -> None:
    route = RoutedRequest(
        CHUNKS,
        gone=frozenset("b"),
        cached={"a": 9},
        sources={"a": "b"},
        kv_addresses={"a": "a:1", "b": "b:1"},
    )
    assert route.choice("a", "http://a").kv_peer == ""


def test_a_replica_that_shares_nothing_is_not_asked() -> None:
    route = RoutedRequest(CHUNKS, cached={"a": 0, "b": 9}, kv_addresses={"a": "", "b": ""})
    choice = route.choice("a", "http://a")
    assert (choice.kv_peer, choice.new_chunks) == ("", 9)


def test_what_a_replica_reports_to_routers() -> None:
    found: dict[str, Any] = {"held_chunks": base64.b64encode(b"chunk--1").decode()}
    found |= {"kv_address": "a:1", "is_default": True}
    tiny = {"name": "tiny", "id": "tiny#1", "names": ["alias"], **found}
    other: dict[str, Any] = {"name": "other", "id": "other#1", "held_chunks": ""}
    other |= {"kv_address": "a:2", "is_default": False}
    assert routing_stats({"models": [tiny, other]}) == {
        "models": ["alias", "other", "other#1", "tiny", "tiny#1"],
        "held": b"chunk--1",
        "kv_addresses": {
            **dict.fromkeys(("", "alias", "tiny", "tiny#1"), "a:1"),
            **dict.fromkeys(("other", "other#1"), "a:2"),
        },
    }
    own_names = {"poet": "tiny", "work": "other", "elsewhere": "smollm2"}
    reported = routing_stats({"models": [tiny, other]}, own_names)
    assert {"poet", "work"} <= set(reported["models"]), "it can serve them at once"
    assert "elsewhere" not in reported["models"]
    assert reported["kv_addresses"]["poet"] == "a:1"
    assert routing_stats({"models": []}) == {"models": [], "held": b"", "kv_addresses": {}}
    other_engine = {"name": "served", "id": "served"}
    assert routing_stats({"models": [other_engine]})["held"] is None, "it does not tell"


def test_where_prefixes_of_a_model_are_fetched() -> None:
    metadata = {"kv_address": "a:1"}
    assert kv_address("", metadata, {}) == "a:1", "it has not reported yet"
    stats = {"kv_addresses": {"": "a:3", "other": "a:2"}}
    assert kv_address("", metadata, stats) == "a:3", "its engine was started anew"
    assert kv_address("other", metadata, stats) == "a:2"
    assert kv_address("third", metadata, stats) == ""
    assert kv_address("", metadata, {"kv_addresses": {}}) == "", "it has unloaded the model"


def test_a_request_counts_for_one_replica_until_it_ends() -> None:
    in_flight = InFlight()
    one, other = RoutedRequest(in_flight=in_flight), RoutedRequest(in_flight=in_flight)
    one.assign("a")
    other.assign("a")
    other.assign("b")
    assert (in_flight.counts["a"], in_flight.counts["b"]) == (1, 1)
    one.end()
    other.end()
    one.assign("a")  # the router goes on for a while after a client has left
    other.end()
    assert (in_flight.counts["a"], in_flight.counts["b"]) == (0, 0)


def test_an_adapter_goes_where_its_model_is() -> None:
    table = ModelTable()
    reported = {"a": ["other"], "b": ["tiny", "poet"], "c": ["tiny", "poet"]}
    loads = {"a": 0, "b": 1, "c": 2}
    assert table.holders("poet", reported, 0.0) == ["b", "c"]
    assert serving(loads, table.holders("poet", reported, 0.0)) == {"b": 1, "c": 2}
