"""The scheduler: admission, ragged batches of chunks, preemption, end of sequences.

There are no separate prefill and decode modes. Every sequence has uncomputed tokens, and a step
computes some of them: decoding sequences first, then prefill with the remaining token budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from itertools import repeat
from typing import NamedTuple

from localgen.backends.engine.background import is_background
from localgen.backends.engine.counters import SchedulerCounters
from localgen.backends.engine.fair_queue import FairQueue, effective_priority
from localgen.backends.engine.prefix_tiers import PrefixTiers
from localgen.backends.engine.prompt_chunks import is_prefix_in_flight, prompt_chunks
from localgen.backends.engine.running_sequences import RunningSequences, has_drafts
from localgen.backends.engine.speculation.drafter import DraftProposal
from localgen.backends.engine.token_budget import TokenBudget
from localgen.backends.errors import LocalgenError, QueueFull
from localgen.backends.runner.decode_step import DecodeStep
from localgen.backends.runner.interface import Chunk, ModelRunner, NoRoom, SampledTokens, StepResult
from localgen.backends.runner.sequence import Sequence, SequenceState
from localgen.backends.types import PositionLogprobs, merged_restored

# maximum number of queued sequences considered for admission in one step
MAX_ADMISSION_SCAN = 64
# tokens kept free for each running sequence at admission, so that none is preempted right away
FREE_TOKENS_PER_SEQ = 32
# admission is tried again after this time where nothing but ages and cached prefixes changed
ADMISSION_INTERVAL_S = 0.1


class SequenceOutput(NamedTuple):
    """New tokens of one sequence. reason: finish reason (stop or length), None while it runs."""

    seq: Sequence
    tokens: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    reason: str | None = None


class Scheduler:
    """Owns all sequences. A step is in flight between plan and apply: no other call is allowed."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        budget: TokenBudget,
        max_queue: int,
        tiers: PrefixTiers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner, self._tiers = runner, tiers
        self._limits = runner.limits
        self._budget = budget
        self._max_queue = max_queue
        self._clock = clock
        self._running = RunningSequences()
        self._decode_seqs: tuple[Sequence, ...] = ()  # of the last DecodeStep
        self._rejected: list[tuple[Sequence, LocalgenError]] = []
        # set when a planned step did not fit; cleared when a sequence ends
        self._admission_paused = False
        self._next_admission_s = 0.0  # the queue is blocked until then
        self.queue = FairQueue()
        self.counters = SchedulerCounters()

    @property
    def running(self) -> list[Sequence]:
        """Admitted sequences, highest priority first, then oldest; the last is preempted first."""
        return list(self._running)

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
        self._next_admission_s = 0.0

    def end(self, seq: Sequence) -> None:
        """End a queued or running sequence."""
        if seq.state is SequenceState.RUNNING:
            self._stop_running(seq)
            self._admission_paused = False
        else:
            self.queue.remove(seq)
        self.queue.leave(seq)
        self._next_admission_s = 0.0
        seq.state = SequenceState.ENDED

    def append_tokens(self, seq: Sequence, tokens: list[int], note: str) -> SequenceOutput | None:
        """Append tokens to the answer without sampling them; they are computed like a prompt.

        note: for the user. Returns None, and appends none, unless the grammar allows them all and
        one more token fits behind them. Must not be called while a step is in flight.
        """
        if len(seq.tokens) + len(tokens) >= seq.max_len:
            return None
        if seq.matcher is not None and not seq.matcher.accept_all(tokens):
            return None
        seq.tokens += tokens
        seq.notes = (*seq.notes, note)
        self.counters.generated_tokens += len(tokens)
        if seq.state is SequenceState.RUNNING:
            if self._runner.grow(seq, seq.num_uncomputed):
                self._running.prefilling.add(seq)
            else:
                self._preempt(seq)
        return SequenceOutput(seq, tuple(tokens))

    # -- planning ---------------------------------------------------------------------------

    @property
    def decoding(self) -> list[Sequence]:
        """Sequences that decode in the next step: see RunningSequences.decoding."""
        return self._running.decoding

    @property
    def is_prefilling(self) -> bool:
        """True if one of them computes a prompt: see RunningSequences.is_prefilling."""
        return self._running.is_prefilling

    def set_drafts(self, seq: Sequence, proposal: DraftProposal) -> None:
        """Set the draft tokens of a decoding sequence, to be verified in the next step."""
        seq.drafts, seq.draft_probs = proposal.tokens, proposal.draft_probs

    def plan(self) -> Seq[Chunk]:
        """Admit queued sequences and return the chunks of the next step.

        Returns an empty list if nothing is running or can be admitted, or all that run are loading.
        """
        self._admit()
        self._load_prefix()
        for _ in range(self._running.turns.num_sets):
            active = self._running.active(self._budget)
            if chunks := self._plan_decode_step(active) or self._plan_chunks(active):
                return chunks
            self._running.turns.pass_on()  # all whose turn it was are loading
        return []

    def take_rejected(self) -> list[tuple[Sequence, LocalgenError]]:
        """Sequences that ended because they could not be admitted, once, and the reasons."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def _plan_decode_step(self, active: Collection[Sequence]) -> DecodeStep | None:
        """Return the next step if all sequences decode, without drafts, and there is room."""
        is_prefilling = self._running.prefilling and not self._running.prefilling.isdisjoint(active)
        if not active or is_prefilling or any(map(has_drafts, active)):
            return None
        if not all(map(self._runner.grow, active, repeat(1))):
            return None
        if self._decode_seqs != (seqs := tuple(active)):
            self._decode_seqs = seqs
        return DecodeStep(self._decode_seqs)

    def _plan_chunks(self, active: Collection[Sequence]) -> list[Chunk]:
        chunks: list[Chunk] = []
        decoding = [seq for seq in active if seq not in self._running.prefilling]
        left = min(self._limits.max_outputs, self._limits.max_batch_tokens)
        for behind, seq in zip(reversed(range(len(decoding))), decoding, strict=True):
            if seq.state is SequenceState.RUNNING:
                # keep one output for each decoding sequence that follows; drafts get the rest
                chunk = self._decode_chunk(seq, left - behind)
                if chunk:
                    chunks.append(chunk)
                    left -= len(chunk.tokens)
        planned = sum([len(chunk.tokens) for chunk in chunks])
        # those who wait for their turn wait for this step, too
        budget = -(-self._prompt_budget(planned) // max(1, self._running.turns.num_sets))
        budget = min(budget, self._limits.max_batch_tokens - planned)
        prefilling = [
            seq for seq in active if seq in self._running.prefilling and not self._is_loading(seq)
        ]
        return chunks + prompt_chunks(prefilling, budget, self._limits.max_outputs - planned)

    def _prompt_budget(self, decode_tokens: int) -> int:
        """The most prompt tokens of a step with this many other tokens."""
        if not self._running.foreground:
            return self._budget.background_tokens(decode_tokens)
        if not self._running.is_prefilling:
            return self._budget.tokens_beside(decode_tokens)
        return self._budget.prompt_tokens(decode_tokens)

    def _decode_chunk(self, seq: Sequence, max_tokens: int) -> Chunk | None:
        """Return the chunk with the last token and its drafts, at most `max_tokens` tokens.

        If the KV cache is full, drafts are dropped first, then sequences are preempted. Returns
        None if `seq` itself was preempted.
        """
        drafts = seq.drafts
        if drafts:
            drafts = drafts[: max(0, min(max_tokens, seq.max_len - len(seq.tokens)) - 1)]
        while not self._runner.grow(seq, 1 + len(drafts)):
            if drafts:
                drafts = []
                continue
            victim = self._running.last
            self._preempt(victim)
            if victim is seq:
                return None
        return Chunk(
            seq=seq,
            start=seq.num_computed,
            tokens=[seq.tokens[-1], *drafts],
            num_drafts=len(drafts),
            is_sampled=True,
            draft_probs=seq.draft_probs[: len(drafts)] if drafts else (),
        )

    def _admit(self) -> None:
        """Admit queued sequences in order while they fit.

        A sequence that does not fit blocks those behind it; otherwise a large request would
        starve. Only one that waits for a prefix in flight lets others pass.
        """
        if not len(self.queue) or (self._admission_paused and self._running):
            return
        now_s, has_passed = self._clock(), False
        if now_s < self._next_admission_s and self._running:
            return
        for seq in self.queue.in_turn(now_s)[:MAX_ADMISSION_SCAN]:
            if self._limits.can_rewind and is_prefix_in_flight(seq, self._running.prefilling):
                has_passed = True
                continue
            if not self._admit_with_preemption(seq):
                if not has_passed:
                    self._next_admission_s = now_s + ADMISSION_INTERVAL_S
                return

    def _admit_with_preemption(self, seq: Sequence) -> bool:
        """Admit `seq`, preempting sequences of lower priority if necessary; return success.

        Priorities include aging here as well; otherwise a sequence admitted because of its age
        could be preempted right away.
        """
        now_s = self._clock()
        while not self._try_admit(seq):
            victim = min(
                self._running,
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
        if seq.prefix_break and seq.admitted_s is None:
            earlier = seq.prefix_break.earlier
            seq.num_earlier_cached = self._runner.num_cached(earlier, seq.cache_salt)
        try:
            cached = self._runner.admit(seq, spare=spare)
        except NoRoom:
            return False
        except LocalgenError as error:
            self.end(seq)
            self._rejected.append((seq, error))
            return True
        self.queue.remove(seq)
        seq.state, seq.num_computed = SequenceState.RUNNING, cached
        self._running.add(seq)
        if seq.admitted_s is None:
            seq.admitted_s = started_s
            self.counters.prefix_queries += seq.num_prompt
            self._count_cached(seq, cached)
        if self._tiers is not None:
            self._tiers.admit(seq)
        return True

    def _count_cached(self, seq: Sequence, num_tokens: int) -> None:
        """Add prompt tokens to those that came from the prefix cache or the store."""
        assert seq.admitted_s is not None
        seq.num_cached += num_tokens
        seq.cached_ms = (self._clock() - seq.admitted_s) * 1e3
        self.counters.prefix_hits += num_tokens

    def _is_loading(self, seq: Sequence) -> bool:
        return self._tiers is not None and self._tiers.is_loading(seq)

    def _load_prefix(self) -> None:
        """Load a slice of an admitted prompt from the store."""
        loaded = self._tiers.load(len(self._running)) if self._tiers is not None else None
        if loaded is None:
            return
        seq, num_loaded, restored = loaded
        if not seq.num_preemptions:
            seq.restored = merged_restored((*seq.restored, *restored))
            self._count_cached(seq, num_loaded - seq.num_computed)
        seq.num_computed = num_loaded
        if seq.is_decoding and seq.first_token_s is not None and not self._is_loading(seq):
            self._running.prefilling.discard(seq)

    def _preempt(self, seq: Sequence) -> None:
        """Return a running sequence to the queue; tokens that are not cached are recomputed."""
        self._stop_running(seq)
        seq.state, seq.num_computed, seq.drafts, seq.draft_probs = SequenceState.QUEUED, 0, [], ()
        seq.num_preemptions += 1
        self.counters.preemptions += 1
        self.queue.push(seq)
        self._next_admission_s = 0.0

    def _stop_running(self, seq: Sequence) -> None:
        """Free the KV cache of a running sequence; unless in the background, it leaves a prefix."""
        self._running.remove(seq)
        if self._tiers is not None:
            self._tiers.release(seq)
        self._runner.release(seq, keep=not is_background(seq))

    # -- results ----------------------------------------------------------------------------

    def apply(
        self, chunks: Seq[Chunk], result: StepResult, step_ms: float, *, is_typical: bool = True
    ) -> list[SequenceOutput]:
        """Apply the results of a step, end finished sequences, and return the new tokens.

        is_typical: step_ms tells what later steps of this size will take.
        """
        self._running.turns.end_step(step_ms)
        if not isinstance(chunks, DecodeStep):
            return self._apply_chunks(chunks, result, step_ms, is_typical)
        outputs, now_s = [], self._clock()
        for seq, sampled in zip(chunks.seqs, result, strict=True):
            seq.num_decode_steps += 1
            seq.num_computed += 1
            output = self._append_tokens(seq, sampled, now_s)
            outputs.append(output)
            self.queue.charge(seq, 1, 1)
            if output.reason:
                self.end(seq)
        if is_typical:
            self._budget.observe(step_ms, 0, len(outputs))
        self.counters.generated_tokens += len(outputs)
        return outputs

    def _apply_chunks(
        self, chunks: Seq[Chunk], result: StepResult, step_ms: float, is_typical: bool
    ) -> list[SequenceOutput]:
        now_s = self._clock()
        outputs: list[SequenceOutput] = []
        num_tokens = decode_tokens = num_drafts = 0
        for chunk, sampled in zip(chunks, result, strict=True):
            seq, size = chunk.seq, len(chunk.tokens)
            num_tokens += size
            if chunk.is_decoding:
                decode_tokens += size
                seq.num_decode_steps += 1
            self._advance(chunk, len(sampled.tokens))
            seq.scored += sampled.scored
            output = None
            if sampled.tokens:
                if seq.first_token_s is None:
                    seq.first_token_s, seq.first_step_ms = now_s, step_ms
                output = self._append_tokens(seq, sampled, now_s)
                outputs.append(output)
                if chunk.num_drafts:
                    num_drafts += chunk.num_drafts
                    self._count_drafts(chunk, len(output.tokens) - 1)
            self.queue.charge(seq, size, len(sampled.tokens))
            if seq.is_decoding and seq.first_token_s is not None:
                self._running.prefilling.discard(seq)
            if output and output.reason:
                self.end(seq)
        if is_typical:
            self._budget.observe(step_ms, num_tokens - decode_tokens, decode_tokens)
        self.counters.prompt_tokens += num_tokens - decode_tokens
        self.counters.generated_tokens += sum([len(output.tokens) for output in outputs])
        self.counters.drafting_steps += num_drafts > 0
        return outputs

    def _count_drafts(self, chunk: Chunk, accepted: int) -> None:
        seq = chunk.seq
        seq.num_drafting_steps += 1
        seq.num_drafted += chunk.num_drafts
        seq.num_accepted += accepted
        seq.used_sampled_drafts |= bool(chunk.draft_probs)
        self.counters.drafted_tokens += chunk.num_drafts
        self.counters.accepted_tokens += accepted

    def preempt_one(self) -> bool:
        """Preempt one sequence after a planned step did not fit in the KV cache.

        Returns False if fewer than two sequences are running.
        """
        if len(self._running) < 2:
            return False
        self._preempt(self._running.last)
        self._admission_paused = True
        return True

    def _advance(self, chunk: Chunk, num_sampled: int) -> None:
        """Update num_computed; remove rejected draft tokens from the KV cache."""
        seq = chunk.seq
        seq.num_computed = chunk.start + len(chunk.tokens)
        if chunk.num_drafts >= num_sampled > 0:  # else all were accepted
            seq.num_computed -= chunk.num_drafts + 1 - num_sampled
            self._runner.rewind(seq, seq.num_computed)
        if seq.drafts:
            seq.drafts, seq.draft_probs = [], ()

    def _append_tokens(self, seq: Sequence, sampled: SampledTokens, now_s: float) -> SequenceOutput:
        """Append new tokens, up to the first one that ends the answer."""
        reason = "length" if seq.max_len == seq.num_prompt else None  # no answer requested
        taken, count = 0, len(sampled.tokens)
        for token in () if reason else sampled.tokens:
            seq.tokens.append(token)
            taken += 1
            if token in seq.stop_ids:
                reason = "stop"
            elif seq.matcher is not None and taken == count and seq.matcher.is_done:
                reason = "stop"  # the grammar allows no further token
            elif len(seq.tokens) >= seq.max_len:
                reason = "length"
            if reason:
                break
        seq.last_token_s = now_s
        if taken < count:
            seq.num_computed = len(seq.tokens) - 1
        return SequenceOutput(seq, sampled.tokens[:taken], sampled.logprobs[:taken], reason)
