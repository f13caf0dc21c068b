"""Drafts where they pay: proposed before a step, measured after it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from localgen.backends.engine.drafts.choice import Offer, Pick, choose
from localgen.backends.engine.drafts.costs import StepCosts
from localgen.backends.engine.drafts.drafter import Drafter, Proposal
from localgen.backends.engine.drafts.ngram import NgramDrafter
from localgen.backends.engine.runner import Chunk
from localgen.backends.engine.sequence import Sequence
from localgen.backends.types import SpeculationStats

# most drafts for one sequence
MOST_DRAFTS = 64
# an offer that promises fewer tokens than this is none
_LEAST_OFFER = 1.05
# steps grow no faster than this into sizes that were never tried
_LEAP = 2
# so much of a step's time goes to reading what is new to a draft model
_CATCH_UP_SHARE = 0.25
# a plain step now and then shows what plain steps take by now
_PLAIN_EVERY = 128
_FADE = 0.98
# what seems not to pay is tried now and then, if it would where drafts cost nothing: with so many
# drafts, for this share of the time, and at first for so many plain steps
_PROBE_DRAFTS = 4
_PROBE_TOKENS = 1.4
_PROBE_SHARE = 0.01
_PROBE_STEPS = 3


@dataclass(slots=True)
class _Recent:
    """Sums over recent steps, old ones fading.

    plain_ms: what plain steps would have taken for the same tokens.
    """

    steps: float = 0.0
    drafting: float = 0.0
    sequences: float = 0.0
    tokens: float = 0.0
    ms: float = 0.0
    plain_ms: float = 0.0

    def add(
        self, *, drafting: bool, sequences: int, tokens: int, ms: float, plain_ms: float
    ) -> None:
        """Enter a step."""
        self.steps = _FADE * self.steps + 1
        self.drafting = _FADE * self.drafting + drafting
        self.sequences = _FADE * self.sequences + sequences
        self.tokens = _FADE * self.tokens + tokens
        self.ms = _FADE * self.ms + ms
        self.plain_ms = _FADE * self.plain_ms + plain_ms


@dataclass(slots=True)
class _Own:
    """What one sequence has had of it: ms of its steps, and of plain ones for the same tokens.

    by: tokens that each drafter proposed.
    """

    steps: int = 0
    ms: float = 0.0
    plain_ms: float = 0.0
    by: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Drafting:
    """As Timings has it of one request."""

    steps: int = 0
    speedup: float = 0.0
    reason: str = ""
    by: tuple[str, ...] = ()


NO_DRAFTS = Drafting()


class Speculation:
    """Decides before each step who drafts how much, by what was measured.

    most: drafts for one sequence. why_none: what to say where there are no drafters.
    """

    def __init__(
        self,
        drafters: Seq[Drafter],
        *,
        most: int = MOST_DRAFTS,
        why_none: str = "no drafter",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafters, self._most, self._clock = drafters, most, clock
        self._costs = StepCosts()
        self._recent = _Recent()
        self._since_plain = 0
        self._to_lose_ms = 0.0
        self._known: set[Sequence] = set()
        self._own: WeakKeyDictionary[Sequence, _Own] = WeakKeyDictionary()
        self._reason = "" if drafters else why_none
        self._nothing_to_expect = _nothing_to_expect(drafters)
        self._propose_ms = 0.0  # what proposing for the step that comes took
        self._steps = self._drafted = self._accepted = 0

    def propose(self, seqs: Seq[Sequence], *, outputs: int) -> dict[Sequence, Proposal]:
        """Drafts for the step that comes. seqs: all that decode. outputs: what it may sample."""
        self._propose_ms = 0.0
        self._forget_others(seqs)
        if not self._drafters or not seqs:
            return {}
        started_s = self._clock()
        tokens = min(outputs, _LEAP * self._costs.largest)
        picks = self._pick(seqs, most=tokens - len(seqs))
        drafts: dict[Sequence, Proposal] = {}
        for number, drafter in enumerate(self._drafters):
            wanted = [
                (seq, pick.drafts)
                for seq, pick in zip(seqs, picks, strict=True)
                if pick.drafts and pick.drafter == number
            ]
            if wanted:
                found = drafter.propose(wanted)
                pairs = zip(wanted, found, strict=True)
                named = {seq: new for (seq, _), new in pairs if new.tokens}
                for seq, new in named.items():
                    self._own.setdefault(seq, _Own()).by[drafter.name] += len(new.tokens)
                drafts |= named
        for drafter in self._drafters:
            drafter.catch_up(_CATCH_UP_SHARE * self._step_ms(len(seqs)))
        if drafts:
            self._propose_ms = (self._clock() - started_s) * 1e3
        return drafts

    def _pick(self, seqs: Seq[Sequence], *, most: int) -> list[Pick]:
        none = [Pick()] * len(seqs)
        if most < 1 or self._since_plain >= _PLAIN_EVERY:
            return none
        offers = [self._offers(seq, min(most, self._most)) for seq in seqs]
        if not any(offers):
            self._reason = self._nothing_to_expect
            return none
        picks = choose(offers, self._step_ms, self._draft_ms, most=most)
        if any(pick.drafts for pick in picks):
            return picks
        self._reason = "drafts would cost more than they save"
        return self._probe(offers, min(most, _PROBE_DRAFTS))

    def _probe(self, offers: Seq[Seq[Offer]], drafts: int) -> list[Pick]:
        """Try the best offer all the same, if there is time to lose."""
        picks = [Pick()] * len(offers)
        promised, at, drafter = max(
            (offer.tokens[min(drafts, len(offer.tokens) - 1)], at, offer.drafter)
            for at, offered in enumerate(offers)
            for offer in offered
        )
        picks[at] = Pick(drafter, drafts)
        plain_ms = self._step_ms(len(offers))
        cost_ms = self._step_ms(len(offers) + drafts) + self._draft_ms(picks) - plain_ms
        if promised < _PROBE_TOKENS or cost_ms > self._to_lose_ms:
            return [Pick()] * len(offers)
        return picks

    def _offers(self, seq: Sequence, most: int) -> list[Offer]:
        most = min(most, seq.limit - len(seq.tokens) - 1)
        offers = [
            Offer.of(number, drafter.chances(seq, most))
            for number, drafter in enumerate(self._drafters)
        ]
        return [offer for offer in offers if offer.tokens[-1] >= _LEAST_OFFER]

    def _step_ms(self, tokens: int) -> float:
        return self._costs.ms(tokens) or 0.0

    def _draft_ms(self, picks: list[Pick]) -> float:
        return sum(
            drafter.cost_ms([p.drafts for p in picks if p.drafts and p.drafter == number])
            for number, drafter in enumerate(self._drafters)
        )

    def observe(self, chunks: Seq[Chunk], step_ms: float) -> None:
        """Enter a finished step; to be called when its tokens are in their sequences."""
        if not self._drafters:
            return
        came = [_came(chunk) for chunk in chunks]
        decoding = [
            (chunk, len(tokens))
            for chunk, tokens in zip(chunks, came, strict=True)
            if chunk.samples and chunk.start >= chunk.seq.num_prompt
        ]
        drafted = sum(chunk.num_drafts for chunk, _ in decoding)
        if len(decoding) == len(chunks):
            self._enter(decoding, drafted, step_ms)
        elif not decoding:
            self._costs.observe_prompt(sum(map(len, chunks)), step_ms)
        self._steps += bool(drafted)
        self._drafted += drafted
        self._accepted += sum(count - 1 for chunk, count in decoding if chunk.num_drafts)
        for chunk, tokens in zip(chunks, came, strict=True):
            if tokens:
                for drafter in self._drafters:
                    drafter.learn(chunk.seq, tokens)

    def _enter(self, decoding: Seq[tuple[Chunk, int]], drafted: int, step_ms: float) -> None:
        """A step of sequences that were all decoding."""
        sequences, tokens = len(decoding), sum(count for _, count in decoding)
        if not self._costs.largest:
            self._to_lose_ms = _PROBE_STEPS * step_ms
        self._costs.observe(sequences + drafted, step_ms)
        self._since_plain = self._since_plain + 1 if drafted else 0
        ms = step_ms + self._propose_ms
        plain_ms = ms if not drafted else tokens / sequences * self._step_ms(sequences)
        for chunk, count in decoding:
            own = self._own.setdefault(chunk.seq, _Own())
            own.steps += 1
            own.ms += ms
            own.plain_ms += ms if not drafted else count * self._step_ms(sequences)
        gained_ms = _PROBE_SHARE * ms - max(0.0, ms - plain_ms)
        self._to_lose_ms = min(
            self._to_lose_ms + gained_ms, _PROBE_STEPS * self._step_ms(sequences)
        )
        self._recent.add(
            drafting=bool(drafted), sequences=sequences, tokens=tokens, ms=ms, plain_ms=plain_ms
        )

    def _forget_others(self, seqs: Seq[Sequence]) -> None:
        """Who decodes no more has ended, or lost its place."""
        now = set(seqs)
        for seq in self._known - now:
            for drafter in self._drafters:
                drafter.forget(seq)
        self._known = now

    def of(self, seq: Sequence) -> Drafting:
        """What a sequence has had of it so far."""
        own = self._own.get(seq)
        if own is None or not own.ms:
            return Drafting(reason=self._reason)
        # a step without drafts for anybody says that the reason held
        reason = "" if seq.num_drafted else self._reason
        by = tuple(name for name, _ in own.by.most_common())
        return Drafting(own.steps, own.plain_ms / own.ms, reason, by)

    @property
    def stats(self) -> SpeculationStats:
        """What has become of it, recently and in all."""
        recent = self._recent
        share = recent.drafting / recent.steps if recent.steps else 0.0
        return SpeculationStats(
            drafters=tuple(drafter.name for drafter in self._drafters),
            share=share,
            reason="" if share >= 0.5 else self._reason,
            tokens_per_step=recent.tokens / recent.sequences if recent.sequences else 0.0,
            speedup=recent.plain_ms / recent.ms if recent.ms else 0.0,
            drafting_steps_total=self._steps,
            draft_tokens_total=self._drafted,
            accepted_tokens_total=self._accepted,
        )

    def close(self) -> None:
        """Free what drafters hold. No call may follow."""
        for drafter in self._drafters:
            drafter.close()


def _nothing_to_expect(drafters: Seq[Drafter]) -> str:
    models = [drafter.name for drafter in drafters if drafter.name != NgramDrafter.name]
    beside = f", and {' and '.join(models)} has not read it or is wrong here" if models else ""
    return f"nothing to expect: the text does not repeat itself{beside}"


def _came(chunk: Chunk) -> list[int]:
    """What the sequence has got from this chunk."""
    return chunk.seq.tokens[chunk.start + len(chunk) - chunk.num_drafts :] if chunk.samples else []
