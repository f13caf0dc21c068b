"""Which replica a request goes to: hashes of the beginning of its prompt, load, rendezvous."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from localgen.backends.types import MAX_REPORTED_CHUNKS
from localgen.cluster.prefix_table import (
    CHUNK_CHARS,
    ROUTED_S,
    PrefixTable,
    prompt_chunks,
    table_chunks,
)

SYSTEM = "You are a patient teacher of arithmetic. " * 40
LOADS = {"a": 0, "b": 0, "c": 0}


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[n % 3], "content": text} for n, text in enumerate(texts)]
    return {"model": "tiny", "messages": messages, **fields}


def num_shared(first: dict[str, Any], second: dict[str, Any]) -> int:
    pairs = zip(prompt_chunks(first), prompt_chunks(second), strict=False)
    return sum(one == other for one, other in pairs)


def test_the_next_turn_begins_with_the_chunks_of_the_last() -> None:
    first, second = chat(SYSTEM, "What is 2 + 2?"), chat(SYSTEM, "What is 2 + 2?", "4", "And 3?")
    assert len(prompt_chunks(first)) >= len(SYSTEM) // CHUNK_CHARS
    assert num_shared(first, second) == len(prompt_chunks(first))


def test_what_changes_the_prompt_changes_the_chunks() -> None:
    request = chat(SYSTEM, "Hello")
    for other in (
        chat("X" + SYSTEM, "Hello"),
        chat(SYSTEM, "Hello", model="smollm2"),
        chat(SYSTEM, "Hello", lora=[{"id": "poet"}]),
        chat(SYSTEM, "Hello", tools=[{"type": "function", "function": {"name": "f" * 300}}]),
        {"model": "tiny", "prompt": SYSTEM},
    ):
        assert num_shared(request, other) == 0
    assert num_shared(request, chat(SYSTEM, "Hello", temperature=1)) == len(prompt_chunks(request))


def test_adapters_have_chunks_of_their_own() -> None:
    requests = [chat(SYSTEM, "Hello", model=name) for name in ("tiny", "poet", "clerk")]
    requests += [
        chat(SYSTEM, "Hello", lora=[{"id": "poet", "scale": scale}]) for scale in (1.0, 0.5)
    ]
    found = [prompt_chunks(request) for request in requests]
    assert len({chunks[0] for chunks in found}) == len(found)
    table = PrefixTable()
    table.add(found[1], "a")
    assert table.cached_chunks(found[1], ["a"]) == {"a": len(found[1])}
    assert not any(table.cached_chunks(other, ["a"]) for other in (found[0], *found[2:]))


def test_a_name_that_is_no_text_has_chunks() -> None:
    assert prompt_chunks(chat(SYSTEM, "Hello", model="\ud800"))


def test_each_api_has_chunks() -> None:
    parts = [{"type": "text", "text": SYSTEM}]
    for body in (
        {"messages": [{"role": "user", "content": parts}]},
        {"system": SYSTEM, "messages": []},
        {"instructions": SYSTEM, "input": "a"},
        {"input": [{"role": "user", "content": SYSTEM}]},
        {"prompt": SYSTEM},
    ):
        assert len(prompt_chunks(body)) >= 6
    assert prompt_chunks({"messages": 3, "prompt": None, "system": "short"}) == ()
    assert prompt_chunks({"prompt": "\ud800" * 300})


def test_the_replica_with_most_chunks_is_first() -> None:
    table, chunks = PrefixTable(), prompt_chunks(chat(SYSTEM, "a"))
    table.add(chunks[:2], "a")
    table.add(chunks, "b")
    assert table.cached_chunks(chunks, LOADS) == {"a": 2, "b": len(chunks)}
    assert table.rank(chunks, {"a": 0, "b": 4, "c": 0}, spill=4)[0] == "b"


def test_a_replica_that_is_too_busy_is_passed_over() -> None:
    table, chunks = PrefixTable(), prompt_chunks(chat(SYSTEM, "a"))
    table.add(chunks[:2], "a")
    table.add(chunks, "b")
    ranked = table.rank(chunks, {"a": 0, "b": 5, "c": 0}, spill=4)
    assert ranked == ["a", "c", "b"], "of the least loaded, the one with some of the prefix"


def test_a_replica_that_ended_is_forgotten() -> None:
    table, chunks = PrefixTable(), prompt_chunks(chat(SYSTEM, "a"))
    table.add(chunks, "a")
    table.add(chunks[:1], "b")
    table.drop("a")
    assert table.cached_chunks(chunks, LOADS) == {"b": 1}
    table.drop("b")
    assert not table._owners


def test_the_table_keeps_the_latest_chunks() -> None:
    table = PrefixTable(max_chunks=4)
    old, new = [b"1", b"2", b"3"], [b"4", b"5"]
    table.add(old, "a")
    table.add(new, "b")
    assert table.cached_chunks(old, LOADS) == {"a": 2}, "its last chunk is gone"
    assert table.cached_chunks(new, LOADS) == {"b": 2}


def test_a_table_that_grows_keeps_what_it_has_and_more() -> None:
    table = PrefixTable(max_chunks=2)
    table.add([b"1", b"2"], "a")
    table.grow(4)
    table.grow(3)
    table.add([b"3", b"4"], "b")
    assert table.cached_chunks([b"1", b"2"], LOADS) == {"a": 2}
    table.add([b"5"], "b")
    assert table.cached_chunks([b"1", b"2"], LOADS) == {"a": 1}


def test_a_table_has_room_for_the_reports_of_all_replicas() -> None:
    assert table_chunks(1) == table_chunks(8) == 65_536
    assert table_chunks(100) == 100 * MAX_REPORTED_CHUNKS


def test_gateways_that_know_nothing_choose_the_same_and_spread_prompts() -> None:
    firsts = []
    for number in range(300):
        chunks = prompt_chunks(chat(f"{number} {SYSTEM}", "a"))
        ranked = PrefixTable().rank(chunks, LOADS, spill=4)
        assert ranked == PrefixTable().rank(chunks, dict(reversed(LOADS.items())), spill=4)
        assert sorted(ranked) == ["a", "b", "c"]
        firsts.append(ranked[0])
    assert min(firsts.count(name) for name in LOADS) > 60
    assert PrefixTable().rank((), {}, spill=4) == []


def plain_rank(
    owned: Mapping[str, set[bytes]], chunks: Sequence[bytes], loads: Mapping[str, int], spill: int
) -> list[str]:
    """PrefixTable.rank as its contract says it. owned: chunks of each replica."""

    def cached(replica: str) -> int:
        missing = (at for at, chunk in enumerate(chunks) if chunk not in owned[replica])
        return next(missing, len(chunks))

    def by_load(replica: str) -> tuple[int, int, bytes]:
        first = chunks[0] if chunks else b""
        vote = hashlib.blake2b(replica.encode(), key=first, digest_size=8).digest()
        return loads[replica], -cached(replica), vote

    ranked = sorted(loads, key=by_load)
    best = max(ranked, key=cached, default=None)
    if best is not None and cached(best) and loads[best] - loads[ranked[0]] <= spill:
        ranked.remove(best)
        ranked.insert(0, best)
    return ranked


def test_ranks_are_those_of_the_contract_while_replicas_come_and_go() -> None:
    chance = random.Random(3)
    table, owned = PrefixTable(), {f"replica-{n}": set[bytes]() for n in range(12)}
    for _ in range(2000):
        length, other = chance.randrange(7), chance.randrange(3)
        parts = [other if at > chance.randrange(6) else 9 for at in range(length)]
        chunks = [bytes(parts[: at + 1]) for at in range(length)]  # each includes those before it
        names = [name for name in owned if chance.random() < 0.9]
        loads = {name: chance.randrange(7) for name in names}
        assert table.rank(chunks, loads, 2) == plain_rank(owned, chunks, loads, 2)
        replica = chance.choice(list(owned))
        if chance.random() < 0.05:
            table.drop(replica)
            owned[replica].clear()
        else:
            table.add(chunks, replica)
            owned[replica].update(chunks)
    assert any(len(each) > 10 for each in owned.values())


def test_a_replica_holds_what_it_reports_and_what_it_was_just_sent() -> None:
    table = PrefixTable()
    old, kept, sent = [b"o", b"oo"], [b"k", b"kk", b"kkk"], [b"k", b"s"]
    table.add(old, "a", 0.0)
    table.add(kept, "a", 0.0)
    table.add(old, "b", 0.0)
    table.add(sent, "a", ROUTED_S)
    table.report([b"k", b"kk"], "a", ROUTED_S + 1)
    assert table.cached_chunks(old, {"a", "b"}) == {"b": 2}, "a has lost it"
    assert table.cached_chunks(kept, {"a", "b"}) == {"a": 2}, "and the end of this one"
    assert table.cached_chunks(sent, {"a"}) == {"a": 2}, "it may be computing this"
    table.report([b"k"], "a", 2 * ROUTED_S + 1)
    assert table.cached_chunks(sent, {"a"}) == {"a": 1}, "it was not computed"
    table.report([], "a", 3 * ROUTED_S)
    assert set(table._owners) == set(old)


def test_where_a_replica_fetches_chunks_is_known_until_it_has_them() -> None:
    table = PrefixTable()
    table.note_fetch([b"o", b"oo"], "a", "b", 0.0)
    table.note_fetch([b"n"], "a", "c", 1.0)
    assert table.fetch_source([b"o", b"oo", b"ooo"], "a", 2.0) == "b"
    assert table.fetch_source([b"n"], "a", 2.0) == "c"
    assert table.fetch_source([b"o"], "b", 2.0) == "", "it has them"
    table.report([b"n"], "a", 3.0)
    assert table.fetch_source([b"n"], "a", 3.0) == ""
    assert table.fetch_source([b"o"], "a", ROUTED_S + 1) == "", (
        "it was not fetched, or is not reported"
    )
    table.note_fetch([b"x"], "a", "b", ROUTED_S + 1)
    assert list(table._fetches["a"]) == [b"x"], "the old ones are forgotten"
    table.drop("a")
    assert not table._fetches


def test_a_new_gateway_learns_from_reports_what_the_others_know() -> None:
    reports = {name: [b"s", *(name * n for n in (1, 2))] for name in (b"a", b"b")}
    old, new = PrefixTable(), PrefixTable()
    for name, held in reports.items():
        old.add(held, name.decode(), 0.0)
        for table in (old, new):
            table.report(held, name.decode(), 1.0)
    for held in reports.values():
        assert new.cached_chunks(held, LOADS) == old.cached_chunks(held, LOADS)
    assert new.cached_chunks(reports[b"a"], LOADS) == {"a": 3, "b": 1}


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc"), st.integers(0, 2))))
def test_what_is_known_of_a_replica_and_of_a_chunk_agree(
    done: list[tuple[int, str, int]],
) -> None:
    table = PrefixTable(max_chunks=12)
    for now_s, (number, replica, kind) in enumerate(done):
        chunks = tuple(bytes([number % size]) * size for size in range(1, number % 5 + 2))
        if kind == 2:
            table.add(chunks, replica, now_s)
        elif kind == 1:
            table.report(chunks, replica, now_s)
        else:
            table.drop(replica)
        by_chunk = {(c, r) for c, owners in table._owners.items() for r in owners}
        assert by_chunk == {(c, r) for r, held in table._routed_s.items() for c in held}
        assert len(table._owners) <= 12


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6), st.booleans())))
def test_a_chunk_is_never_known_without_those_before_it(
    done: list[tuple[int, int, bool]],
) -> None:
    table = PrefixTable(max_chunks=14)
    for now_s, (branch, length, is_report) in enumerate(done):
        chunks = [bytes([9, 9, *[branch] * 5][: end + 1]) for end in range(length)]
        if is_report:
            table.report(chunks, "a", 4.0 * now_s)
        else:
            table.add(chunks, "a", 4.0 * now_s)
        assert all(chunk[:-1] in table._owners or len(chunk) == 1 for chunk in table._owners)
