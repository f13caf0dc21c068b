"""Sequences with different adapters take turns, over a runner that checks every call."""

from __future__ import annotations

import itertools
import random

import pytest
from fake_runner import FakeRunner, generate
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import drain, guesses, make, sequence

from localgen.backends.adapters import Adapter, Adapters
from localgen.backends.engine.adapter_turns import TURN_MS
from localgen.backends.engine.background import is_background
from localgen.backends.engine.speculation.drafter import DraftProposal
from localgen.backends.errors import LoadFailed
from localgen.backends.runner.sequence import Sequence, SequenceState


def adapter(key: str) -> Adapter:
    return Adapter(key, 1.0, key, 1, None)


SETS = ((), (adapter("a"),), (adapter("b"),), (adapter("a"), adapter("b")))
HEAD = [1, 2] * 20  # worth waiting for


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(
            st.sampled_from([(), *SETS]),
            st.sampled_from([[], HEAD]),
            st.lists(st.integers(1, 3), min_size=1, max_size=20),
            st.sampled_from([0, 1, -1, -1]),
        ),
        min_size=1,
        max_size=12,
    ),
    kv_tokens=st.integers(64, 400),
    max_seqs=st.integers(1, 6),
    step_ms=st.sampled_from([1.0, TURN_MS / 3, 2 * TURN_MS]),
    seed=st.integers(0, 2**16),
)
def test_a_step_has_one_set_of_adapters_and_no_text_changes(
    prompts: list[tuple[Adapters, list[int], list[int], int]],
    kv_tokens: int,
    max_seqs: int,
    step_ms: float,
    seed: int,
) -> None:
    rng, runner = random.Random(seed), FakeRunner(kv_tokens=kv_tokens, max_seqs=max_seqs)
    scheduler = make(runner)
    seqs = [
        sequence(f"{number}", head + tail, adapters=used, priority=priority)
        for number, (used, head, tail, priority) in enumerate(prompts)
    ]
    waiting = list(seqs)
    while waiting or scheduler.has_work:
        if waiting and rng.random() < 0.5:
            scheduler.submit(waiting.pop())
        for seq in scheduler.decoding:
            if rng.random() < 0.3:
                scheduler.set_drafts(seq, DraftProposal(guesses(seq, rng)))
        if chunks := scheduler.plan():
            assert len({chunk.seq.adapters for chunk in chunks}) == 1
            if any(scheduler.get(seq.id) and not is_background(seq) for seq in seqs):
                beside = [chunk for chunk in chunks if is_background(chunk.seq)]
                assert len(beside) < len(chunks)
                assert not any(chunk.num_drafts for chunk in beside)
            scheduler.apply(chunks, runner.collect(runner.launch(chunks)), step_ms)
    for seq in seqs:
        assert seq.tokens[seq.num_prompt :] == generate(seq.tokens[: seq.num_prompt], 64)
    assert runner.usage().used == 0


@pytest.mark.parametrize("step_ms", [1.0, 20.0, 500.0])
def test_adapters_take_turns(step_ms: float) -> None:
    runner = FakeRunner(kv_tokens=4096, max_seqs=8)
    scheduler = make(runner)
    # many with one set, one with another, and a long prompt with a third
    for number in range(6):
        scheduler.submit(sequence(f"{number}", [1, 2, 3], limit=500, ends=False))
    scheduler.submit(sequence("a", [1, 2], limit=500, ends=False, adapters=SETS[1]))
    scheduler.submit(sequence("b", [3] * 1000, limit=2000, ends=False, adapters=SETS[2]))
    order = []
    for _ in range(400):
        chunks = scheduler.plan()
        order.append(chunks[0].seq.adapters)
        scheduler.apply(chunks, runner.collect(runner.launch(chunks)), step_ms)
    turns = [next(group) for _, group in itertools.groupby(order)]
    for first, second, third in zip(turns, turns[1:], turns[2:], strict=False):
        assert len({first, second, third}) == 3, "nobody comes twice before another comes once"
    longest = max(len(list(group)) for _, group in itertools.groupby(order))
    assert longest == max(1, -(-TURN_MS // step_ms))


def test_the_turn_of_an_adapter_ends_with_its_last_sequence() -> None:
    runner = FakeRunner()
    scheduler = make(runner)
    scheduler.submit(sequence("long", [1, 2], limit=100, ends=False))
    scheduler.submit(sequence("short", [1, 2], limit=3, ends=False, adapters=SETS[1]))
    seen = [scheduler.plan()]
    while seen[-1]:
        scheduler.apply(seen[-1], runner.collect(runner.launch(seen[-1])), step_ms=TURN_MS)
        seen.append(scheduler.plan())
    owners = [chunks[0].seq.id for chunks in seen if chunks]
    assert owners[:3] == ["long", "short", "long"]
    assert set(owners[2:]) == {"long"}


def test_adapters_in_the_background_take_no_turn_beside_others() -> None:
    runner = FakeRunner(kv_tokens=4096, max_seqs=8, batch=32)
    scheduler = make(runner)
    for number, adapters in enumerate(SETS[1:]):
        prompt = [number, 1]
        scheduler.submit(
            sequence(f"b{number}", prompt, limit=500, priority=-1, ends=False, adapters=adapters)
        )
    for _ in range(2 * len(SETS)):
        chunks = scheduler.plan()
        scheduler.apply(chunks, runner.collect(runner.launch(chunks)), step_ms=TURN_MS)
    person = sequence("person", [3] * 64, limit=80, ends=False)
    scheduler.submit(person)
    computed = []
    while scheduler.get("person"):
        assert scheduler.decoding == [person] or not person.num_generated, "it gets its drafts"
        chunks = scheduler.plan()
        assert [chunk.seq for chunk in chunks] == [person]
        computed.append(len(chunks[0].tokens))
        scheduler.apply(chunks, runner.collect(runner.launch(chunks)), step_ms=1.2 * TURN_MS)
    assert computed[:2] == [32, 32], "those that do not compute get no share of its prompt"


def test_a_sequence_that_cannot_be_admitted_ends_with_the_reason() -> None:
    runner = FakeRunner()

    def admit(seq: Sequence, *, spare: int) -> int:
        if seq.adapters:
            raise LoadFailed("damaged")
        return FakeRunner.admit(runner, seq, spare=spare)

    runner.admit = admit  # type: ignore[method-assign]
    scheduler = make(runner)
    bad = sequence("bad", [1, 2], adapters=SETS[1])
    scheduler.submit(bad)
    scheduler.submit(sequence("good", [1, 2]))
    drain(scheduler, runner)
    ((rejected, error),) = scheduler.take_rejected()
    assert (rejected, error.message) == (bad, "damaged")
    assert bad.state is SequenceState.ENDED
    assert not scheduler.take_rejected()
