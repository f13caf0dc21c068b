"""What drafting may spend before it has been shown to gain."""

from __future__ import annotations

import pytest
from drafting import Guesser, Steps, Unread, decoding

from localgen.backends.engine.speculation.allowance import Allowance
from localgen.backends.engine.speculation.speculation import Speculation
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence

STEP_MS = 10.0


def flat(tokens: int) -> float:
    return STEP_MS


class Dear(Guesser):
    """Looking for its drafts takes longer than a step."""

    now_s = 0.0

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        self.now_s += 5 * STEP_MS / 1e3
        return super().acceptance_probs(seq, max_drafts)


def full(tokens: int) -> float:
    return STEP_MS * tokens


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
    assert speculation.request_stats(one).steps == 50
    steps.run([one, other], 21)
    steps.run([other], 3)
    assert [speculation.request_stats(seq).steps for seq in (one, other)] == [71, 24]
    assert speculation.stats.tokens_per_step == 1


def test_their_time_counts_too() -> None:
    speculation = Speculation([Guesser(0.0)], clock=lambda: 0.0)
    steps, seq = Steps(speculation, flat), decoding()
    steps.run([seq], 200)
    assert speculation.request_stats(seq).speedup == pytest.approx(1.0, abs=0.02)
    assert speculation.stats.speedup == pytest.approx(1.0, abs=0.02)


def test_a_draft_model_of_which_nothing_is_known_reads_for_a_while() -> None:
    assert 7 < run_unread(Unread(0.6), 100) < 9
    assert run_unread(Unread(0.6), 4_000) < 9 + 0.003 * 4_000


def test_one_that_is_mostly_wrong_reads_nothing() -> None:
    assert run_unread(Unread(0.2), 500) == 0


@pytest.mark.parametrize("draft_steps", [0.1, 2.0])
def test_one_that_has_gained_nothing_yet_reads_no_more(draft_steps: float) -> None:
    # whatever is believed of it: what steps take was measured long ago
    assert run_unread(Unread(0.9, ms=draft_steps * STEP_MS), 4_000) < 9 + 0.003 * 4_000


def test_reading_leaves_the_time_for_tries() -> None:
    unread, seq = Unread(0.6), decoding()
    steps = Steps(Speculation([unread], clock=unread.clock), full)
    steps.run([seq], 100)
    assert not any(steps.lengths)
    unread.is_ready = True
    steps.run([seq], 20)
    assert any(steps.lengths)


def test_the_allowance_begins_with_the_first_step_that_is_entered() -> None:
    # a look beside a prompt, which leaves a debt: the first plain steps are not looked at
    unread = Unread(0.6)
    speculation = Speculation([unread], clock=unread.clock)
    seq, other = decoding("one"), decoding("other")
    prompt = Chunk(seq=other, start=0, tokens=[3] * 200, is_sampled=False)
    speculation.propose([seq], outputs=64, with_prompts=True)
    assert unread.read_ms == 0, "nor is anything read beside a prompt"
    unread.read_ms += 100 * STEP_MS
    seq.tokens.append(3)
    token = Chunk(seq=seq, start=len(seq.tokens) - 2, tokens=[3], is_sampled=True)
    speculation.observe([token, prompt], 100 * STEP_MS)
    unread.read_ms = 0.0
    Steps(speculation, flat).run([seq], 100)
    assert 7 < unread.read_ms / STEP_MS < 9


def test_another_sequence_in_the_place_of_one_is_another_step() -> None:
    # preempted for one whose prompt is known but for a token
    dear = Dear(0.0)
    speculation = Speculation([dear], clock=lambda: dear.now_s)
    one, other, third = (decoding(name) for name in ("one", "other", "third"))
    Steps(speculation, flat).run([one, other], 20)
    assert not speculation.propose([one, other], outputs=64)
    chunks = []
    for seq in (one, third):
        seq.tokens.append(3)
        start = len(seq.tokens) - 2
        chunks.append(Chunk(seq=seq, start=start, tokens=seq.tokens[-2:-1], is_sampled=True))
    speculation.observe(chunks, STEP_MS)
    assert [speculation.request_stats(seq).steps for seq in (one, other, third)] == [21, 20, 1]


def test_a_piece_that_was_delayed_does_not_forbid_reading_for_long() -> None:
    late = Unread(0.6)
    speculation = Speculation([late], clock=late.clock)
    seq, steps = decoding(), Steps(speculation, flat)
    steps.run([seq], 1)
    late.delay_ms = 500 * STEP_MS
    steps.run([seq], 1)
    late.delay_ms, late.read_ms = 0.0, 0.0
    steps.run([seq], 500)
    assert late.read_ms > 0


def test_a_try_rests_for_steps_not_looks() -> None:
    allowance = Allowance()
    assert allowance.is_time_to_try
    for steps in (2, 4, 8, 16, 32, 64, 64):
        allowance.tried(20.0, 10.0)
        allowance.pass_by(steps - 1)
        assert not allowance.is_time_to_try
        allowance.pass_by(1)
        assert allowance.is_time_to_try
    allowance.tried(5.0, 10.0)
    allowance.pass_by(1)
    assert allowance.is_time_to_try, "one that paid needs no rest"
