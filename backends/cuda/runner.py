"""ModelRunner for the CUDA backend."""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from localgen.backends.cuda.embeddings import Pooler, embed_sequences
from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.batch import ChunkArrays, StepInputs, step_inputs
from localgen.backends.cuda.steps.cuda_graphs import PreviousStepTokens
from localgen.backends.cuda.steps.grammar_masks import apply_grammar_masks
from localgen.backends.cuda.steps.logprobs import StepLogprobs, step_logprobs
from localgen.backends.cuda.steps.run_ahead import RunAheadStep, is_decoding, next_step_inputs
from localgen.backends.cuda.steps.sampler import (
    UNSUPPORTED_PARAMS,
    DraftedRow,
    SamplingRow,
    draw,
    edits_logits,
    logit_edits,
    with_edits,
)
from localgen.backends.cuda.steps.sampling_slots import SamplingSlots
from localgen.backends.memory.compute_buffers import cuda_max_outputs
from localgen.backends.runner.interface import (
    Chunk,
    EmbedSlice,
    Limits,
    NoRoom,
    PoolUsage,
    SampledTokens,
    StepFailed,
    StepResult,
)
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import uses_penalties
from localgen.backends.types import MAX_DRAFT_TOKENS


class StepExecutor(Protocol):
    """Computes steps, on one device or on several with tensor parallelism."""

    device: torch.device

    def run(self, inputs: StepInputs, token_source: PreviousStepTokens | None = None) -> Tensor:
        """Logits of the output rows, float32 [outputs, vocab], valid until the next step."""
        ...

    def hidden_states(self, inputs: StepInputs) -> Tensor:
        """Hidden states of the output rows after the final norm, [outputs, hidden]."""
        ...

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages of the KV cache, given as (source, target)."""
        ...

    def capture_next(self) -> bool:
        """Capture a CUDA graph for steps that ran without one; False if none is missing."""
        ...

    @property
    def is_warming_up(self) -> bool:
        """The last step took longer than later ones of its shape, which will have a CUDA graph."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class CudaStepTicket:
    """A step in flight.

    tokens: tokens of all sampled rows, on the host after `done_event`.
    first_rows: first sampled row of each chunk.
    logprobs: requested log probabilities, on the host after `done_event`.
    probs_by_row: distribution that a token was sampled from, by row.
    error: the error that prevented the step, raised by collect.
    """

    chunks: Seq[Chunk]
    tokens: Tensor
    first_rows: list[int] = field(default_factory=list)
    logprobs: tuple[StepLogprobs, ...] = ()
    probs_by_row: dict[int, Tensor] = field(default_factory=dict)
    done_event: torch.cuda.Event | None = None
    error: Exception | None = None


class CudaRunner:
    """Implements ModelRunner, AsyncRunner and Embedder; owns weights and KV cache of one model.

    token_text: text of a token, for logprobs.
    run_ahead: launch decode steps before they are requested.
    pooler: pools embeddings.
    """

    def __init__(
        self,
        executor: StepExecutor,
        kv_cache: PagedCache,
        limits: Limits,
        token_text: Callable[[int], str],
        *,
        run_ahead: bool,
        pooler: Pooler,
    ) -> None:
        self._pooler = pooler
        self._executor, self._token_text = executor, token_text
        self._run_ahead_step: RunAheadStep | None = None
        self.kv_cache = kv_cache
        self.limits = replace(limits, runs_ahead=run_ahead)
        self._sampling_slots = SamplingSlots()
        # sequences whose sampling takes more than the parameters in their slots
        self._special: set[Sequence] = set()

    def admit(self, seq: Sequence, *, spare: int) -> int:
        self._invalidate_run_ahead(seq)
        cached = self.kv_cache.admit(seq, spare=spare)
        self._sampling_slots.set(self.kv_cache.slot(seq), seq.params)
        wants_logprobs = seq.params.logprobs is not None
        if wants_logprobs or seq.matcher is not None or edits_logits(seq.params):
            self._special.add(seq)
        return cached

    def grow(self, seq: Sequence, n: int) -> bool:
        return self.kv_cache.grow(seq, n)

    def rewind(self, seq: Sequence, length: int) -> None:
        self._invalidate_run_ahead(seq)
        self.kv_cache.rewind(seq, length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        self._invalidate_run_ahead(seq)
        self._special.discard(seq)
        self.kv_cache.release(seq, keep=keep)

    def _invalidate_run_ahead(self, seq: Sequence) -> None:
        if self._run_ahead_step is not None:
            self._run_ahead_step.invalidate(seq)

    def usage(self) -> PoolUsage:
        return self.kv_cache.usage()

    def launch(self, chunks: Seq[Chunk]) -> CudaStepTicket:
        """Start a step; on a GPU, returns before it has finished."""
        try:
            return self._launch(chunks)
        except torch.OutOfMemoryError:
            # no working memory left for this step: the scheduler has to preempt a sequence
            self._run_ahead_step = None
            torch.cuda.empty_cache()
            return CudaStepTicket(chunks, torch.empty(0, dtype=torch.int64), error=NoRoom())

    def _launch(self, chunks: Seq[Chunk]) -> CudaStepTicket:
        """Sample the chunks that were launched ahead, compute the others, and launch ahead again.

        The rows of the chunks that were launched ahead come first, then those of the others.
        """
        ahead, self._run_ahead_step = self._run_ahead_step, None
        covered: list[Chunk] = []
        rest: Seq[Chunk] = chunks
        parts = []
        if ahead is not None:
            covered, rest = ahead.split(chunks)
        if ahead is not None and covered:  # first: the next step overwrites its logits
            parts.append(
                self._sample(covered, ChunkArrays.of(covered), ahead.logits_of(covered), 0)
            )
        if rest:
            parts.append(self._compute(rest, len(covered)))
        step = parts[0] if len(parts) == 1 else _joined(parts, chunks)
        ticket = self._with_host_copies(step)
        if self.limits.runs_ahead:
            # without memory for it, the next step is launched when the scheduler plans it
            with suppress(torch.OutOfMemoryError):
                self._launch_run_ahead(step)
        return ticket

    def _compute(self, chunks: Seq[Chunk], first_row: int) -> CudaStepTicket:
        """Launch these chunks alone. first_row: their first row in the whole step."""
        self.kv_cache.copy_pending(self._executor.copy_pages)
        arrays = ChunkArrays.of(chunks)
        slots = self.kv_cache.slots([chunk.seq for chunk in chunks])
        tables = self.kv_cache.page_tables(slots, pages_for(int(arrays.ends.max())))
        logits = self._executor.run(step_inputs(chunks, arrays, tables))
        return self._sample(chunks, arrays, logits, first_row)

    def _sample(
        self, chunks: Seq[Chunk], arrays: ChunkArrays, logits: Tensor, first_row: int
    ) -> CudaStepTicket:
        """Launch the sampling of these chunks. logits: float32 [sampled, vocab], of their rows."""
        counts = arrays.num_outputs
        ends = np.cumsum(counts)
        first_rows: list[int] = (ends - counts + first_row).tolist()
        last_rows: list[int] = (ends - 1).tolist()
        if last_rows[-1] < 0:
            none = torch.empty(0, dtype=torch.int64, device=logits.device)
            return CudaStepTicket(chunks, none, first_rows)
        slots = np.repeat(self.kv_cache.slots([chunk.seq for chunk in chunks]), counts)
        settings = self._sampling_slots.tensors(slots, arrays.output_lengths(), logits.device)
        allowed = logits
        is_special = bool(self._special) and not self._special.isdisjoint(
            [chunk.seq for chunk in chunks]
        )
        if is_special:
            allowed = apply_grammar_masks(chunks, logits)
            settings = with_edits(settings, logit_edits(_edited_rows(chunks, last_rows)))
        drafted = [
            DraftedRow(last - chunk.num_drafts + at, chunk.tokens[at - chunk.num_drafts], q)
            for chunk, last in zip(chunks, last_rows, strict=True)
            if chunk.draft_probs
            for at, q in enumerate(chunk.draft_probs)
        ]
        prob_rows = [
            last for chunk, last in zip(chunks, last_rows, strict=True) if chunk.return_probs
        ]
        tokens, probs = draw(allowed, settings, drafted, prob_rows)
        logprobs = step_logprobs(chunks, logits, tokens, first_row) if is_special else None
        return CudaStepTicket(
            chunks,
            tokens,
            first_rows,
            logprobs=() if logprobs is None else (logprobs,),
            probs_by_row={first_row + row: q for row, q in probs.items()},
        )

    def _with_host_copies(self, step: CudaStepTicket) -> CudaStepTicket:
        """Return the ticket with its copies to the host started and an event after them."""
        if step.tokens.device.type != "cuda":
            return step
        host = _copy_to_host(step.tokens)
        logprobs = tuple(part.transferred(_copy_to_host) for part in step.logprobs)
        # where the next step is launched, waking up late costs nothing, and a core need not spin
        done = torch.cuda.Event(blocking=self.limits.runs_ahead)  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(step.tokens.device))
        return replace(step, tokens=host, logprobs=logprobs, done_event=done)

    def _launch_run_ahead(self, step: CudaStepTicket) -> None:
        """Launch the forward pass of the next step, if all that go on decode one token."""
        going: list[Chunk] = []
        rows: list[int] = []
        for chunk, row in zip(step.chunks, step.first_rows, strict=True):
            if chunk.start + 2 > chunk.seq.max_len:
                continue  # this is its last token
            if not is_decoding(chunk) or not self.kv_cache.grow(chunk.seq, 2):
                return
            going.append(chunk)
            rows.append(row)
        if not going:
            return
        seqs = [chunk.seq for chunk in going]
        self.kv_cache.copy_pending(self._executor.copy_pages)
        page_tables = partial(self.kv_cache.page_tables, self.kv_cache.slots(seqs))
        inputs = next_step_inputs(going, page_tables, rows)
        logits = self._executor.run(inputs, PreviousStepTokens(step.tokens))
        positions = dict(zip(seqs, inputs.positions.tolist(), strict=True))
        self._run_ahead_step = RunAheadStep(logits, positions)

    def collect(self, ticket: CudaStepTicket) -> StepResult:
        if ticket.error is not None:
            raise ticket.error
        try:
            if ticket.done_event is not None:
                ticket.done_event.synchronize()
        except RuntimeError as error:
            raise _step_failed(error) from error
        tokens: list[int] = ticket.tokens.tolist()
        special = self._special
        return [
            self._accept_drafts(chunk, tokens[row : row + 1 + chunk.num_drafts], ticket, row)
            if chunk.num_drafts or chunk.return_probs or chunk.seq in special
            else SampledTokens((tokens[row],) if chunk.is_sampled else ())
            for chunk, row in zip(ticket.chunks, ticket.first_rows, strict=True)
        ]

    def synchronize(self) -> None:
        device = self._executor.device
        if self._run_ahead_step is None or device.type == "cpu":
            return
        try:
            torch.cuda.current_stream(device).synchronize()
        except RuntimeError as error:
            raise _step_failed(error) from error

    def prepare_while_idle(self) -> bool:
        return self._executor.capture_next()

    @property
    def is_warming_up(self) -> bool:
        return self._executor.is_warming_up

    def _accept_drafts(
        self, chunk: Chunk, tokens: list[int], ticket: CudaStepTicket, row: int
    ) -> SampledTokens:
        """Accept leading draft tokens that equal the sampled ones, and the next sampled token."""
        if not chunk.is_sampled:
            return SampledTokens()
        drafts = chunk.tokens[len(chunk) - chunk.num_drafts :]
        right = next(
            (i for i, (a, b) in enumerate(zip(drafts, tokens, strict=False)) if a != b), len(drafts)
        )
        taken = tuple(tokens[: right + 1])
        if chunk.seq.matcher is not None:
            for count, token in enumerate(taken, 1):
                chunk.seq.matcher.accept(token)
                if chunk.seq.matcher.is_done:
                    taken = taken[:count]
                    break
        found = (
            logprobs.for_row(row + i, token, self._token_text)
            for i, token in enumerate(taken)
            for logprobs in ticket.logprobs
        )
        return SampledTokens(
            taken,
            tuple(each for each in found if each is not None),
            ticket.probs_by_row.get(row),
        )

    def embed(
        self, inputs: list[list[int]], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        return embed_sequences(self._executor, self.kv_cache, self._pooler, inputs, max_tokens)

    def close(self) -> None:
        self._run_ahead_step = None
        self._executor.close()


def _joined(parts: Seq[CudaStepTicket], chunks: Seq[Chunk]) -> CudaStepTicket:
    """One ticket for the rows of all parts. chunks: those of the parts, as they were requested."""
    first_rows = {
        chunk.seq: row
        for part in parts
        for chunk, row in zip(part.chunks, part.first_rows, strict=True)
    }
    return CudaStepTicket(
        chunks,
        torch.cat([part.tokens for part in parts]),
        [first_rows[chunk.seq] for chunk in chunks],
        logprobs=tuple(found for part in parts for found in part.logprobs),
        probs_by_row={row: q for part in parts for row, q in part.probs_by_row.items()},
    )


def _step_failed(error: RuntimeError) -> StepFailed:
    return StepFailed(f"the GPU failed to compute a step: {error}")


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Start a copy to pinned memory; it is complete once the stream has reached it."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _edited_rows(chunks: Seq[Chunk], last_rows: Seq[int]) -> Generator[tuple[int, SamplingRow]]:
    """Yield the rows of the chunks whose logits may have edits, with their numbers.

    last_rows: the last row of each chunk.
    """
    for chunk, last in zip(chunks, last_rows, strict=True):
        seq, end = chunk.seq, chunk.start + len(chunk)
        if not chunk.is_sampled or not edits_logits(seq.params):
            continue
        known: Seq[int] = range(end)  # only the length is used
        if uses_penalties(seq.params):
            known = seq.tokens[: chunk.start] + chunk.tokens
        for ahead in range(chunk.num_drafts + 1):
            # a grammar handles banned tokens itself: it may allow nothing but the end token
            banned = frozenset() if seq.matcher else seq.banned_tokens(ahead)
            length = end - chunk.num_drafts + ahead
            row = SamplingRow(seq.params, known[:length], banned)
            yield last - chunk.num_drafts + ahead, row


def cuda_limits(
    *, max_seqs: int, max_batch_tokens: int, max_len: int, kv_tokens: int, prefix_cache: bool
) -> Limits:
    """Limits of a CudaRunner of these sizes."""
    return Limits(
        max_seqs=max_seqs,
        max_batch_tokens=max_batch_tokens,
        max_outputs=cuda_max_outputs(max_seqs, MAX_DRAFT_TOKENS),
        max_len=max_len,
        kv_tokens=kv_tokens,
        can_rewind=prefix_cache,
        unsupported=UNSUPPORTED_PARAMS,
        can_sample_drafts=True,
    )
