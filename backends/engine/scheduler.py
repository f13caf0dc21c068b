"""Who computes what in the next step: admission, ragged chunks, preemption, ends.

There is no prefill mode and no decode mode. A sequence owes tokens; a step pays some of
them. Decoding sequences come first, then prompts share what is left of the token budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from localgen.backends.engine.fair_queue import FairQueue, effective_priority
from localgen.backends.engine.speculation.drafter import DraftProposal
from localgen.backends.engine.token_budget import TokenBudget
from localgen.backends.errors import QueueFull
from localgen.backends.runner.interface import Chunk, ModelRunner, NoRoom, StepResult
from localgen.backends.runner.sequence import Sequence, SequenceState, common_prefix_len
from localgen.backends.types import PositionLogprobs

# waiting for another request's prefix pays from about this many tokens on
MIN_SHARED_TOKENS = 32
# how far down the queue admission looks in one step
MAX_ADMISSION_SCAN = 64
# room kept for each running sequence when another is admitted, so that it is not evicted at once
FREE_TOKENS_PER_SEQ = 32


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What a step gave one sequence. reason: why it ended, if it did (stop or length)."""

    seq: Sequence
    tokens: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    reason: str | None = None


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the engine started."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Scheduler:
    """Owns every Sequence. Between plan and apply a step is in flight and nothing may change."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        budget: TokenBudget,
        max_queue: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._limits = runner.limits
        self._budget = budget
        self._max_queue = max_queue
        self._clock = clock
        self._running: dict[str, Sequence] = {}
        self._admission_paused = (
            False  # a planned step found no room: admit nobody until somebody ends
        )
        self.queue = FairQueue()
        self.counters = SchedulerCounters()

    @property
    def running(self) -> list[Sequence]:
        """Admitted sequences: highest priority first, then oldest. Preemption takes the last."""
        return sorted(self._running.values(), key=lambda s: (-s.priority, s.arrived_s))

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self._running or len(self.queue))

    @property
    def next_waiting(self) -> Sequence | None:
        """Whose turn it is among those that wait."""
        return next(iter(self.queue.in_turn(self._clock())), None)

    def get(self, request_id: str) -> Sequence | None:
        """The live sequence of that id."""
        return self._running.get(request_id) or self.queue.get(request_id)

    def submit(self, seq: Sequence) -> None:
        """Let a new sequence wait for its turn. QueueFull. Not while a step is in flight."""
        if len(self.queue) >= self._max_queue:
            self._admit()  # somebody has ended since, whose place is free
        if len(self.queue) >= self._max_queue:
            raise QueueFull(
                f"{len(self.queue)} requests are waiting, the limit is {self._max_queue}: "
                "try again later"
            )
        self.queue.enter(seq)

    def end(self, seq: Sequence) -> None:
        """End a live sequence now; what it computed stays as a prefix for others."""
        if seq.state is SequenceState.RUNNING:
            del self._running[seq.id]
            self._runner.release(seq, keep=True)
            self._admission_paused = False
        else:
            self.queue.remove(seq)
        self.queue.leave(seq)
        seq.state = SequenceState.ENDED

    # -- planning ---------------------------------------------------------------------------

    @property
    def decoding(self) -> list[Sequence]:
        """Running sequences that owe nothing but their last token."""
        return [seq for seq in self.running if seq.is_decoding]

    def set_drafts(self, seq: Sequence, proposal: DraftProposal) -> None:
        """How a decoding sequence may go on, to be verified in the next step."""
        seq.drafts, seq.draft_probs = proposal.tokens, proposal.draft_probs

    def plan(self) -> list[Chunk]:
        """The chunks of the next step; empty when nobody waits or runs."""
        self._admit()
        chunks: list[Chunk] = []
        decoding = self.decoding
        left = min(self._limits.max_outputs, self._limits.max_batch_tokens)
        for behind, seq in zip(reversed(range(len(decoding))), decoding, strict=True):
            if seq.state is SequenceState.RUNNING:
                # drafts may take what is left once everybody behind has a token
                chunk = self._decode_chunk(seq, left - behind)
                if chunk:
                    chunks.append(chunk)
                    left -= len(chunk)
        planned = sum(map(len, chunks))
        budget = min(
            self._budget.prompt_tokens(len(chunks)),
            self._limits.max_batch_tokens - planned,
        )
        return chunks + self._prompt_chunks(budget, self._limits.max_outputs - planned)

    def _decode_chunk(self, seq: Sequence, max_tokens: int) -> Chunk | None:
        """The owed token and its drafts, `max_tokens` at most; None if it had to be preempted
        itself."""
        drafts = seq.drafts[: max(0, min(max_tokens, seq.max_len - len(seq.tokens)) - 1)]
        while not self._runner.grow(seq, 1 + len(drafts)):
            if drafts:
                drafts = []
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return None
        return Chunk(
            seq=seq,
            start=seq.num_computed,
            tokens=[seq.tokens[-1], *drafts],
            num_drafts=len(drafts),
            is_sampled=True,
            draft_probs=seq.draft_probs[: len(drafts)],
        )

    def _prompt_chunks(self, budget: int, outputs_left: int) -> list[Chunk]:
        """Prompts under a budget: the oldest if it can be done, or else half of it, and the rest
        to whoever has least left.

        A long prompt advances in every step, yet a short one behind it need not wait for it.
        """
        prefilling = [seq for seq in self.running if not seq.is_decoding]
        if not prefilling:
            return []
        oldest, others = prefilling[0], sorted(prefilling[1:], key=lambda s: s.num_uncomputed)
        shares: dict[str, int] = {}
        left = budget
        fits = not others or oldest.num_uncomputed <= budget
        reserved = min(oldest.num_uncomputed, budget if fits else (budget + 1) // 2)
        left -= reserved
        for seq in others:
            shares[seq.id] = min(seq.num_uncomputed, left)
            left -= shares[seq.id]
        shares[oldest.id] = min(oldest.num_uncomputed, reserved + left)
        chunks = []
        for seq in (oldest, *others):
            samples = shares[seq.id] == seq.num_uncomputed
            if shares[seq.id] and (outputs_left or not samples):
                chunks.append(self._prompt_chunk(seq, shares[seq.id], samples))
                outputs_left -= samples
        return chunks

    def _prompt_chunk(self, seq: Sequence, length: int, samples: bool) -> Chunk:
        end = seq.num_computed + length
        tokens = seq.tokens[seq.num_computed : end]
        return Chunk(seq=seq, start=seq.num_computed, tokens=tokens, is_sampled=samples)

    def _admit(self) -> None:
        """Take waiting sequences in turn while there is room.

        Order is kept: what does not fit blocks those behind it, or a large request would
        starve. Only a request that waits for a prefix being computed lets others pass.
        """
        if not len(self.queue) or (self._admission_paused and self._running):
            return
        for seq in self.queue.in_turn(self._clock())[:MAX_ADMISSION_SCAN]:
            if self._is_prefix_in_flight(seq):
                continue
            if not self._admit_with_preemption(seq):
                return

    def _admit_with_preemption(self, seq: Sequence) -> bool:
        """Admit `seq`, preempting sequences of lower priority if need be.

        Age counts here too, or what has at last had its turn would lose it at once.
        """
        now_s = self._clock()
        while not self._try_admit(seq):
            victim = min(
                self.running,
                key=lambda s: (effective_priority(s, now_s), -s.arrived_s),
                default=None,
            )
            if victim is None or effective_priority(victim, now_s) >= effective_priority(
                seq, now_s
            ):
                return False
            self._preempt(victim)
        return True

    def _try_admit(self, seq: Sequence) -> bool:
        if len(self._running) >= self._limits.max_seqs:
            return False
        spare = min(FREE_TOKENS_PER_SEQ * len(self._running), self._limits.kv_tokens // 8)
        started_s = self._clock()
        try:
            cached = self._runner.admit(seq, spare=spare)
        except NoRoom:
            return False
        self.queue.remove(seq)
        self._running[seq.id] = seq
        seq.state, seq.num_computed = SequenceState.RUNNING, cached
        if seq.admitted_s is None:
            seq.admitted_s, seq.num_cached = started_s, cached
            seq.cached_ms = (self._clock() - started_s) * 1e3
            self.counters.prefix_queries += seq.num_prompt
            self.counters.prefix_hits += cached
        return True

    def _is_prefix_in_flight(self, seq: Sequence) -> bool:
        """Whether a running request is just computing a prefix that `seq` can share."""
        if not self._limits.can_rewind:
            return False
        usable = seq.tokens[:-1]
        return any(
            common_prefix_len(other.tokens, usable) - other.num_computed >= MIN_SHARED_TOKENS
            for other in self._running.values()
            if other.num_uncomputed > MIN_SHARED_TOKENS
        )

    def _preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to the queue; it will recompute what is lost by then."""
        del self._running[seq.id]
        self._runner.release(seq, keep=True)
        seq.state, seq.num_computed, seq.drafts, seq.draft_probs = SequenceState.QUEUED, 0, [], ()
        seq.num_preemptions += 1
        self.counters.preemptions += 1
        self.queue.push(seq)

    # -- results ----------------------------------------------------------------------------

    def apply(
        self, chunks: list[Chunk], result: StepResult, step_ms: float
    ) -> list[SequenceOutput]:
        """Enter the results of a step; sequences that came to their end are released."""
        now_s = self._clock()
        outputs = []
        decoding = sum(chunk.seq.is_decoding for chunk in chunks)
        prompt_tokens = 0
        for chunk, sampled in zip(chunks, result, strict=True):
            seq = chunk.seq
            if not seq.is_decoding:
                prompt_tokens += len(chunk)
            self._advance(chunk, len(sampled.tokens))
            if sampled.tokens:
                if seq.first_token_s is None:
                    seq.first_step_ms = step_ms
                outputs.append(self._append_tokens(seq, sampled.tokens, sampled.logprobs, now_s))
            if chunk.num_drafts:
                seq.num_drafted += chunk.num_drafts
                seq.num_accepted += len(outputs[-1].tokens) - 1
                seq.used_sampled_drafts |= bool(chunk.draft_probs)
            self.queue.charge(seq, len(chunk), len(sampled.tokens))
            if outputs and outputs[-1].seq is seq and outputs[-1].reason:
                self.end(seq)
        if not any(chunk.num_drafts for chunk in chunks):  # or it is not what decoding takes
            self._budget.observe(step_ms, prompt_tokens, decoding)
        self.counters.prompt_tokens += prompt_tokens
        return outputs

    def preempt_one(self) -> bool:
        """The pool turned out too small for a planned step: preempt one; False if none is left."""
        if len(self._running) < 2:
            return False
        self._preempt(self.running[-1])
        self._admission_paused = True
        return True

    def _advance(self, chunk: Chunk, num_sampled: int) -> None:
        """Count what is now in the cache; drafts behind the first mismatch are not."""
        seq = chunk.seq
        rejected = chunk.num_drafts + 1 - num_sampled if chunk.is_sampled else 0
        seq.num_computed = chunk.start + len(chunk) - rejected
        if rejected:
            self._runner.rewind(seq, seq.num_computed)
        seq.drafts, seq.draft_probs = [], ()

    def _append_tokens(
        self,
        seq: Sequence,
        tokens: tuple[int, ...],
        logprobs: tuple[PositionLogprobs, ...],
        now_s: float,
    ) -> SequenceOutput:
        """Append new tokens up to the first that ends the answer."""
        reason = None
        taken = 0
        for token in tokens:
            seq.tokens.append(token)
            taken += 1
            if token in seq.stop_ids or (taken == len(tokens) and _is_grammar_complete(seq)):
                reason = "stop"
            elif len(seq.tokens) >= seq.max_len:
                reason = "length"
            if reason:
                break
        if seq.first_token_s is None:
            seq.first_token_s = now_s
        seq.last_token_s = now_s
        seq.num_computed = min(seq.num_computed, len(seq.tokens) - 1)
        self.counters.generated_tokens += taken
        return SequenceOutput(seq, tokens[:taken], logprobs[:taken], reason)


def _is_grammar_complete(seq: Sequence) -> bool:
    """Whether nothing can follow in the grammar that the answer is held to."""
    return seq.matcher is not None and seq.matcher.is_done
