"""The policy: before each step, how much each drafter drafts; after it, measurements.

Drafts are assigned one by one, each to the sequence whose expected tokens it raises most. Of these
allocations, the one with most tokens per millisecond is chosen that slows no sequence down.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import inf
from operator import mul
from typing import NamedTuple
from weakref import WeakKeyDictionary

from localgen.backends.engine.speculation.drafter import Drafter, DraftProposal
from localgen.backends.engine.speculation.stats import (
    RequestDraftStats,
    StepTotals,
    speculation_stats,
)
from localgen.backends.engine.step_costs import StepCosts
from localgen.backends.runner.interface import MAX_DRAFT_TOKENS, Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import SpeculationStats

# minimum expected gain of drafts, and maximum slowdown of any one sequence, as factors
MIN_GAIN, MAX_SLOWDOWN = 1.02, 1.05
# one step in this many is plain while drafts are used: gains are measured against plain steps
PLAIN_EVERY = 32
# share of the time for probes that may not pay off, and as much again for lookups that find
# nothing; gains are added to the budget of probes, up to the time of this many plain steps
BUDGET_SHARE, BUDGET_STEPS = 0.005, 32
# number of drafts in a probe, and in estimates that compare drafters
_FEW_DRAFTS = 4
# decay of earlier steps in the statistics of recent ones
_RECENT_DECAY = 0.98
_TOO_SLOW = "too slow: drafts would cost more than they save"


class DraftOption(NamedTuple):
    """Possible drafts of one sequence. probs: acceptance probability of each."""

    drafter: Drafter
    probs: Seq[float]


class Allocation(NamedTuple):
    """drafts: number for each sequence. gain: expected speed-up over plain decoding. loss_ms: extra
    time compared with plain steps for the same number of tokens."""

    drafts: list[int]
    gain: float
    loss_ms: float


def allocate(
    options: Seq[DraftOption | None],
    step_ms: Callable[[int], float],
    *,
    max_drafts: int,
    max_slowdown: float = MAX_SLOWDOWN,
) -> Allocation | None:
    """Return the fastest allocation with at least one draft, or None if there is none.

    options: one per sequence. step_ms: cost by number of tokens. max_drafts: limit of the step. The
    allocation may be slower than plain decoding.
    """
    count = len(options)
    plain_ms = step_ms(count)
    drafts, reached, expected = [0] * count, [1.0] * count, [1.0] * count
    heap = [(-option.probs[0], i) for i, option in enumerate(options) if option and option.probs]
    heapify(heap)
    best: Allocation | None = None
    # drafting rounds; each round serves all sequences of its drafter
    rounds: dict[Drafter, int] = {}
    total = 0
    while heap and total < max_drafts:
        i = heappop(heap)[1]
        option = options[i]
        assert option is not None
        reached[i] *= option.probs[drafts[i]]
        expected[i] += reached[i]
        drafts[i] += 1
        total += 1
        rounds[option.drafter] = max(rounds.get(option.drafter, 0), drafts[i])
        if drafts[i] < len(option.probs):
            heappush(heap, (-reached[i] * option.probs[drafts[i]] / expected[i], i))
        if heap and total < max_drafts and not _fills_tiles(count + total):
            continue
        ms = step_ms(count + total) + sum(n * drafter.draft_ms() for drafter, n in rounds.items())
        equal_ms = sum(expected) / count * plain_ms
        gain = equal_ms / ms if ms else inf
        if (best is None or gain > best.gain) and min(expected) * max_slowdown * plain_ms >= ms:
            best = Allocation(list(drafts), gain, ms - equal_ms)
    return best


def _fills_tiles(tokens: int) -> bool:
    """True for token counts worth measuring: kernels compute whole tiles of tokens."""
    return tokens <= 8 or tokens % (4 if tokens <= 32 else 16) == 0


class Speculation:
    """Decides before each step how much each drafter drafts, and measures each step.

    costs: of decode steps, recorded before `observe`. max_drafts: limit per sequence.
    disabled_reason: shown if there are no drafters. synchronize: as in AsyncRunner; None: steps are
    never launched ahead. waited_ms: time that propose has waited for a step launched ahead.
    """

    def __init__(
        self,
        drafters: Seq[Drafter],
        costs: StepCosts,
        *,
        max_drafts: int = MAX_DRAFT_TOKENS,
        disabled_reason: str = "no drafter",
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafters, self._max_drafts = drafters, max_drafts
        self._synchronize, self._clock = synchronize, clock
        self.costs = costs
        self._recent, self._total = StepTotals(_RECENT_DECAY), StepTotals()
        self._totals: WeakKeyDictionary[Sequence, StepTotals] = WeakKeyDictionary()
        self._drafted: WeakKeyDictionary[Sequence, Counter[str]] = WeakKeyDictionary()
        self._seqs: list[Sequence] = []
        self._reason = "" if drafters else disabled_reason
        self._budget_ms = self._lookup_ms = 0.0
        self._steps_since_plain = self._steps_since_lookup = 0
        # of the step to come
        self._has_proposed, self._propose_ms, self.waited_ms = False, 0.0, 0.0

    def propose(
        self,
        seqs: list[Sequence],
        *,
        max_outputs: int,
        max_prefill_tokens: int,
        with_prompts: bool = False,
    ) -> dict[Sequence, DraftProposal]:
        """Return the drafts of the next step.

        seqs: all decoding sequences, a new list. max_outputs: positions that the step may sample.
        max_prefill_tokens: prompt tokens that a draft model may prefill now. with_prompts: the step
        also prefills prompts, so it gets no drafts.
        """
        self._has_proposed, self._propose_ms, self.waited_ms = False, 0.0, 0.0
        if seqs != self._seqs:
            self._release_others(seqs)
        if self._drafters and with_prompts:
            self._reason = "prefill first: a prompt is being computed"
        elif self._drafters and seqs and self._should_propose(len(seqs)):
            started_s = self._clock()
            drafts = self._propose(seqs, max_outputs, max_prefill_tokens)
            self._propose_ms = self._ms_since(started_s) - self.waited_ms
            if drafts:  # the step launched ahead is discarded
                self.waited_ms = 0.0
            return drafts
        return {}

    def _should_propose(self, count: int) -> bool:
        """False if a plain step is due or has no measured cost yet, or if the last lookup found
        nothing and its time is not yet within the budget."""
        if count not in self.costs or self._steps_since_plain >= PLAIN_EVERY:
            return False
        self._steps_since_lookup += 1
        paid_ms = self._steps_since_lookup * BUDGET_SHARE * self.costs.ms(count)
        return self._lookup_ms <= paid_ms or self._steps_since_lookup >= PLAIN_EVERY

    def _propose(
        self, seqs: list[Sequence], max_outputs: int, max_prefill_tokens: int
    ) -> dict[Sequence, DraftProposal]:
        started_s = self._clock()
        self._has_proposed, self._steps_since_lookup = True, 0
        # unmeasured step sizes are approached by doubling
        limit = min(max_outputs, 2 * max(self.costs.largest, len(seqs))) - len(seqs)
        options = [self._option(seq, min(limit, self._max_drafts)) for seq in seqs]
        counts = self._allocate(options, limit)
        self._lookup_ms = 0.0 if counts else self._ms_since(started_s)
        if counts is None:
            return {}
        waiting_s = self._clock()
        if self._synchronize is not None:  # the time of a step launched ahead is not drafting
            self._synchronize()
        self.waited_ms = self._ms_since(waiting_s)
        drafts = {}
        for drafter in self._drafters:
            requests = [
                (seq, count)
                for seq, option, count in zip(seqs, options, counts, strict=True)
                if count and option and option.drafter is drafter
            ]
            proposals = drafter.propose(requests, max_prefill_tokens) if requests else []
            for (seq, _), proposal in zip(requests, proposals, strict=True):
                if proposal.tokens:
                    self._drafted.setdefault(seq, Counter())[drafter.name] += len(proposal.tokens)
                    drafts[seq] = proposal
        return drafts

    def _option(self, seq: Sequence, limit: int) -> DraftOption | None:
        """Choose the drafter whose first few drafts give most tokens per millisecond."""
        limit = min(limit, seq.max_len - len(seq.tokens) - 1)
        found = [DraftOption(d, d.acceptance_probs(seq, limit)) for d in self._drafters]
        plain_ms = self.costs.ms(1)

        def rate(option: DraftOption) -> float:
            tokens = accumulate(option.probs[:_FEW_DRAFTS], mul, initial=1.0)
            return sum(tokens) / (plain_ms + _FEW_DRAFTS * option.drafter.draft_ms())

        return max((option for option in found if option.probs), key=rate, default=None)

    def _allocate(self, options: Seq[DraftOption | None], limit: int) -> list[int] | None:
        """Return the number of drafts of each sequence, or None and set _reason."""
        if limit < 1:
            outputs = limit + len(options)
            self._reason = f"no room: a step can sample only {outputs} tokens, one per sequence"
            return None
        found = allocate(options, self.costs.ms, max_drafts=limit)
        if found and found.gain >= MIN_GAIN:
            return found.drafts
        self._reason = _TOO_SLOW if any(options) else self._no_match_reason()
        # a probe: a few drafts for one sequence, if the budget covers their expected loss
        one: list[DraftOption | None] = [None] * len(options)
        for i, option in enumerate(options):
            if option and option.drafter.needs_probing:
                one[i] = option._replace(probs=option.probs[:_FEW_DRAFTS])
                break
        probe = allocate(one, self.costs.ms, max_drafts=limit, max_slowdown=inf)
        return probe.drafts if probe and probe.loss_ms <= self._budget_ms else None

    def observe(self, chunks: Seq[Chunk], step_ms: float) -> None:
        """Record a finished step whose tokens are in their sequences.

        step_ms: from the launch to the result, with waited_ms.
        """
        decoding = [chunk for chunk in chunks if chunk.is_decoding]
        if not self._drafters or not decoding:
            return
        count, drafts = len(decoding), sum(chunk.num_drafts for chunk in decoding)
        is_decode_step = count == len(chunks)
        if is_decode_step or drafts:
            plain_step_ms = self.costs.ms(count) if is_decode_step and drafts else step_ms
            self._record(decoding, drafts, step_ms + self._propose_ms, plain_step_ms)
        for chunk in decoding if self._has_proposed else ():
            new_tokens = chunk.seq.tokens[-_num_new_tokens(chunk) :]
            for drafter in self._drafters:
                drafter.observe(chunk.seq, new_tokens)

    def _record(
        self, decoding: Seq[Chunk], drafts: int, step_ms: float, plain_step_ms: float
    ) -> None:
        """Account for a step. step_ms: with its drafting."""
        count, tokens = len(decoding), 0
        for chunk in decoding:
            new = _num_new_tokens(chunk)
            tokens += new
            own = self._totals.get(chunk.seq) or self._totals.setdefault(chunk.seq, StepTotals())
            own.add(1, new, chunk.num_drafts, step_ms, new * plain_step_ms)
        plain_ms = tokens / count * plain_step_ms
        for totals in (self._recent, self._total):
            totals.add(count, tokens, drafts, step_ms, plain_ms)
        self._steps_since_plain = self._steps_since_plain + 1 if drafts else 0
        # what lookups cost that find nothing is limited by _should_propose
        gain_ms = plain_ms - step_ms if self._lookup_ms == 0.0 else 0.0
        limit_ms = BUDGET_STEPS * plain_step_ms
        budget_ms = self._budget_ms + BUDGET_SHARE * step_ms + gain_ms
        self._budget_ms = max(-limit_ms, min(budget_ms, limit_ms))

    def _release_others(self, seqs: list[Sequence]) -> None:
        for seq in set(self._seqs).difference(seqs):
            for drafter in self._drafters:
                drafter.release(seq)
        self._seqs, self._lookup_ms = seqs, 0.0

    def _ms_since(self, started_s: float) -> float:
        return (self._clock() - started_s) * 1e3

    def _no_match_reason(self) -> str:
        models = [drafter for drafter in self._drafters if drafter.needs_probing]
        reasons = [f", and {each.name} {each.failure or 'has no room for it'}" for each in models]
        return "no match: the text does not repeat itself" + "".join(reasons)

    def request_stats(self, seq: Sequence) -> RequestDraftStats:
        """Speculation statistics of a sequence so far."""
        own, drafted = self._totals.get(seq, StepTotals()), self._drafted.get(seq, Counter())
        reason = "" if 2 * own.drafting_steps >= max(1, own.steps) else self._reason
        names = tuple(name for name, _ in drafted.most_common())
        return RequestDraftStats(int(own.steps), own.plain_ms / (own.ms or inf), reason, names)

    @property
    def stats(self) -> SpeculationStats:
        """For /v1/stats."""
        names = tuple(drafter.name for drafter in self._drafters if not drafter.failure)
        return speculation_stats(self._recent, self._total, names, self._reason)

    def close(self) -> None:
        """Free what drafters hold. No call may follow."""
        for drafter in self._drafters:
            drafter.close()


def _num_new_tokens(chunk: Chunk) -> int:
    """Tokens that the sequence got from a sampled chunk."""
    return len(chunk.seq.tokens) - (chunk.start + len(chunk) - chunk.num_drafts)
