"""Speculative decoding: drafts before a step where they pay, measurements after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate
from math import inf
from operator import mul
from weakref import WeakKeyDictionary

from localgen.backends.engine.speculation.drafter import Drafter, DraftProposal
from localgen.backends.engine.speculation.policy import MIN_GAIN, DraftOption, StepCosts, allocate
from localgen.backends.engine.speculation.stats import (
    RequestDraftStats,
    SequenceDraftStats,
    SpeculationRecorder,
)
from localgen.backends.runner.interface import MAX_DRAFT_TOKENS, Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import SpeculationStats

# one step in this many is plain while drafts are used: gains are measured against plain steps
PLAIN_EVERY = 32
# share of the time for probes and prefills that may not pay off, and as much again for lookups that
# find nothing; gains are added to the budget of probes, up to the time of this many plain steps
BUDGET_SHARE, BUDGET_STEPS = 0.005, 32
# number of drafts in a probe, and in estimates that compare drafters
_FEW_DRAFTS = 4
_TOO_SLOW = "too slow: drafts would cost more than they save"


class Speculation:
    """Decides before each step how much each drafter drafts, and measures each step.

    max_drafts: limit per sequence. disabled_reason: shown if there are no drafters. synchronize: as
    in AsyncRunner; None: steps are never launched ahead. waited_ms: time that propose has waited
    for a step that was launched ahead.
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
        self._drafters, self._max_drafts = drafters, max_drafts
        self._synchronize, self._clock = synchronize, clock
        self._costs, self._recorder = StepCosts(), SpeculationRecorder()
        self._by_sequence: WeakKeyDictionary[Sequence, SequenceDraftStats] = WeakKeyDictionary()
        self._seqs: list[Sequence] = []
        self._reason = "" if drafters else disabled_reason
        self._budget_ms = self._lookup_ms = 0.0
        self._steps_since_plain = self._steps_since_lookup = 0
        # of the step to come
        self._has_proposed = self._is_synchronized = False
        self._propose_ms = self._prefill_ms = self.waited_ms = 0.0

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
        self._has_proposed = self._is_synchronized = False
        self._propose_ms = self._prefill_ms = self.waited_ms = 0.0
        if not self._drafters:
            return {}
        if seqs != self._seqs:
            self._release_others(seqs)
        if with_prompts:
            self._reason = "prefill first: a prompt is being computed"
        if with_prompts or not seqs or not self._should_propose(len(seqs)):
            return {}
        started_s = self._clock()
        self._has_proposed, self._steps_since_lookup = True, 0
        # unmeasured step sizes are approached by doubling
        limit = min(max_outputs, 2 * max(self._costs.largest, len(seqs))) - len(seqs)
        options = [self._option(seq, min(limit, self._max_drafts)) for seq in seqs]
        counts = self._allocate(options, limit)
        self._lookup_ms = 0.0 if counts else self._ms_since(started_s)
        drafts = self._draft(seqs, options, counts) if counts else {}
        self._prefill(len(seqs), max_prefill_tokens)
        if drafts:  # the step launched ahead is discarded
            self.waited_ms = 0.0
        self._propose_ms = self._ms_since(started_s) - self.waited_ms
        return drafts

    def _should_propose(self, count: int) -> bool:
        """False if a plain step is due or has no measured cost yet, or if the last lookup found
        nothing and its time is not yet within the budget."""
        if count not in self._costs or self._steps_since_plain >= PLAIN_EVERY:
            return False
        self._steps_since_lookup += 1
        paid_ms = self._steps_since_lookup * BUDGET_SHARE * self._costs.ms(count)
        return self._lookup_ms <= paid_ms or self._steps_since_lookup >= PLAIN_EVERY

    def _option(self, seq: Sequence, limit: int) -> DraftOption | None:
        """Choose the drafter whose first few drafts give most tokens per millisecond."""
        limit = min(limit, seq.max_len - len(seq.tokens) - 1)
        found = [DraftOption(d, d.acceptance_probs(seq, limit)) for d in self._drafters]
        plain_ms = self._costs.ms(1)

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
        found = allocate(options, self._costs.ms, max_drafts=limit)
        if found and found.gain >= MIN_GAIN:
            return found.drafts
        is_expected = any(options)
        self._reason = _TOO_SLOW if is_expected else self._no_match_reason()
        return self._probe(options, limit)

    def _probe(self, options: Seq[DraftOption | None], limit: int) -> list[int] | None:
        """A few drafts for one sequence, if the budget covers their expected loss."""
        one: list[DraftOption | None] = [None] * len(options)
        for i, option in enumerate(options):
            if option and option.drafter.needs_probing:
                one[i] = option._replace(probs=option.probs[:_FEW_DRAFTS])
                break
        found = allocate(one, self._costs.ms, max_drafts=limit, max_slowdown=inf)
        return found.drafts if found and found.loss_ms <= self._budget_ms else None

    def _draft(
        self, seqs: Seq[Sequence], options: Seq[DraftOption | None], counts: Seq[int]
    ) -> dict[Sequence, DraftProposal]:
        self._wait()
        drafts = {}
        for drafter in self._drafters:
            requests = [
                (seq, count)
                for seq, option, count in zip(seqs, options, counts, strict=True)
                if count and option and option.drafter is drafter
            ]
            for (seq, _), proposal in zip(requests, drafter.propose(requests), strict=True):
                if proposal.tokens:
                    self._stats_of(seq).tokens_by_drafter[drafter.name] += len(proposal.tokens)
                    drafts[seq] = proposal
        return drafts

    def _prefill(self, count: int, max_tokens: int) -> None:
        """Let draft models prefill prompts that the target has computed, if drafts are expected to
        pay off or the budget covers it."""
        for drafter in self._drafters:
            acceptance = drafter.prefill_acceptance()
            if not acceptance:
                continue
            option = DraftOption(drafter, [acceptance] * _FEW_DRAFTS)
            found = allocate([option] * count, self._costs.ms, max_drafts=count * _FEW_DRAFTS)
            if self._budget_ms > 0 or (found and found.gain >= MIN_GAIN):
                self._wait()
                started_s = self._clock()
                drafter.prefill(max_tokens)
                self._prefill_ms += self._ms_since(started_s)

    def _wait(self) -> None:
        """Wait for a step launched ahead, so that its time is not counted as drafting."""
        if self._synchronize is not None and not self._is_synchronized:
            started_s = self._clock()
            self._synchronize()
            self._is_synchronized, self.waited_ms = True, self._ms_since(started_s)

    def _ms_since(self, started_s: float) -> float:
        return (self._clock() - started_s) * 1e3

    def observe(self, chunks: Seq[Chunk], step_ms: float) -> None:
        """Record a finished step whose tokens are in their sequences.

        step_ms: from the launch to the result, with waited_ms.
        """
        decoding = [chunk for chunk in chunks if chunk.is_decoding]
        if not self._drafters or not decoding:
            return
        count, drafts = len(decoding), sum(chunk.num_drafts for chunk in decoding)
        is_decode_step = count == len(chunks)
        if is_decode_step:
            self._costs.observe(count + drafts, step_ms)
        if is_decode_step or drafts:
            plain_step_ms = self._costs.ms(count) if is_decode_step and drafts else step_ms
            self._record(decoding, drafts, step_ms + self._propose_ms, plain_step_ms)
        for chunk in decoding if self._has_proposed else ():
            new_tokens = chunk.seq.tokens[-_num_new_tokens(chunk) :]
            for drafter in self._drafters:
                drafter.observe(chunk.seq, new_tokens)

    def _record(
        self, decoding: Seq[Chunk], drafts: int, step_ms: float, plain_step_ms: float
    ) -> None:
        """Account for a step. step_ms: with its drafting."""
        new = [_num_new_tokens(chunk) for chunk in decoding]
        plain_ms = sum(new) / len(new) * plain_step_ms
        self._recorder.record(len(new), sum(new), drafts, step_ms, plain_ms)
        for chunk, num_new in zip(decoding, new, strict=True):
            self._stats_of(chunk.seq).add(chunk.num_drafts, step_ms, num_new * plain_step_ms)
        self._steps_since_plain = self._steps_since_plain + 1 if drafts else 0
        gain_ms = plain_ms - step_ms if drafts else -self._prefill_ms
        limit_ms = BUDGET_STEPS * plain_step_ms
        budget_ms = self._budget_ms + BUDGET_SHARE * step_ms + gain_ms
        self._budget_ms = max(-limit_ms, min(budget_ms, limit_ms))

    def _stats_of(self, seq: Sequence) -> SequenceDraftStats:
        return self._by_sequence.setdefault(seq, SequenceDraftStats())

    def _release_others(self, seqs: list[Sequence]) -> None:
        for seq in set(self._seqs).difference(seqs):
            for drafter in self._drafters:
                drafter.release(seq)
        self._seqs, self._lookup_ms = seqs, 0.0

    def _no_match_reason(self) -> str:
        models = [drafter for drafter in self._drafters if drafter.needs_probing]
        not_used = "has not prefilled the prompt, or its drafts are rejected"
        reasons = [f", and {model.name} {model.failure or not_used}" for model in models]
        return "no match: the text does not repeat itself" + "".join(reasons)

    def request_stats(self, seq: Sequence) -> RequestDraftStats:
        """Speculation statistics of a sequence so far."""
        own = self._by_sequence.get(seq, SequenceDraftStats())
        names = tuple(name for name, _ in own.tokens_by_drafter.most_common())
        reason = "" if 2 * own.drafting_steps >= max(1, own.steps) else self._reason
        return RequestDraftStats(own.steps, own.plain_ms / (own.ms or inf), reason, names)

    @property
    def stats(self) -> SpeculationStats:
        """For /v1/stats."""
        names = tuple(drafter.name for drafter in self._drafters if not drafter.failure)
        return self._recorder.stats(names, self._reason)

    def close(self) -> None:
        """Free what drafters hold. No call may follow."""
        for drafter in self._drafters:
            drafter.close()


def _num_new_tokens(chunk: Chunk) -> int:
    """Tokens that the sequence got from a sampled chunk."""
    return len(chunk.seq.tokens) - (chunk.start + len(chunk) - chunk.num_drafts)
