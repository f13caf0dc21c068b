"""Drafts where they pay: proposed before a step, measured after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from statistics import median
from typing import NamedTuple
from weakref import WeakKeyDictionary

from localgen.backends.engine.speculation.allowance import Allowance
from localgen.backends.engine.speculation.choice import (
    DraftAllocation,
    DraftOption,
    allocate_drafts,
    pays,
)
from localgen.backends.engine.speculation.costs import StepCosts
from localgen.backends.engine.speculation.drafter import Drafter, DraftProposal
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.engine.speculation.record import (
    DraftTotals,
    RecentDraftStats,
    RequestDraftStats,
    SequenceDraftStats,
    speculation_stats,
)
from localgen.backends.engine.speculation.reference import BaselineSchedule
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import SpeculationStats

# most drafts for one sequence, whose step is of as many tokens and one
MAX_DRAFT_TOKENS = 63
# an offer that promises fewer tokens than this is none
_LEAST_OFFER = 1.05
# steps grow no faster than this into sizes that were never tried
_LEAP = 2
# so much of a step's time goes to reading what is new to a draft model
_CATCH_UP_SHARE = 0.25
# what seems not to pay is tried with up to so many drafts, if it would where they cost nothing
_PROBE_DRAFTS = 4
_PROBE_TOKENS = 1.4


class _Decoded(NamedTuple):
    """One sequence's part in a step: what it got, and drafts for it."""

    own: SequenceDraftStats
    tokens: int
    drafts: int


class Speculation:
    """Decides before each step who drafts how much, by what was measured.

    max_drafts: drafts for one sequence. disabled_reason: what to say where there are no drafters.
    synchronize: as of AsyncRunner; None: no step is launched before it is asked for. waited_ms:
    what of the plain step that comes was waited for already.
    """

    def __init__(
        self,
        drafters: Seq[Drafter],
        *,
        max_drafts: int = MAX_DRAFT_TOKENS,
        disabled_reason: str = "no drafter",
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafters, self._most, self._clock = drafters, max_drafts, clock
        self._settle = synchronize
        self._costs = StepCosts()
        self._allowance = Allowance()
        self._recent, self._totals = RecentDraftStats(), DraftTotals()
        self._reference = BaselineSchedule()
        self._is_probing = self._is_looking = False
        self._by_model = False  # whether all drafts of the step are of such as must be tried
        self._seqs: list[Sequence] = []
        self._among: frozenset[Sequence] = frozenset()
        self._passed_ms: list[float] = []  # their plain steps that are not entered yet
        self._passed_sum_ms = 0.0
        self._unlooked = 0  # steps since somebody looked
        self._own: WeakKeyDictionary[Sequence, SequenceDraftStats] = WeakKeyDictionary()
        self._reason = "" if drafters else disabled_reason
        # what everything before the next step took, looking alone, reading alone
        self._propose_ms = self._look_ms = self._read_ms = self._settled_ms = self.waited_ms = 0.0

    def propose(
        self, seqs: list[Sequence], *, outputs: int, with_prompts: bool = False
    ) -> dict[Sequence, DraftProposal]:
        """Drafts for the step that comes.

        seqs: all that decode. outputs: what it may sample. with_prompts: it reads prompts too,
        which leaves no arithmetic to spare.
        """
        if not self._drafters:
            return {}
        if seqs != self._seqs:
            self._go_on_with(seqs)
        if self._is_looking:
            self._propose_ms = self._look_ms = self._read_ms = 0.0
            self._settled_ms = self.waited_ms = 0.0
            self._is_probing = self._is_looking = self._by_model = False
        if not seqs or not self._allowance.may_look(len(self._passed_ms), self._passed_sum_ms):
            return {}
        self._is_looking = True
        started_s = self._clock()
        self._enter_passed()
        passed, self._unlooked = 1 + self._unlooked, 0
        self._allowance.pass_by(passed)
        self._costs.pass_by(passed, keep_smallest=True, to_risk_ms=self._allowance.to_risk_ms)
        if with_prompts:
            self._reason = "prompts first: one is being read"
            picks = [DraftAllocation()] * len(seqs)
        else:
            picks = self._pick(seqs, outputs)
        self._look_ms = self._ms_since(started_s)
        drafts = self._proposals(seqs, picks)
        for number in range(len(self._drafters)):
            self._prepare(number, 0 if with_prompts else len(seqs))
        self._propose_ms = self._ms_since(started_s)
        if drafts:
            self._by_model = all(
                self._drafters[pick.drafter].needs_probing for pick in picks if pick.drafts
            )
        else:
            self.waited_ms = self._settled_ms
            self._propose_ms -= self.waited_ms
        return drafts

    def _proposals(
        self, seqs: Seq[Sequence], picks: Seq[DraftAllocation]
    ) -> dict[Sequence, DraftProposal]:
        """What was picked."""
        drafts: dict[Sequence, DraftProposal] = {}
        if not any(pick.drafts for pick in picks):
            return drafts
        for number, drafter in enumerate(self._drafters):
            wanted = [
                (seq, pick.drafts)
                for seq, pick in zip(seqs, picks, strict=True)
                if pick.drafts and pick.drafter == number
            ]
            if wanted and drafter.needs_probing:
                self._wait()
            found = drafter.propose(wanted) if wanted else []
            for (seq, _), new in zip(wanted, found, strict=True):
                if new.tokens:
                    self._own_of(seq).tokens_by_drafter[drafter.name] += len(new.tokens)
                    drafts[seq] = new
        return drafts

    def _pick(self, seqs: Seq[Sequence], outputs: int) -> list[DraftAllocation]:
        none = [DraftAllocation()] * len(seqs)
        if outputs <= len(seqs):
            self._reason = f"no room: a step samples {outputs} tokens here, one of each sequence"
            return none
        most = min(outputs, _LEAP * self._costs.largest) - len(seqs)
        # what plain steps of so few take must be known
        if (
            most < 1
            or self._costs.smallest > len(seqs)
            or self._reference.is_due(self._recent.speedup)
        ):
            return none
        offers = [self._offers(seq, min(most, self._most)) for seq in seqs]
        if not any(offers):
            self._reason = self._nothing_to_expect()
            return none
        picks = allocate_drafts(offers, self._step_ms, self._draft_ms, most=most)
        if any(pick.drafts for pick in picks):
            return picks
        self._reason = "too dear: drafts would cost more than they save"
        return self._probe(offers, most)

    def _probe(self, offers: Seq[Seq[DraftOption]], most: int) -> list[DraftAllocation]:
        """Try all the same what promises most, if there is time to lose: as many drafts as tell
        most for what they take."""
        count = len(offers)
        picks = [DraftAllocation()] * count
        untried = [
            (at, offer)
            for at, offered in enumerate(offers)
            for offer in offered
            if self._drafters[offer.drafter].needs_probing
        ]
        if not untried or not self._allowance.is_time_to_try:
            return picks
        at, offer = max(untried, key=lambda one: one[1].upto(_PROBE_DRAFTS))
        if offer.upto(_PROBE_DRAFTS) < _PROBE_TOKENS:
            return picks
        plain_ms, best = self._step_ms(count), 0.0
        for drafts in range(1, min(most, _PROBE_DRAFTS, len(offer.tokens) - 1) + 1):
            cost_ms = self._step_ms(count + drafts) - plain_ms
            cost_ms += drafts * self._draft_ms(offer.drafter, 1)
            # drafts that will be judged: those behind a wrong one are not
            judged = offer.upto(drafts - 1)
            if cost_ms <= self._allowance.to_lose_ms and judged > best * cost_ms:
                picks[at], best = (
                    DraftAllocation(offer.drafter, drafts),
                    judged / max(cost_ms, 1e-3),
                )
                self._is_probing = True
        return picks

    def _offers(self, seq: Sequence, most: int) -> list[DraftOption]:
        most = min(most, seq.max_len - len(seq.tokens) - 1)
        offers = [
            DraftOption.of(number, drafter.acceptance_probs(seq, most))
            for number, drafter in enumerate(self._drafters)
        ]
        return [offer for offer in offers if offer.tokens[-1] >= _LEAST_OFFER]

    def _prepare(self, number: int, count: int) -> None:
        """Let a drafter prepare beside a plain step of so many sequences, if that would pay or be
        tried, as far as is known, and there is time for it."""
        drafter, started_s = self._drafters[number], self._clock()
        most_ms, would = self._to_read(number, count) if count else (0.0, False)
        self._look_ms += self._ms_since(started_s)
        if most_ms:
            self._wait()
        started_s = self._clock()
        drafter.prefill(most_ms)
        took_ms = self._ms_since(started_s)
        if not most_ms:
            self._look_ms += took_ms
            return
        self._read_ms += took_ms
        self._allowance.read(took_ms, would_pay=would)

    def _to_read(self, number: int, count: int) -> tuple[float, bool]:
        """Milliseconds that a drafter may prepare for, and whether drafts for each of so many
        sequences would pay."""
        drafter = self._drafters[number]
        offer = DraftOption.of(number, [drafter.default_acceptance()] * _PROBE_DRAFTS)
        would = bool(drafter.draft_ms(1)) and pays(
            offer,
            lambda tokens: self._step_ms(count * tokens),
            lambda drafter, _: self._draft_ms(drafter, count),
            most=_PROBE_DRAFTS,
        )
        is_worth_it = would or offer.tokens[-1] >= _PROBE_TOKENS
        if is_worth_it and self._allowance.may_read(would_pay=would):
            return _CATCH_UP_SHARE * self._step_ms(count), would
        return 0.0, would

    def _wait(self) -> None:
        """For the step that was launched ahead: what comes now is timed without it."""
        if self._settle is not None:
            started_s = self._clock()
            self._settle()
            self._settled_ms += self._ms_since(started_s)

    def _ms_since(self, started_s: float) -> float:
        return (self._clock() - started_s) * 1e3

    def _step_ms(self, tokens: int) -> float:
        return self._costs.ms(tokens) or 0.0

    def _draft_ms(self, drafter: int, sequences: int) -> float:
        return self._drafters[drafter].draft_ms(sequences) if sequences else 0.0

    def observe(self, chunks: Seq[Chunk], step_ms: float) -> None:
        """Enter a finished step; to be called when its tokens are in their sequences."""
        if not self._drafters:
            return
        if not self._is_looking:
            self._unlooked += 1
        if not self._is_looking and self._are_plain(chunks):
            self._passed_ms.append(step_ms)
            self._passed_sum_ms += step_ms
            return
        started_s = self._clock()
        # a sequence that lost its place computes what it had said anew
        decoding = [
            _Decoded(self._own_of(chunk.seq), _num_came(chunk), chunk.num_drafts)
            for chunk in chunks
            if chunk.is_sampled
            and chunk.start >= chunk.seq.num_prompt
            and len(chunk) == 1 + chunk.num_drafts
        ]
        drafted = sum(one.drafts for one in decoding)
        for one in decoding:
            one.own.steps += 1
            one.own.drafting_steps += bool(one.drafts)
        if len(decoding) == len(chunks):
            self._enter(decoding, drafted, step_ms)
        elif not decoding:
            self._costs.observe_prompt(sum(map(len, chunks)), step_ms)
        if drafted:
            self._totals.steps += 1
            self._totals.drafts += drafted
            self._totals.accepted += _num_kept(decoding)
        if not self._is_looking:
            return
        for chunk in chunks:
            if chunk.is_sampled and (count := _num_came(chunk)):
                tokens = chunk.seq.tokens[-count:]
                for drafter in self._drafters:
                    drafter.observe(chunk.seq, tokens)
        if not drafted:
            self._allowance.looked(self._look_ms + self._ms_since(started_s), step_ms)

    def _are_plain(self, chunks: Seq[Chunk]) -> bool:
        """Whether these are a token of each sequence that was decoding, and nothing else."""
        if len(chunks) != len(self._seqs):
            return False
        among = self._among
        return all(len(chunk.tokens) == 1 and chunk.seq in among for chunk in chunks)

    def _enter(self, decoding: Seq[_Decoded], drafted: int, step_ms: float) -> None:
        """A step of sequences that were all decoding."""
        sequences, tokens = len(decoding), sum(one.tokens for one in decoding)
        own_ms = step_ms
        if self._settle and drafted and not self._reference.drafting and not self._settled_ms:
            # the plain step launched ahead in its place was computed in vain, before it
            own_ms -= max(0.0, self._step_ms(sequences) - self._propose_ms)
        self._costs.observe(sequences + drafted, max(own_ms, step_ms / 2))
        ms, plain_step_ms = step_ms + self._propose_ms, self._step_ms(sequences)
        plain_ms = tokens / sequences * plain_step_ms if drafted else step_ms
        if drafted:
            self._reference.drafted(ms, plain_ms)
        else:
            self._reference.plain(step_ms, plain_step_ms)
        for one in decoding:
            one.own.ms += ms
            one.own.plain_ms += one.tokens * plain_step_ms if drafted else step_ms
        if self._is_probing:
            self._allowance.tried(ms, plain_ms)
        # these have allowances of their own
        elsewhere_ms = self._read_ms + (0.0 if drafted else self._look_ms)
        self._allowance.earn(ms - elsewhere_ms, plain_ms, plain_step_ms)
        if drafted and self._by_model:
            self._allowance.gained(plain_ms - (ms - elsewhere_ms), plain_step_ms)
        self._recent.add(
            drafts=drafted,
            accepted=_num_kept(decoding) if drafted else 0,
            sequences=sequences,
            tokens=tokens,
            ms=ms,
            plain_ms=plain_ms,
        )

    def _own_of(self, seq: Sequence) -> SequenceDraftStats:
        own = self._own.get(seq)
        if own is None:
            own = self._own[seq] = SequenceDraftStats()
        return own

    def _enter_passed(self) -> None:
        """Plain steps of the same sequences, all at once: one by one they would cost more than they
        tell."""
        passed_ms, ms = self._passed_ms, self._passed_sum_ms
        if not passed_ms:
            return
        self._passed_ms, self._passed_sum_ms = [], 0.0
        steps, sequences = len(passed_ms), len(self._seqs)
        step_ms = median(passed_ms)
        self._reference.plain(step_ms, self._step_ms(sequences), steps=steps)
        self._costs.observe(sequences, step_ms)
        for seq in self._seqs:
            self._own_of(seq).add_plain(steps, ms)
        self._allowance.earn(ms, ms, step_ms)
        self._recent.add_plain(steps, sequences, ms)

    def _go_on_with(self, seqs: list[Sequence]) -> None:
        """Others decode now; who does no more has ended, or lost its place."""
        self._enter_passed()
        among = frozenset(seqs)
        for seq in self._among - among:
            for drafter in self._drafters:
                drafter.release(seq)
        self._seqs, self._among = seqs, among

    def _nothing_to_expect(self) -> str:
        text = "nothing to expect: the text does not repeat itself"
        models = [drafter for drafter in self._drafters if drafter.name != NgramDrafter.name]
        for model in models:
            text += f", and {model.name} {model.failure or 'has not read it or is wrong here'}"
        return text

    def request_stats(self, seq: Sequence) -> RequestDraftStats:
        """What a sequence has had of it so far."""
        self._enter_passed()
        own = self._own.get(seq)
        if own is None or not own.ms:
            return RequestDraftStats(reason=self._reason)
        reason = "" if 2 * own.drafting_steps >= own.steps else self._reason
        by = tuple(name for name, _ in own.tokens_by_drafter.most_common())
        return RequestDraftStats(own.steps, own.plain_ms / own.ms, reason, by)

    @property
    def stats(self) -> SpeculationStats:
        """What has become of it, recently and in all."""
        names = tuple(drafter.name for drafter in self._drafters if not drafter.failure)
        return speculation_stats(names, self._reason, self._recent, self._totals)

    def close(self) -> None:
        """Free what drafters hold. No call may follow."""
        for drafter in self._drafters:
            drafter.close()


def _num_kept(decoding: Seq[_Decoded]) -> int:
    """Drafts that were right."""
    return sum(one.tokens - 1 for one in decoding if one.drafts)


def _num_came(chunk: Chunk) -> int:
    """Tokens that the sequence has got from this chunk, which samples."""
    return len(chunk.seq.tokens) - (chunk.start + len(chunk) - chunk.num_drafts)
