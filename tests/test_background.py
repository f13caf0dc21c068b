"""Requests of negative priority: they take only the time that others leave."""

from __future__ import annotations

from fake_runner import FakeRunner, generate
from scheduling import Clock, drain, sequence, turn
from scheduling import make as make_scheduler

from localgen.backends.engine.background import MAX_STEP_MS, rows_beside
from localgen.backends.engine.fair_queue import AGING_S, effective_priority
from localgen.backends.engine.scheduler import Scheduler
from localgen.backends.engine.speculation.drafter import DraftProposal
from localgen.backends.engine.step_costs import StepCosts
from localgen.backends.engine.token_budget import MIN_PROMPT_TOKENS, TokenBudget
from localgen.backends.runner.sequence import SequenceState

BATCH = 64


def budget_of(row_ms: float, token_ms: float) -> TokenBudget:
    """A machine on which a decode step takes 10 ms, row_ms more for each further row."""
    budget = TokenBudget(BATCH, itl_target_ms=1e9)
    for rows in range(1, 9):
        budget.observe(10 + row_ms * (rows - 1), 0, rows)
    budget.observe(10 * token_ms, 10, 0)
    return budget


def make(budget: TokenBudget) -> tuple[Scheduler, FakeRunner]:
    runner = FakeRunner(kv_tokens=1000, max_seqs=8, batch=BATCH, outputs=BATCH, rewinds=True)
    return Scheduler(runner, budget=budget, max_queue=100, clock=Clock()), runner


def chunks_of(scheduler: Scheduler, runner: FakeRunner) -> dict[str, int]:
    """One step; the tokens of each sequence in it."""
    chunks = scheduler.plan()
    sizes = {chunk.seq.id: len(chunk.tokens) for chunk in chunks}
    # as long as the machine is measured to take: costs stay what they are
    scheduler.apply(chunks, runner.collect(runner.launch(chunks)), 1.0, is_typical=False)
    return sizes


def running_batch(budget: TokenBudget, count: int = 3) -> tuple[Scheduler, FakeRunner]:
    scheduler, runner = make(budget)
    for at in range(count):
        prompt = [at % 3 + 1, 1, 2]
        scheduler.submit(sequence(f"b{at}", prompt, limit=60, priority=-1, ends=False))
    while scheduler.is_prefilling or not scheduler.running:
        chunks_of(scheduler, runner)
    return scheduler, runner


def test_they_wait_where_each_row_costs() -> None:
    scheduler, runner = running_batch(budget_of(row_ms=5, token_ms=1))
    assert set(chunks_of(scheduler, runner)) == {"b0", "b1", "b2"}
    person = sequence("person", [3, 3, 3], limit=12, ends=False)
    scheduler.submit(person)
    while person.state is not SequenceState.ENDED:
        assert set(chunks_of(scheduler, runner)) == {"person"}
    assert set(chunks_of(scheduler, runner)) == {"b0", "b1", "b2"}
    drain(scheduler, runner)
    assert not scheduler.has_work


def test_they_fill_what_is_left_where_rows_are_cheap() -> None:
    scheduler, runner = running_batch(budget_of(row_ms=0.4, token_ms=0.25))
    scheduler.submit(sequence("person", [3, 3, 3], limit=30, ends=False))
    assert set(chunks_of(scheduler, runner)) == {"person"}  # its prompt has the step alone
    assert set(chunks_of(scheduler, runner)) == {"person", "b0", "b1"}  # 10.8 of 11 ms
    scheduler, runner = running_batch(budget_of(row_ms=0, token_ms=0.25), count=1)
    scheduler.submit(sequence("person", [3, 3, 3], limit=30, ends=False))
    chunks_of(scheduler, runner)
    scheduler.submit(sequence("b9", [2] * 20, limit=60, priority=-1, ends=False))
    assert chunks_of(scheduler, runner) == {"person": 1, "b0": 1, "b9": 4}  # 1 ms of tokens


def test_a_prompt_in_the_background_does_not_stop_the_drafts_of_others() -> None:
    scheduler, runner = make(budget_of(row_ms=5, token_ms=1))
    scheduler.submit(sequence("person", [3, 3, 3], limit=30, ends=False))
    chunks_of(scheduler, runner)
    scheduler.submit(sequence("b", [2] * 50, limit=60, priority=-1, ends=False))
    chunks_of(scheduler, runner)
    assert [seq.id for seq in scheduler.running] == ["person", "b"]
    assert not scheduler.is_prefilling
    assert [seq.id for seq in scheduler.decoding] == ["person"]


def test_alone_their_steps_are_short() -> None:
    budget = budget_of(row_ms=1, token_ms=10)
    assert budget.background_tokens(0) == int(MAX_STEP_MS / 10)
    assert budget.background_tokens(0) < budget.prompt_tokens(0)
    assert budget_of(row_ms=1, token_ms=100).background_tokens(1) == MIN_PROMPT_TOKENS
    assert TokenBudget(BATCH, 1.0).background_tokens(0) == MIN_PROMPT_TOKENS


def test_one_that_waits_long_never_takes_the_place_of_another() -> None:
    old = sequence("old", [1], priority=-1, arrived_s=0)
    assert effective_priority(old, 100 * AGING_S) == -1
    assert effective_priority(sequence("low", [1], priority=0), 2 * AGING_S) == 2


def test_only_measured_sizes_count() -> None:
    costs = StepCosts()
    costs.observe(1, 10.0)
    assert rows_beside(costs, 1, 8) == 0
    costs.observe(4, 10.6)
    assert rows_beside(costs, 1, 8) == 3
    assert rows_beside(costs, 1, 2) == 2


def test_nobody_waits_for_a_prefix_that_one_in_the_background_computes() -> None:
    scheduler, runner = make(budget_of(row_ms=5, token_ms=2))
    scheduler.submit(sequence("chat", [3, 3, 3], limit=200, ends=False))
    chunks_of(scheduler, runner)
    prompt = [1, 2] * 30
    scheduler.submit(sequence("b0", prompt, limit=64, priority=-1))
    assert set(chunks_of(scheduler, runner)) == {"chat"}
    scheduler.submit(sequence("b1", prompt, limit=64, priority=-1))
    scheduler.submit(sequence("person", prompt, limit=64))
    assert set(chunks_of(scheduler, runner)) == {"chat", "person"}
    assert [seq.id for seq in scheduler.queue] == ["b1"], "it waits for either"


def test_drafts_from_the_time_alone_do_not_slow_others() -> None:
    scheduler, runner = running_batch(budget_of(row_ms=0.4, token_ms=0.25))
    for seq in scheduler.decoding:
        scheduler.set_drafts(seq, DraftProposal([5] * 12))
    scheduler.submit(sequence("person", [7, 7, 7], limit=30, ends=False))
    assert chunks_of(scheduler, runner) == {"person": 3}
    assert chunks_of(scheduler, runner) == {"person": 1, "b0": 1, "b1": 1}


def test_one_that_is_preempted_leaves_no_prefix() -> None:
    runner = FakeRunner(max_seqs=1)
    scheduler = make_scheduler(runner)
    prompt = [1, 2, 3] * 8
    batch = sequence("b", prompt, limit=60, priority=-1, ends=False)
    scheduler.submit(batch)
    while not batch.num_generated:
        turn(scheduler, runner)
    person = sequence("person", prompt, limit=30)
    scheduler.submit(person)
    turn(scheduler, runner)
    assert (batch.num_preemptions, person.num_cached) == (1, 0)
    drain(scheduler, runner)
    assert batch.tokens == [*prompt, *generate(prompt, 60, ends=False)]


def test_they_leave_no_prefix_in_place_of_those_of_others() -> None:
    scheduler, runner = make(budget_of(row_ms=1, token_ms=1))
    prompt = [1, 2, 3] * 8
    scheduler.submit(sequence("b", prompt, limit=30, priority=-1))
    while turn(scheduler, runner):
        pass
    again = sequence("again", prompt, limit=30)
    scheduler.submit(again)
    turn(scheduler, runner)
    assert again.num_cached == 0
