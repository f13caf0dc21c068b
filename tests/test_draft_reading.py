"""What a draft model may read for: its drafts' own gains, and little else."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from drafting import Guesser, Steps, Unread, decoding

from localgen.backends.engine.speculation.allowance import Allowance
from localgen.backends.engine.speculation.drafter import DraftProposal
from localgen.backends.engine.speculation.speculation import Speculation
from localgen.backends.runner.sequence import Sequence

STEP_MS = 10.0
# what it may read for before it has gained anything, in plain steps
FIRST, SHARE = 9.0, 0.003


def flat(tokens: int) -> float:
    return STEP_MS


def tiled(tokens: int) -> float:
    """Four tokens take no longer than one."""
    return STEP_MS * max(4, tokens) / 4


class Wrong(Unread):
    """A draft model that believes in itself, and is wrong; for texts of any name but "copy"."""

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        return [self.chance] * max_drafts if self.is_ready and seq.id != "copy" else []

    def propose(self, requests: Seq[tuple[Sequence, int]]) -> list[DraftProposal]:
        self.alpha = 0.0
        return super().propose(requests)

    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        self.proposed.pop(seq, None)


def read_steps(reader: Unread) -> float:
    """Plain steps' worth of what it has read for."""
    return reader.read_ms / STEP_MS


def gaining(alpha: float) -> tuple[Unread, Steps]:
    """A draft model that drafts were made with, and that has another text to read now."""
    unread, seq = Unread(alpha, ms=0.1 * STEP_MS), decoding()
    unread.is_ready = True
    steps = Steps(Speculation([unread], clock=unread.clock), flat)
    steps.run([seq], 60)
    assert any(steps.lengths)
    unread.is_ready = False
    return unread, steps


def test_it_reads_on_for_what_it_gained() -> None:
    unread, steps = gaining(0.9)
    gained = steps.tokens - steps.steps
    steps.run([decoding()], 1_000)
    assert 40 < read_steps(unread) < gained + FIRST + SHARE * 1_000


def test_gains_of_long_ago_are_not_all_kept() -> None:
    unread, steps = gaining(0.9)
    unread.is_ready = True
    steps.run([decoding()], 500)
    unread.is_ready = False
    steps.run([decoding()], 2_000)
    assert 120 < read_steps(unread) < 128 + FIRST + SHARE * 3_000


@pytest.mark.parametrize("what", ["too dear", "mostly wrong"])
def test_gains_are_not_spent_on_what_would_not_pay(what: str) -> None:
    unread, steps = gaining(0.9)
    if what == "too dear":
        unread.ms = 5 * STEP_MS
    else:
        unread.chance = 0.02
    steps.run([decoding()], 1_000)
    assert read_steps(unread) < FIRST + SHARE * 1_100


def test_losses_count_but_not_for_ever() -> None:
    allowance = Allowance()
    allowance.earn(STEP_MS, STEP_MS, STEP_MS)
    while allowance.may_read(would_pay=False):
        allowance.read(STEP_MS, would_pay=False)
    allowance.gained(3 * STEP_MS, STEP_MS)
    assert allowance.may_read(would_pay=True)
    allowance.gained(-4 * STEP_MS, STEP_MS)
    assert not allowance.may_read(would_pay=True)
    allowance.gained(-1_000 * STEP_MS, STEP_MS)
    allowance.gained(7 * STEP_MS, STEP_MS)
    assert not allowance.may_read(would_pay=True)
    allowance.gained(2 * STEP_MS, STEP_MS)
    assert allowance.may_read(would_pay=True), "what was lost long ago is forgiven"


class Copying(Unread):
    """One that knows without being tried, for texts of some name."""

    needs_probing = False

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        return super().acceptance_probs(seq, max_drafts) if seq.id == "copy" else []


def test_what_others_gained_is_not_read_for() -> None:
    unread, copying = Unread(0.9, ms=0.1 * STEP_MS), Copying(0.9)
    copying.is_ready = True
    steps = Steps(Speculation([copying, unread], clock=unread.clock), flat)
    steps.run([decoding("copy")], 500)
    assert sum(steps.lengths) > 500
    assert read_steps(unread) < FIRST + SHARE * 500


def test_nor_what_others_gained_in_the_same_step() -> None:
    wrong, copying = Wrong(0.9, ms=0.1 * STEP_MS), Copying(0.9)
    copying.is_ready = wrong.is_ready = True
    steps = Steps(Speculation([wrong, copying], clock=wrong.clock), flat)
    steps.run([decoding("copy"), decoding("other")], 300)
    assert steps.speculation.stats.speedup > 1.5, "all in all they gained"
    wrong.is_ready = copying.is_ready = False
    steps.run([decoding()], 1_000)
    assert read_steps(wrong) < FIRST + SHARE * 1_300


def test_where_many_fill_a_step_what_one_gained_alone_is_not_spent() -> None:
    unread, seq = Unread(0.9, ms=0.1 * STEP_MS), decoding()
    unread.is_ready = True
    steps = Steps(Speculation([unread], clock=unread.clock), tiled)
    steps.run([seq], 200)
    assert sum(steps.lengths) > 200
    unread.is_ready, unread.chance = False, 0.6
    steps.run([decoding(str(i)) for i in range(16)], 300)
    # a step of sixteen takes four times as long
    assert read_steps(unread) < 4 * (FIRST + SHARE * 300)


class Ahead:
    """A device that computes the next plain step before it is asked for: who wants to use it has
    to wait."""

    def __init__(self, drafter: Unread) -> None:
        self.drafter, self.waits, self.waited_ms = drafter, 0, 0.0

    def synchronize(self) -> None:
        self.waits += 1
        self.waited_ms += 0.9 * STEP_MS

    def clock(self) -> float:
        return self.drafter.clock() + self.waited_ms / 1e3


def test_what_is_waited_for_is_the_steps_own_time() -> None:
    unread, seq = Unread(0.6), decoding()
    ahead = Ahead(unread)
    speculation = Speculation([unread], synchronize=ahead.synchronize, clock=ahead.clock)
    Steps(speculation, flat).run([seq], 1)
    assert speculation.waited_ms == 0, "nothing is known yet, and nothing read"
    Steps(speculation, flat).run([seq], 1)
    assert speculation.waited_ms == pytest.approx(0.9 * STEP_MS)
    Steps(speculation, flat).run([seq], 98)
    assert 7 < read_steps(unread) < FIRST, "it is not charged for the wait"
    assert speculation.request_stats(seq).speedup > 0.9
    assert ahead.waits < 40, "nor is anything waited for where nothing is read"


@pytest.mark.parametrize(("kind", "waits"), [(Guesser, True), (Copying, False)])
def test_a_draft_model_waits_before_it_drafts(kind: type[Guesser], waits: bool) -> None:
    unread = Unread(0.0)
    ahead, drafter, seq = Ahead(unread), kind(0.9), decoding("copy")
    if isinstance(drafter, Unread):
        drafter.is_ready = True
    speculation = Speculation([drafter], synchronize=ahead.synchronize, clock=ahead.clock)
    steps = Steps(speculation, flat)
    steps.run([seq], 50)
    assert sum(map(bool, steps.lengths)) > 20
    assert bool(ahead.waits) == waits
    for length in steps.lengths[-1:]:
        assert not (length and speculation.waited_ms), "what was computed in vain is no plain step"
