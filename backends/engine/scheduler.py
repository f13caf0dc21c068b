"""The scheduler: admission, ragged batches of chunks, preemption, end of sequences.

There are no separate prefill and decode modes. Every sequence has uncomputed tokens, and a step
computes some of them: decoding sequences first, then prefill with the remaining token budget.
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

# minimum length of a prefix in flight worth waiting for
MIN_SHARED_TOKENS = 32
# maximum number of queued sequences considered for admission in one step
MAX_ADMISSION_SCAN = 64
# tokens kept free for each running sequence at admission, so that none is preempted right away
FREE_TOKENS_PER_SEQ = 32


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """New tokens of one sequence. reason: finish reason (stop or length), None while it runs."""

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
    drafting_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Scheduler:
    """Owns all sequences. A step is in flight between plan and apply: no other call is allowed."""

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
            False  # set when a planned step did not fit; cleared when a sequence ends
        )
        self.queue = FairQueue()
        self.counters = SchedulerCounters()

    @property
    def running(self) -> list[Sequence]:
        """Admitted sequences, highest priority first, then oldest; the last is preempted first."""
        return sorted(self._running.values(), key=lambda s: (-s.priority, s.arrived_s))

    @property
    def has_work(self) -> bool:
        """True if any sequence is queued or running."""
        return bool(self._running or len(self.queue))

    @property
    def next_waiting(self) -> Sequence | None:
        """The queued sequence that is admitted next."""
        return next(iter(self.queue.in_turn(self._clock())), None)

    def get(self, request_id: str) -> Sequence | None:
        """Return the queued or running sequence with this id, or None."""
        return self._running.get(request_id) or self.queue.get(request_id)

    def submit(self, seq: Sequence) -> None:
        """Queue a new sequence. Must not be called while a step is in flight. Raises QueueFull."""
        if len(self.queue) >= self._max_queue:
            self._admit()  # a sequence that ended may have made room for a queued one
        if len(self.queue) >= self._max_queue:
            raise QueueFull(
                f"{len(self.queue)} requests are waiting, the limit is {self._max_queue}: "
                "try again later"
            )
        self.queue.enter(seq)

    def end(self, seq: Sequence) -> None:
        """End a queued or running sequence; its computed tokens stay in the prefix cache."""
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
        """Running sequences with only their last generated token left to compute."""
        return [seq for seq in self.running if seq.is_decoding]

    def set_drafts(self, seq: Sequence, proposal: DraftProposal) -> None:
        """Set the draft tokens of a decoding sequence, to be verified in the next step."""
        seq.drafts, seq.draft_probs = proposal.tokens, proposal.draft_probs

    def plan(self) -> list[Chunk]:
        """Admit queued sequences and return the chunks of the next step.

        Returns an empty list if nothing is running or can be admitted.
        """
        self._admit()
        chunks: list[Chunk] = []
        decoding = self.decoding
        left = min(self._limits.max_outputs, self._limits.max_batch_tokens)
        for behind, seq in zip(reversed(range(len(decoding))), decoding, strict=True):
            if seq.state is SequenceState.RUNNING:
                # keep one output for each decoding sequence that follows; drafts get the rest
                chunk = self._decode_chunk(seq, left - behind)
                if chunk:
                    chunks.append(chunk)
                    left -= len(chunk)
        planned = sum(map(len, chunks))
        budget = min(
            self._budget.prompt_tokens(planned),
            self._limits.max_batch_tokens - planned,
        )
        return chunks + self._prompt_chunks(budget, self._limits.max_outputs - planned)

    def _decode_chunk(self, seq: Sequence, max_tokens: int) -> Chunk | None:
        """Return the chunk with the last token and its drafts, at most `max_tokens` tokens.

        If the KV cache is full, drafts are dropped first, then sequences are preempted. Returns
        None if `seq` itself was preempted.
        """
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
        """Distribute the prefill budget.

        The oldest prompt gets all it needs if that fits in the budget, else half of the budget; the
        rest goes to the prompts with the fewest uncomputed tokens. So a long prompt advances in
        every step without blocking short ones.
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
                chunks.append(Chunk.of_uncomputed(seq, shares[seq.id]))
                outputs_left -= samples
        return chunks

    def _admit(self) -> None:
        """Admit queued sequences in order while they fit.

        A sequence that does not fit blocks those behind it; otherwise a large request would
        starve. Only one that waits for a prefix in flight lets others pass.
        """
        if not len(self.queue) or (self._admission_paused and self._running):
            return
        for seq in self.queue.in_turn(self._clock())[:MAX_ADMISSION_SCAN]:
            if self._is_prefix_in_flight(seq):
                continue
            if not self._admit_with_preemption(seq):
                return

    def _admit_with_preemption(self, seq: Sequence) -> bool:
        """Admit `seq`, preempting sequences of lower priority if necessary; return success.

        Priorities include aging here as well; otherwise a sequence admitted because of its age
        could be preempted right away.
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
        """True if a running sequence is computing a prefix that `seq` can share."""
        if not self._limits.can_rewind:
            return False
        usable = seq.tokens[:-1]
        return any(
            common_prefix_len(other.tokens, usable) - other.num_computed >= MIN_SHARED_TOKENS
            for other in self._running.values()
            if other.num_uncomputed > MIN_SHARED_TOKENS and other.cache_salt == seq.cache_salt
        )

    def _preempt(self, seq: Sequence) -> None:
        """Return a running sequence to the queue; tokens evicted meanwhile are recomputed."""
        del self._running[seq.id]
        self._runner.release(seq, keep=True)
        seq.state, seq.num_computed, seq.drafts, seq.draft_probs = SequenceState.QUEUED, 0, [], ()
        seq.num_preemptions += 1
        self.counters.preemptions += 1
        self.queue.push(seq)

    # -- results ----------------------------------------------------------------------------

    def apply(
        self, chunks: list[Chunk], result: StepResult, step_ms: float, *, is_typical: bool = True
    ) -> list[SequenceOutput]:
        """Apply the results of a step, end finished sequences, and return the new tokens.

        is_typical: step_ms tells what later steps of this size will take.
        """
        now_s = self._clock()
        outputs = []
        decode_tokens = sum(len(chunk) for chunk in chunks if chunk.is_decoding)
        prompt_tokens = sum(map(len, chunks)) - decode_tokens
        for chunk, sampled in zip(chunks, result, strict=True):
            seq = chunk.seq
            self._advance(chunk, len(sampled.tokens))
            if sampled.tokens:
                if seq.first_token_s is None:
                    seq.first_step_ms = step_ms
                outputs.append(self._append_tokens(seq, sampled.tokens, sampled.logprobs, now_s))
            seq.num_decode_steps += chunk.is_decoding
            if chunk.num_drafts:
                accepted = len(outputs[-1].tokens) - 1
                seq.num_drafting_steps += 1
                seq.num_drafted += chunk.num_drafts
                seq.num_accepted += accepted
                self.counters.drafted_tokens += chunk.num_drafts
                self.counters.accepted_tokens += accepted
                seq.used_sampled_drafts |= bool(chunk.draft_probs)
            self.queue.charge(seq, len(chunk), len(sampled.tokens))
            if outputs and outputs[-1].seq is seq and outputs[-1].reason:
                self.end(seq)
        if is_typical:
            self._budget.observe(step_ms, prompt_tokens, decode_tokens)
        self.counters.prompt_tokens += prompt_tokens
        self.counters.drafting_steps += any(chunk.num_drafts for chunk in chunks)
        return outputs

    def preempt_one(self) -> bool:
        """Preempt one sequence after a planned step did not fit in the KV cache.

        Returns False if fewer than two sequences are running.
        """
        if len(self._running) < 2:
            return False
        self._preempt(self.running[-1])
        self._admission_paused = True
        return True

    def _advance(self, chunk: Chunk, num_sampled: int) -> None:
        """Update num_computed; remove rejected draft tokens from the KV cache."""
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
        """Append new tokens, up to the first one that ends the answer."""
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
    """True if the grammar allows no further token."""
    return seq.matcher is not None and seq.matcher.is_done
