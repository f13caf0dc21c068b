"""How much is drafted: as much as measured times justify, and nothing where it does not pay."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import pytest
from drafting import Guesser, Steps, Unprefilled, decoding, speculation_of

from localgen.backends.engine.speculation.allocation import MAX_SLOWDOWN, DraftOption, allocate
from localgen.backends.engine.speculation.drafter import DecayedRatio, DraftProposal
from localgen.backends.engine.speculation.policy import PLAIN_EVERY
from localgen.backends.engine.step_costs import StepCosts
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import MAX_DRAFT_TOKENS


def still() -> float:
    """A clock on which proposing takes no time, so that tests do not depend on the machine."""
    return 0.0


def options(*probs: Seq[float], ms: float = 0.0) -> list[DraftOption | None]:
    """One option per sequence, all of one drafter. ms: time of a draft."""
    drafter = Guesser(0.5, ms=ms)
    return [DraftOption(drafter, each) if each else None for each in probs]


def expected_tokens(alpha: float, k: int) -> float:
    """Expected tokens of a step with k drafts, each right with probability alpha given those before
    (Leviathan et al. 2023).
    """
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def flat(tokens: int) -> float:
    """Step time of a memory-bound GPU: many tokens cost as much as one."""
    return 4.0 + 0.02 * tokens


def steep(tokens: int) -> float:
    """Step time of two cores: a few tokens cost much, many cost less each."""
    return 22.0 if tokens == 1 else 40.0 + 10.0 * tokens if tokens < 24 else 100.0 + 7.5 * tokens


def full(tokens: int) -> float:
    """Step time proportional to tokens: no spare compute."""
    return 10.0 * tokens


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("k", range(1, 9))
def test_an_allocation_expects_the_closed_form(alpha: float, k: int) -> None:
    drafts, speedup, _ = allocate(options([alpha] * k), lambda tokens: 1.0, max_drafts=64)
    assert drafts == [k]
    assert speedup == pytest.approx(expected_tokens(alpha, k))


def test_the_closed_form_at_a_known_place() -> None:
    speedup = allocate(options([0.8] * 4), lambda tokens: 1.0, max_drafts=4).speedup
    assert speedup == pytest.approx(3.36, abs=0.005)


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_tokens_of_a_step_are_what_the_closed_form_says(alpha: float, k: int) -> None:
    # enough luck at first that it does not give up: there are no probes here
    guesser, seq = Guesser(alpha, seed=1), decoding()
    steps = Steps(speculation_of(guesser, max_drafts=k, clock=still), lambda tokens: 1.0)
    steps.run([seq], 100)
    steps.lengths.clear()
    steps.tokens = 0
    steps.run([seq], 6_000)
    plain = steps.lengths.count(0)
    assert set(steps.lengths) <= {0, k}, "it costs nothing, so all that may be"
    measured = (steps.tokens - plain) / (len(steps.lengths) - plain)
    assert measured == pytest.approx(expected_tokens(alpha, k), rel=0.02)


@pytest.mark.parametrize("step_ms", [flat, steep])
@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.9, 0.97, 1.0])
def test_nearly_the_best_that_any_length_could_give(
    step_ms: Callable[[int], float], alpha: float
) -> None:
    best = max(
        expected_tokens(alpha, k) / step_ms(1 + k) * step_ms(1) for k in range(MAX_DRAFT_TOKENS + 1)
    )
    steps = Steps(speculation_of(Guesser(alpha), clock=still), step_ms)
    steps.run([decoding()], 2_000)
    assert steps.tokens * step_ms(1) / steps.ms >= 0.9 * best


@pytest.mark.parametrize("streams", [2, 4])
def test_nearly_the_best_where_only_all_together_gain(streams: int) -> None:
    # one sequence that drafts alone delays the others by more than it gains
    best = max(
        (k + 1) * steep(streams) / steep(streams * (1 + k)) for k in range(MAX_DRAFT_TOKENS + 1)
    )
    steps = Steps(speculation_of(Guesser(1.0), clock=still), steep)
    steps.run([decoding(str(i)) for i in range(streams)], 500)
    assert best > 1.5
    assert steps.tokens / streams * steep(streams) / steps.ms >= 0.9 * best


@pytest.mark.parametrize("step_ms", [flat, steep, full])
@pytest.mark.parametrize("alpha", [0.0, 0.05])
def test_never_slower_where_drafts_are_wrong(step_ms: Callable[[int], float], alpha: float) -> None:
    steps = Steps(speculation_of(Guesser(alpha), clock=still), step_ms)
    steps.run([decoding()], 500)
    assert steps.tokens * step_ms(1) / steps.ms >= 0.98


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.9])
def test_off_where_there_is_no_spare_arithmetic(alpha: float) -> None:
    speculation = speculation_of(Guesser(alpha), clock=still)
    steps = Steps(speculation, full)
    seqs = [decoding(str(i)) for i in range(16)]
    steps.run(seqs, 400)
    assert steps.tokens / 16 * full(16) / steps.ms >= 0.98
    assert "cost more" in speculation.reason
    if alpha < 0.9:  # where drafts nearly pay, probes cost nearly nothing and are frequent
        assert steps.share < 0.2


class Slow(Guesser):
    """A drafter that takes time to propose, and look_ms to find out whether it can.

    looks: how often it searched.
    """

    def __init__(self, alpha: float, look_ms: float = 0.0, *, ms: float = 0.0) -> None:
        super().__init__(alpha, ms=ms)
        self.now_s, self.looks, self._look_ms = 0.0, 0, look_ms

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        self.now_s += self._look_ms / 1e3
        self.looks += 1
        return super().acceptance_probs(seq, max_drafts)

    def propose(
        self, requests: Mapping[Sequence, int], max_prefill_tokens: int
    ) -> dict[Sequence, DraftProposal]:
        self.now_s += self.ms * max(requests.values(), default=0) / 1e3
        return super().propose(requests, max_prefill_tokens)

    def clock(self) -> float:
        return self.now_s


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_never_slower_where_a_draft_takes_as_long_as_a_step(alpha: float) -> None:
    guesser = Slow(alpha, ms=flat(1))
    steps = Steps(speculation_of(guesser, clock=guesser.clock), flat)
    steps.run([decoding()], 2_000, draft_ms=guesser.ms)
    assert steps.tokens * flat(1) / steps.ms >= 0.98


def test_proposing_is_paid_for() -> None:
    cheap, dear = Slow(0.7, ms=0.3), Slow(0.7, ms=4.0)
    for guesser in (cheap, dear):
        steps = Steps(speculation_of(guesser, clock=guesser.clock), flat)
        steps.run([decoding()], 1_000, draft_ms=guesser.ms)
        best = max(
            expected_tokens(0.7, k) * flat(1) / (flat(1 + k) + guesser.ms * k) for k in range(65)
        )
        assert steps.tokens * flat(1) / steps.ms >= 0.9 * best


@pytest.mark.parametrize("look_ms", [0.001, 0.5, 50.0])
def test_search_without_drafts_takes_little_time(look_ms: float) -> None:
    slow = Slow(0.0, look_ms)
    steps = Steps(speculation_of(slow, clock=slow.clock), full)
    steps.run([decoding()], 200)
    slow.now_s, slow.looks, steps.ms = 0.0, 0, 0.0
    steps.run([decoding()], 3_200)
    assert slow.looks >= 3_200 // PLAIN_EVERY
    if slow.looks > 3_200 // PLAIN_EVERY + 5:
        assert slow.now_s * 1e3 <= 0.0055 * steps.ms
    if look_ms < 0.01:
        assert slow.looks > 3_000


def test_short_answers_do_not_keep_a_price_from_being_forgotten() -> None:
    # each ends before the next search
    slow = Slow(0.97, look_ms=3.0)
    speculation = speculation_of(slow, clock=slow.clock)
    is_dear = True
    steps = Steps(speculation, lambda tokens: 100.0 if is_dear and tokens > 1 else flat(tokens))
    for number in range(10):
        steps.run([decoding(f"dear {number}")], 40)
    assert steps.share < 0.1
    is_dear = False
    for number in range(30):
        steps.run([decoding(f"cheap {number}")], 40)
    assert steps.share > 0.5


def test_search_continues_where_drafts_gain() -> None:
    slow = Slow(0.9, look_ms=1.0)
    speculation = speculation_of(slow, clock=slow.clock)
    steps = Steps(speculation, flat)
    steps.run([decoding()], 500)
    assert slow.looks > 450
    assert speculation.speedup.value > 3


def test_search_resumes_once_drafts_are_found() -> None:
    slow = Slow(0.0, look_ms=1.0)
    steps = Steps(speculation_of(slow, clock=slow.clock), flat)
    steps.run([decoding()], 500)
    slow.alpha = 1.0
    steps.lengths.clear()
    steps.run([decoding()], 1_000)
    assert sum(1 for length in steps.lengths[500:] if length) > 450


def test_one_of_many_gets_drafts_where_the_others_have_none() -> None:
    drafts, *_ = allocate(
        options([0.9] * 8, *([[]] * 15)), lambda tokens: 8.0 + 0.01 * tokens, max_drafts=100
    )
    assert drafts == [8] + [0] * 15


def test_drafts_go_to_the_sequence_that_gains_most() -> None:
    (few, many), *_ = allocate(options([0.3] * 8, [0.9] * 8), lambda tokens: 1.0, max_drafts=6)
    assert few + many == 6
    assert many > few


@pytest.mark.parametrize("draft_ms", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("step_ms", [flat, steep, full])
def test_one_sequence_gets_the_fastest_number(
    step_ms: Callable[[int], float], alpha: float, draft_ms: float
) -> None:
    (drafts,), speedup, _ = allocate(options([alpha] * 8, ms=draft_ms), step_ms, max_drafts=8)
    gains = {
        k: expected_tokens(alpha, k) * step_ms(1) / (step_ms(1 + k) + k * draft_ms)
        for k in range(1, 9)
    }
    best = max(gains.values())
    if best * MAX_SLOWDOWN < 1:
        assert speedup == 0.0, "too slow"
    else:
        assert speedup == pytest.approx(best)
        assert speedup == pytest.approx(gains[drafts])


def test_drafting_resumes_when_steps_get_cheap() -> None:
    slow = True
    speculation = speculation_of(Guesser(0.9), clock=still)
    steps = Steps(speculation, lambda tokens: full(tokens) if slow else flat(tokens))
    seq = decoding()
    steps.run([seq], 300)
    assert steps.share < 0.2
    slow = False
    steps.run([seq], 2_000)
    assert steps.share > 0.9
    assert speculation.speedup.value > 2


def test_no_sequence_is_slowed_down_for_another() -> None:
    # 65 tokens for one would make tokens of the others take sixteen times as long
    long = [0.99] * 64
    drafts, speedup, _ = allocate(options(long, *([[]] * 7)), steep, max_drafts=512)
    assert not speedup or steep(8 + drafts[0]) <= MAX_SLOWDOWN * steep(8)
    # nor may one be slowed down by half for another that becomes three times as fast
    assert allocate(options(long, []), steep, max_drafts=512).speedup == 0.0
    assert allocate(options(long), steep, max_drafts=512).drafts[0] >= 40
    # where a step takes no longer, all may draft
    drafts, *_ = allocate(options(long, *([[]] * 7)), flat, max_drafts=512)
    assert drafts[0] >= 8


class Short(Guesser):
    """A drafter that can propose one token, which is likely right."""

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        return super().acceptance_probs(seq, min(1, max_drafts))


def test_a_burst_of_slow_plain_steps_does_not_make_drafts_pay_for_long() -> None:
    plain_ms = 25.0

    def step_ms(tokens: int) -> float:
        return plain_ms if tokens == 1 else 25.0 + 25.0 * (tokens - 1)

    steps = Steps(speculation_of(Guesser(0.9, ms=5.0, prior=0.9), clock=still), step_ms)
    steps.run([decoding()], 100)
    assert sum(map(bool, steps.lengths[-50:])) < 5
    plain_ms = 45.0
    steps.run([decoding()], 8)
    plain_ms = 25.0
    # a price is a median: it takes a few plain steps, which are rare
    steps.run([decoding()], 4 * PLAIN_EVERY)
    assert any(steps.lengths[-4 * PLAIN_EVERY :]), "drafts seem to pay"
    # then probes use up the apparent gain
    steps.run([decoding()], 700)
    assert sum(map(bool, steps.lengths[-100:])) < 10


def test_nothing_is_tried_that_was_not_offered() -> None:
    speculation = speculation_of(Short(1.0, prior=0.6), clock=still)
    steps = Steps(speculation, full)
    steps.run([decoding()], 100)
    assert set(steps.lengths) == {0, 1}


def test_no_drafts_beside_prompts() -> None:
    speculation, seq = speculation_of(Guesser(1.0, prior=1.0), clock=still), decoding()
    Steps(speculation, flat).run([seq], 8)
    assert speculation.propose([seq], max_outputs=64, max_prefill_tokens=64)
    assert not speculation.propose([seq], max_outputs=64, max_prefill_tokens=64, with_prompts=True)
    short, explanation = speculation.reason.split(": ")
    assert (short, "prompt" in explanation) == ("prefill first", True)


def test_drafting_beside_prompts_is_paid_for() -> None:
    guesser, seq = Slow(1.0, ms=0.5), decoding()
    speculation = speculation_of(guesser, clock=guesser.clock)
    steps = Steps(speculation, flat)
    steps.run([seq], 200)
    assert steps.share > 0.9
    guesser.alpha = 0.0
    # each is admitted and computed within one step
    prompt = Chunk(seq=decoding(), start=0, tokens=[3], is_sampled=True)
    steps.run([seq], 1_000, prompts=[prompt])
    assert steps.share == 0.0


def test_reason_for_no_drafts_in_a_small_cache() -> None:
    speculation = speculation_of(Guesser(1.0), clock=still)
    Steps(speculation, flat).run([decoding()], 1)
    assert not speculation.propose([decoding()], max_outputs=1, max_prefill_tokens=64)
    assert "only 1 token" in speculation.reason


def test_a_size_that_plain_steps_never_had_is_measured_first() -> None:
    speculation = speculation_of(Guesser(1.0, prior=1.0), clock=still)
    many = [decoding(str(i)) for i in range(8)]
    steps = Steps(speculation, flat)
    steps.run(many, 20)
    steps.lengths.clear()
    steps.run(many[:1], 10)
    assert steps.lengths[0] == 0, "what one alone takes was not known"
    assert steps.lengths[-1] > 0


def test_no_more_drafts_than_a_step_may_sample() -> None:
    drafts, *_ = allocate(options(*([[0.99] * 64] * 8)), lambda tokens: 1.0, max_drafts=100)
    assert sum(drafts) == 100


def test_no_drafts_beyond_the_end() -> None:
    seq = decoding(limit=10)
    guesser = Guesser(1.0, prior=1.0)
    speculation = speculation_of(guesser, clock=still)
    Steps(speculation, lambda tokens: 1.0).run([decoding()], 8)
    seq.tokens = [3] * 7
    drafts = speculation.propose([seq], max_outputs=64, max_prefill_tokens=64)
    assert len(drafts[seq].tokens) == 2, "the step itself gives the tenth token"


def test_statistics_of_drafts() -> None:
    speculation = speculation_of(Guesser(0.8), max_drafts=4, clock=still)
    steps = Steps(speculation, flat)
    steps.run([decoding()], 1_000)
    assert [each.name for each in speculation.drafters] == ["guesser"]
    assert speculation.speedup.value == pytest.approx(3.36 * flat(1) / flat(5), abs=0.5)
    assert speculation_of(clock=still).reason == "no drafter"


def test_other_sequences_count_until_one_knows_better() -> None:
    shared, chance = DecayedRatio(0.5), random.Random(1)
    for _ in range(200):
        DecayedRatio(decay=0.98, shared=shared).add(chance.random() < 0.9)
    fresh = DecayedRatio(decay=0.98, shared=shared)
    assert fresh.value == pytest.approx(0.9, abs=0.07)
    for _ in range(60):
        fresh.add(False)
    assert fresh.value < 0.25
    assert DecayedRatio(decay=0.98, shared=shared).value > 0.5


def test_prices_are_interpolated_between_sizes() -> None:
    costs = StepCosts()
    assert costs.ms(4) == 0.0, "unknown"
    for tokens, ms in ((1, 10.0), (9, 26.0)):
        costs.observe(tokens, ms)
    assert [costs.ms(tokens) for tokens in (1, 5, 9)] == [10.0, 18.0, 26.0]
    assert costs.ms(64) == 26.0, "beyond all sizes, that of the largest"
    assert costs.largest == 9


def test_a_price_is_a_median_of_the_last_steps() -> None:
    costs = StepCosts()
    for ms in (10.0, 10.0, 300.0):
        costs.observe(1, ms)
    assert costs.ms(1) == 10.0, "one delayed step does not count"
    for _ in range(3):
        costs.observe(1, 20.0)
    assert costs.ms(1) == 20.0, "a slower machine does"


def test_old_prices_are_forgotten() -> None:
    costs = StepCosts()
    costs.observe(8, 1000.0)
    for _ in range(1_000):
        costs.observe(1, 10.0)
    assert 8 not in costs
    assert costs.ms(8) == 10.0


def test_a_size_forgotten_while_another_is_new() -> None:
    costs = StepCosts()
    costs.observe(2, 7.0)
    for _ in range(998):
        costs.observe(1, 10.0)
    costs.observe(3, 20.0)
    assert 2 not in costs
    assert costs.ms(2) == 15.0


def test_unknown_sizes_are_approached_by_doubling() -> None:
    steps = Steps(speculation_of(Guesser(1.0, prior=0.99), clock=still), flat)
    steps.run([decoding()], 20)
    drafted = [length for length in steps.lengths if length]
    assert drafted[0] == 1
    for at, length in enumerate(drafted):
        assert 1 + length <= 2 * max(1, *(1 + each for each in drafted[:at]), 1)
    assert max(drafted) == MAX_DRAFT_TOKENS


def test_one_step_in_plain_every_has_no_drafts() -> None:
    steps = Steps(speculation_of(Guesser(1.0, prior=0.99), clock=still), flat)
    steps.run([decoding()], 40 * PLAIN_EVERY)
    assert steps.lengths[PLAIN_EVERY:].count(0) == pytest.approx(39, abs=3)


def test_a_draft_model_prefills_where_drafts_would_pay() -> None:
    drafter = Unprefilled(1.0, prior=0.9, ms_per_token=1.0)
    steps = Steps(speculation_of(drafter, clock=drafter.clock), flat)
    steps.run([decoding()], 4)
    assert drafter.prefilled == 3 * 64, "in each step whose price is known"
    drafter.is_ready = True
    steps.run([decoding()], 4)
    assert drafter.prefilled == 3 * 64, "there is nothing left to prefill"


@pytest.mark.parametrize(("step_ms", "alpha"), [(flat, 0.0), (full, 1.0)])
def test_a_prefill_that_would_not_pay_takes_little(
    step_ms: Callable[[int], float], alpha: float
) -> None:
    drafter = Unprefilled(alpha, ms_per_token=0.01)
    speculation = speculation_of(drafter, clock=drafter.clock)
    steps = Steps(speculation, step_ms)
    drafter.is_ready = True  # what larger steps take is found out first
    steps.run([decoding()], 200)
    drafter.is_ready, drafter.now_s, steps.ms = False, 0.0, 0.0
    steps.run([decoding()], 400)  # prices are forgotten later
    assert 0 < drafter.now_s * 1e3 <= 0.006 * steps.ms + 40 * step_ms(1)


def test_a_step_that_was_waited_for_before_is_no_price() -> None:
    now_s = [0.0]

    def synchronize() -> float:
        now_s[0] += flat(1) / 1e3
        return flat(1)

    drafter = Unprefilled(1.0, prior=0.9)
    speculation = speculation_of(drafter, clock=lambda: now_s[0], synchronize=synchronize)
    steps = Steps(speculation, flat)
    steps.run([decoding()], 1)
    # launched ahead, such a step is done when the prefill is
    steps.step_ms = lambda tokens: 0.01
    steps.run([decoding()], 20)
    assert drafter.prefilled
    assert speculation.speedup.value == pytest.approx(1.0, abs=0.01)
