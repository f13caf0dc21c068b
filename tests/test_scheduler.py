"""Properties of scheduling, over a runner that checks every call."""

from __future__ import annotations

import random

import pytest
from fake_runner import FakeRunner, generate, score_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import Clock, drain, guesses, make, sequence, turn

from localgen.backends.engine.fair_queue import AGING_S
from localgen.backends.engine.prompt_chunks import MIN_SHARED_TOKENS
from localgen.backends.engine.scheduler import ADMISSION_INTERVAL_S
from localgen.backends.engine.token_budget import MIN_PROMPT_TOKENS, TokenBudget
from localgen.backends.errors import QueueFull
from localgen.backends.runner.sequence import Sequence, SequenceState, common_prefix_len
from localgen.backends.sampling_params import SamplingParams

prompts = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=50), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    prompts=prompts,
    kv_tokens=st.integers(64, 200),
    max_seqs=st.integers(1, 6),
    batch=st.integers(6, 40),
    rewinds=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_text_depends_on_nothing_but_the_prompt(
    prompts: list[list[int]], kv_tokens: int, max_seqs: int, batch: int, rewinds: bool, seed: int
) -> None:
    """Chunks, batch mates, preemption, prefix hits, priorities, late arrivals, drafts, cancels.

    Nor do the logprobs of prompts, each of which is returned once.
    """
    rng = random.Random(seed)
    outputs = rng.randint(max_seqs, batch)
    runner = FakeRunner(
        kv_tokens=kv_tokens, max_seqs=max_seqs, batch=batch, outputs=outputs, rewinds=rewinds
    )
    scheduler = make(runner)
    waiting = [
        sequence(str(i), prompt, client=rng.choice("abc"), priority=rng.choice([0, 0, 1, -1]))
        for i, prompt in enumerate(prompts)
    ]
    for seq in waiting:
        if rng.random() < 0.4:
            seq.echo, seq.params = "", SamplingParams(logprobs=0)
            seq.max_len = rng.choice([seq.num_prompt, seq.max_len])
    cancelled = set()
    everyone = list(waiting)
    for _ in range(100_000):
        if waiting and rng.random() < 0.5:
            scheduler.submit(waiting.pop())
        live = [seq for seq in everyone if scheduler.get(seq.id)]
        if live and rng.random() < 0.02:
            victim = rng.choice(live)
            scheduler.end(victim)
            cancelled.add(victim.id)
        if rewinds:
            for seq in live:
                if rng.random() < 0.3:
                    seq.drafts = guesses(seq, rng)
        if not turn(scheduler, runner) and not waiting:
            break
    assert not scheduler.has_work
    for seq in everyone:
        expected = generate(seq.tokens[: seq.num_prompt], seq.max_len)
        answer = seq.tokens[seq.num_prompt :]
        assert seq.state is SequenceState.ENDED
        assert answer == (expected[: len(answer)] if seq.id in cancelled else expected)
        scores = [position.chosen.logprob for position in seq.scored]
        ends = range(1, seq.num_prompt) if seq.is_scored else ()
        exact = [score_of(seq.tokens[:end]) for end in ends]
        assert scores == (exact[: len(scores)] if seq.id in cancelled else exact)
    runner.check()


def test_requests_that_arrive_together_compute_their_common_prefix_once() -> None:
    runner = FakeRunner(kv_tokens=4096, max_seqs=8, batch=64)
    scheduler = make(runner)
    shared = [1, 2, 3, 4] * 50
    for i in range(4):
        scheduler.submit(sequence(str(i), [*shared, 10 + i], limit=len(shared) + 2))
    drain(scheduler, runner)
    # the shared tokens once, then each sequence's own token and the generated one;
    # the last few tokens of a prefix are not waited for
    unshared = 3 * (MIN_SHARED_TOKENS - 1)
    assert runner.computed <= len(shared) + 4 * 2 + unshared
    assert scheduler.counters.prefix_hits >= 3 * len(shared) - unshared


def test_no_prefix_is_waited_for_that_has_another_salt() -> None:
    runner = FakeRunner(kv_tokens=4096, max_seqs=8, batch=64)
    scheduler = make(runner)
    for salt in ("one", "two", "two"):
        seq = sequence(f"{salt}{len(scheduler.queue)}", [1, 2, 3, 4] * 50, limit=202)
        seq.cache_salt = salt
        scheduler.submit(seq)
    scheduler.plan()
    assert [seq.cache_salt for seq in scheduler.running] == ["one", "two"]


def test_without_rewind_nothing_is_shared() -> None:
    runner = FakeRunner(kv_tokens=4096, max_seqs=8, batch=64, rewinds=False)
    scheduler = make(runner)
    for i in range(3):
        scheduler.submit(sequence(str(i), [1] * 100, limit=102))
    drain(scheduler, runner)
    assert scheduler.counters.prefix_hits == 0
    assert runner.computed >= 300


def test_decoding_goes_on_while_a_long_prompt_is_read() -> None:
    runner = FakeRunner(kv_tokens=4096, max_seqs=4, batch=32)
    scheduler = make(runner)
    scheduler.submit(sequence("talker", [5], limit=400))
    turn(scheduler, runner)
    scheduler.submit(sequence("reader", [7] * 500, limit=502))
    for _ in range(10):
        turn(scheduler, runner)
        assert ("talker", 1) in runner.steps[-1]
        assert ("reader", 31) in runner.steps[-1]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    runner = FakeRunner(kv_tokens=4096, max_seqs=4, batch=32)
    scheduler = make(runner)
    long = sequence("long", [7] * 1000, limit=1002, arrived_s=1)
    short = sequence("short", [9] * 10, limit=12, arrived_s=2)
    scheduler.submit(long)
    turn(scheduler, runner)
    scheduler.submit(short)
    turn(scheduler, runner)
    assert dict(runner.steps[-1]) == {"long": 22, "short": 10}
    assert short.num_generated == 1


def test_out_of_room_preempts_the_youngest_of_the_lowest_priority() -> None:
    runner = FakeRunner(kv_tokens=64, max_seqs=3, batch=32)
    scheduler = make(runner)
    first = sequence("first", [1, 2], limit=60, arrived_s=1, ends=False)
    second = sequence("second", [2, 2], limit=60, arrived_s=2, ends=False)
    urgent = sequence("urgent", [3, 2], limit=60, priority=1, arrived_s=3, ends=False)
    for seq in (first, second, urgent):
        scheduler.submit(seq)
    drain(scheduler, runner)
    assert urgent.num_preemptions == 0
    assert first.num_preemptions <= second.num_preemptions
    assert second.num_preemptions > 0
    assert scheduler.counters.preemptions == sum(
        seq.num_preemptions for seq in (first, second, urgent)
    )
    for seq in (first, second, urgent):
        assert seq.tokens[2:] == generate(seq.tokens[:2], 60, ends=False)


def test_a_higher_priority_takes_the_place_of_a_lower_one() -> None:
    runner = FakeRunner(kv_tokens=256, max_seqs=1, batch=32)
    scheduler = make(runner)
    low = sequence("low", [1, 2], limit=100, arrived_s=1)
    high = sequence("high", [2, 3], limit=8, priority=5, arrived_s=2)
    scheduler.submit(low)
    turn(scheduler, runner)
    scheduler.submit(high)
    turn(scheduler, runner)
    assert high.state is SequenceState.RUNNING
    assert low.state is SequenceState.QUEUED
    drain(scheduler, runner)
    assert low.tokens[2:] == generate([1, 2], 100)


def test_clients_are_served_in_turn_however_many_requests_one_has() -> None:
    runner = FakeRunner(kv_tokens=4096, max_seqs=1, batch=32, rewinds=False)
    scheduler = make(runner)
    greedy = [
        sequence(f"greedy{i}", [1] * 20, limit=22, client="g", arrived_s=i / 1e3) for i in range(20)
    ]
    for seq in greedy:
        scheduler.submit(seq)
    for _ in range(3):
        turn(scheduler, runner)
    late = sequence("late", [2] * 20, limit=22, client="l", arrived_s=0.1)
    scheduler.submit(late)
    while late.state is not SequenceState.ENDED:
        assert turn(scheduler, runner)
    assert sum(seq.state is SequenceState.ENDED for seq in greedy) <= 4


def test_waiting_raises_priority_so_that_nobody_starves() -> None:
    clock = Clock()
    runner = FakeRunner(kv_tokens=4096, max_seqs=1, batch=32, rewinds=False)
    scheduler = make(runner, clock=clock)
    scheduler.submit(sequence("low", [1, 1], limit=4, arrived_s=clock.now_s))
    for i in range(100):
        scheduler.submit(
            sequence(f"high{i}", [2, 2], limit=4, priority=1, client="h", arrived_s=clock.now_s)
        )
        turn(scheduler, runner)
        clock.now_s += AGING_S / 10
        if scheduler.get("low") is None:
            return
    raise AssertionError("the request of low priority was never served")


def test_a_full_queue_refuses() -> None:
    runner = FakeRunner(max_seqs=1)
    scheduler = make(runner, max_queue=2)
    for name in "abc":
        scheduler.submit(sequence(name, [1]))
    assert [seq.id for seq in scheduler.running] == ["a"], "whoever can run does not wait"
    with pytest.raises(QueueFull, match="2 requests are waiting, the limit is 2"):
        scheduler.submit(sequence("d", [1]))


def test_budget_keeps_mixed_steps_near_their_target() -> None:
    budget = TokenBudget(512, itl_target_ms=100)
    assert budget.prompt_tokens(decode_tokens=0) == 512
    assert budget.prompt_tokens(decode_tokens=4) == 508, "nothing is known yet"
    budget.observe(step_ms=1000, prompt_tokens=500, decode_tokens=0)  # 2 ms a token
    assert budget.prompt_tokens(decode_tokens=4) == 50, "what decoding alone takes is not known yet"
    budget.observe(step_ms=20, prompt_tokens=0, decode_tokens=4)
    assert budget.prompt_tokens(decode_tokens=4) == 40
    assert budget.prompt_tokens(decode_tokens=0) == 512
    budget.observe(step_ms=60, prompt_tokens=1, decode_tokens=0)  # mostly overhead
    assert 35 <= budget.prompt_tokens(decode_tokens=4) < 40


def test_budget_learns_that_tokens_became_dearer_and_cheaper() -> None:
    budget = TokenBudget(512, itl_target_ms=100)
    budget.observe(step_ms=20, prompt_tokens=0, decode_tokens=4)
    for _ in range(40):
        budget.observe(step_ms=180, prompt_tokens=40, decode_tokens=4)
    assert budget.prompt_tokens(decode_tokens=4) == 20
    for _ in range(40):
        budget.observe(step_ms=60, prompt_tokens=40, decode_tokens=4)
    assert 75 <= budget.prompt_tokens(decode_tokens=4) <= 81


def test_the_cost_of_a_large_batch_says_nothing_of_a_small_one() -> None:
    budget = TokenBudget(512, itl_target_ms=100)
    budget.observe(step_ms=1000, prompt_tokens=500, decode_tokens=0)  # 2 ms a token
    budget.observe(step_ms=90, prompt_tokens=0, decode_tokens=16)
    budget.observe(step_ms=20, prompt_tokens=0, decode_tokens=1)
    assert budget.prompt_tokens(decode_tokens=2) == 37
    assert budget.prompt_tokens(decode_tokens=14) == 80


def test_prompts_go_on_where_decoding_alone_passes_the_target() -> None:
    budget = TokenBudget(512, itl_target_ms=100)
    budget.observe(step_ms=700, prompt_tokens=100, decode_tokens=0)
    budget.observe(step_ms=400, prompt_tokens=0, decode_tokens=16)
    assert budget.prompt_tokens(decode_tokens=16) == 800 // 7
    budget.observe(step_ms=1e6, prompt_tokens=1, decode_tokens=0)
    assert budget.prompt_tokens(decode_tokens=16) == MIN_PROMPT_TOKENS


@given(a=st.lists(st.integers(0, 2)), b=st.lists(st.integers(0, 2)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix_len(a, b) == expected


def test_a_blocked_queue_is_not_sorted_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    runner = FakeRunner(kv_tokens=400, max_seqs=2, batch=40)
    scheduler = make(runner, clock=clock)
    waiting = [sequence(str(i), [1, 2, 3], limit=60, ends=False) for i in range(10)]
    for seq in waiting:
        scheduler.submit(seq)
    sorted_at = []
    in_turn = scheduler.queue.in_turn

    def counted(now_s: float) -> list[Sequence]:
        sorted_at.append(now_s)
        return in_turn(now_s)

    monkeypatch.setattr(scheduler.queue, "in_turn", counted)
    for _ in range(40):
        clock.now_s = 1.0
        assert turn(scheduler, runner) == 2
    assert len(sorted_at) == 1
    scheduler.end(scheduler.running[0])
    clock.now_s = 1.0
    assert turn(scheduler, runner) == 2, "an end makes room at once"
    clock.now_s = 1.0 + 2 * ADMISSION_INTERVAL_S
    turn(scheduler, runner)
    assert len(sorted_at) == 3
