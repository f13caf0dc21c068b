"""The policy: before each step, how much each drafter drafts; after it, measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from math import inf

from localgen.backends.engine.speculation.allocation import DraftOption, allocate
from localgen.backends.engine.speculation.drafter import DecayedRatio, Drafter, DraftProposal
from localgen.backends.engine.step_costs import StepCosts
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import MAX_DRAFT_TOKENS

# minimum expected gain of drafts, as a factor
MIN_GAIN = 1.02
# one step in this many is plain while drafts are used: gains are measured against plain steps
PLAIN_EVERY = 32
# share of the time for probes that may not pay off, and as much again for lookups that find
# nothing; gains are added to the budget of probes, up to the time of this many plain steps
BUDGET_SHARE, BUDGET_STEPS = 0.005, 32
# number of drafts in a probe
_FEW_DRAFTS = 4


class Speculation:
    """Decides before each step how much each drafter drafts, and measures each step.

    costs: of decode steps, recorded before `observe`. max_drafts: limit per sequence.
    disabled_reason: shown if there are no drafters. synchronize: waits for a step launched ahead
    and returns the milliseconds. waited_ms: that time, if the step is used. reason: why there were
    no drafts lately. speedup: of recent steps over plain ones.
    """

    def __init__(
        self,
        drafters: Seq[Drafter],
        costs: StepCosts,
        *,
        max_drafts: int = MAX_DRAFT_TOKENS,
        disabled_reason: str = "no drafter",
        synchronize: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.drafters, self._max_drafts, self.costs = drafters, max_drafts, costs
        self._synchronize, self._clock = synchronize, clock
        self.speedup = DecayedRatio(decay=DecayedRatio.RECENT)
        self._seqs: list[Sequence] = []
        self.reason = "" if drafters else disabled_reason
        self._steps_since_plain = 0
        # for probes; and time of lookups without drafts that steps have yet to pay for
        self._budget_ms = self._unpaid_ms = self._propose_ms = self.waited_ms = 0.0
        self._has_proposed = False

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
        if self.drafters and with_prompts:
            self.reason = "prefill first: a prompt is being computed"
        if not self.drafters or with_prompts or not seqs or not self._is_lookup_due(len(seqs)):
            return {}
        started_s, self._has_proposed = self._clock(), True
        # unmeasured step sizes are approached by doubling
        limit = min(max_outputs, 2 * max(self.costs.largest, len(seqs))) - len(seqs)
        options = [self._option(seq, min(limit, self._max_drafts)) for seq in seqs]
        counts = self._num_drafts(options, limit)
        if counts is None:
            self._propose_ms = (self._clock() - started_s) * 1e3
            most_ms = PLAIN_EVERY * BUDGET_SHARE * self.costs.ms(len(seqs))
            self._unpaid_ms = min(self._propose_ms, most_ms)
            return {}
        # the time of a step launched ahead is not drafting; with drafts it is discarded
        waited_ms = self._synchronize()
        drafts: dict[Sequence, DraftProposal] = {}
        for drafter in self.drafters:
            requests = {
                seq: count
                for seq, option, count in zip(seqs, options, counts, strict=True)
                if count and option and option.drafter is drafter
            }
            for seq, proposal in drafter.propose(requests, max_prefill_tokens).items():
                seq.drafted_by[drafter.name] += len(proposal.tokens)
                drafts[seq] = proposal
        if not drafts:
            self.reason = "prefill first: the draft model computes a prompt"
            self.waited_ms = waited_ms
        self._propose_ms = (self._clock() - started_s) * 1e3 - waited_ms
        return drafts

    def _is_lookup_due(self, count: int) -> bool:
        """False if a plain step is due or has no measured cost yet, and while the last lookup that
        found nothing has taken more than its share of the time."""
        if count not in self.costs or self._steps_since_plain >= PLAIN_EVERY:
            return False
        self._unpaid_ms = max(0.0, self._unpaid_ms - BUDGET_SHARE * self.costs.ms(count))
        return self._unpaid_ms == 0.0

    def _option(self, seq: Sequence, limit: int) -> DraftOption | None:
        """Choose the drafter whose first draft gives most tokens per millisecond."""
        limit = min(limit, seq.max_len - len(seq.tokens) - 1)
        found = (DraftOption(d, d.acceptance_probs(seq, limit)) for d in self.drafters)
        return max(
            (option for option in found if option.probs),
            key=lambda each: (1.0 + each.probs[0]) / (self.costs.ms(1) + each.drafter.draft_ms()),
            default=None,
        )

    def _num_drafts(self, options: Seq[DraftOption | None], limit: int) -> list[int] | None:
        """Return the number of drafts of each sequence, or None and set reason."""
        if limit < 1:
            outputs = limit + len(options)
            self.reason = f"no room: a step can sample only {outputs} tokens, one per sequence"
            return None
        found = allocate(options, self.costs.ms, max_drafts=limit)
        if found.speedup >= MIN_GAIN:
            return found.drafts
        self.reason = self._why_none(options)
        # a probe: a few drafts for one sequence, if the budget covers their expected loss
        probed = next((each for each in options if each and each.drafter.needs_probing), None)
        few = probed and probed._replace(probs=probed.probs[:_FEW_DRAFTS])
        one = [few if each is probed else None for each in options]
        probe = allocate(one, self.costs.ms, max_drafts=limit, max_slowdown=inf)
        loss_ms = (1.0 - probe.speedup) * probe.ms
        return probe.drafts if probe.speedup and loss_ms <= self._budget_ms else None

    def _why_none(self, options: Seq[DraftOption | None]) -> str:
        if any(options):
            return "too slow: drafts would cost more than they save"
        models = [drafter for drafter in self.drafters if drafter.needs_probing]
        reasons = [f", and {each.name} {each.failure or 'cannot draft for it'}" for each in models]
        return "no match: the text does not repeat itself" + "".join(reasons)

    def observe(self, chunks: Seq[Chunk], step_ms: float, *, is_typical: bool = True) -> None:
        """Record a finished step whose tokens are in their sequences; only with drafters.

        step_ms: from the launch to the result, with waited_ms. is_typical: see Scheduler.apply.
        """
        new_tokens = {c.seq: c.seq.tokens[c.start + 1 :] for c in chunks if c.is_decoding}
        if 0 < len(new_tokens) == len(chunks):  # no prompt was computed
            if is_typical:
                self._record(new_tokens, sum(chunk.num_drafts for chunk in chunks), step_ms)
        elif not self._unpaid_ms:  # beside a prompt no gain is measured, but drafting is paid for
            self._budget_ms -= self._propose_ms
        for drafter in self.drafters if self._has_proposed else ():
            for seq, tokens in new_tokens.items():
                drafter.observe(seq, tokens)

    def _record(self, new_tokens: Mapping[Sequence, Seq[int]], drafts: int, step_ms: float) -> None:
        """Account for a decode step and its drafting."""
        plain_step_ms = self.costs.ms(len(new_tokens)) if drafts else step_ms
        step_ms += self._propose_ms
        for seq, tokens in new_tokens.items():
            seq.decode_ms += step_ms
            seq.plain_decode_ms += len(tokens) * plain_step_ms
        plain_ms = sum(map(len, new_tokens.values())) / len(new_tokens) * plain_step_ms
        self.speedup.add(plain_ms, step_ms)
        self._steps_since_plain = self._steps_since_plain + 1 if drafts else 0
        # lookups that find nothing have a limit of their own
        gain_ms = 0.0 if self._unpaid_ms else plain_ms - step_ms
        limit_ms = BUDGET_STEPS * plain_step_ms
        budget_ms = self._budget_ms + BUDGET_SHARE * step_ms + gain_ms
        self._budget_ms = max(-limit_ms, min(budget_ms, limit_ms))

    def _release_others(self, seqs: list[Sequence]) -> None:
        for seq in set(self._seqs).difference(seqs):
            for drafter in self.drafters:
                drafter.release(seq)
        self._seqs, self._unpaid_ms = seqs, 0.0

    def prepare_while_idle(self) -> bool:
        """See AsyncRunner.prepare_while_idle."""
        return any(drafter.prepare_while_idle() for drafter in self.drafters)

    def close(self) -> None:
        """Free what drafters hold. No call may follow."""
        for drafter in self.drafters:
            drafter.close()
