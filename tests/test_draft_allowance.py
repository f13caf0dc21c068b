"""What drafting may spend before it has been shown to gain."""

from __future__ import annotations

import pytest
from drafting import Guesser, Steps, decoding

from localgen.backends.engine.drafts.speculation import Speculation
from localgen.backends.engine.sequence import Sequence

STEP_MS = 10.0


def flat(tokens: int) -> float:
    return STEP_MS


class Dear(Guesser):
    """Looking for its drafts takes longer than a step."""

    now_s = 0.0

    def chances(self, seq: Sequence, most: int) -> list[float]:
        self.now_s += 5 * STEP_MS / 1e3
        return super().chances(seq, most)


def full(tokens: int) -> float:
    return STEP_MS * tokens


class Unread(Guesser):
    """A draft model that has a long text to read. read_ms: what it has read for. is_ready: whether
    it has read it."""

    is_ready = False

    def __init__(self, chance: float, *, ms: float = 0.0) -> None:
        super().__init__(chance, ms=ms)
        self.chance, self.read_ms = chance, 0.0

    def chances(self, seq: Sequence, most: int) -> list[float]:
        return super().chances(seq, most) if self.is_ready else []

    def usual_chance(self) -> float:
        return 0.0 if self.is_ready else self.chance

    def catch_up(self, most_ms: float) -> None:
        self.read_ms += most_ms

    def clock(self) -> float:
        return self.read_ms / 1e3


def run_unread(drafter: Unread, steps: int) -> float:
    """Plain steps' worth of what it has read for."""
    running = Steps(Speculation([drafter], clock=drafter.clock), flat)
    running.run([decoding()], steps)
    return drafter.read_ms / STEP_MS


def test_steps_that_nobody_looked_at_are_counted() -> None:
    dear = Dear(0.0)
    speculation = Speculation([dear], clock=lambda: dear.now_s)
    steps = Steps(speculation, flat)
    one, other = decoding("one"), decoding("other")
    steps.run([one], 50)
    assert speculation.of(one).steps == 50
    steps.run([one, other], 21)
    steps.run([other], 3)
    assert [speculation.of(seq).steps for seq in (one, other)] == [71, 24]
    assert speculation.stats.tokens_per_step == 1


def test_their_time_counts_too() -> None:
    speculation = Speculation([Guesser(0.0)], clock=lambda: 0.0)
    steps, seq = Steps(speculation, flat), decoding()
    steps.run([seq], 200)
    assert speculation.of(seq).speedup == pytest.approx(1.0, abs=0.02)
    assert speculation.stats.speedup == pytest.approx(1.0, abs=0.02)


def test_a_draft_model_of_which_nothing_is_known_reads_for_a_while() -> None:
    assert 7 < run_unread(Unread(0.6), 100) < 9
    assert run_unread(Unread(0.6), 4_000) < 9 + 0.003 * 4_000


def test_one_that_is_mostly_wrong_reads_nothing() -> None:
    assert run_unread(Unread(0.2), 500) == 0


def test_one_that_has_been_measured_and_would_pay_reads_on() -> None:
    assert run_unread(Unread(0.9, ms=0.1 * STEP_MS), 500) > 100


def test_one_that_has_been_measured_and_would_not_pay_does_not() -> None:
    assert run_unread(Unread(0.9, ms=2 * STEP_MS), 500) < 10


def test_reading_leaves_the_time_for_tries() -> None:
    unread, seq = Unread(0.6), decoding()
    steps = Steps(Speculation([unread], clock=unread.clock), full)
    steps.run([seq], 100)
    assert not any(steps.lengths)
    unread.is_ready = True
    steps.run([seq], 20)
    assert any(steps.lengths)
