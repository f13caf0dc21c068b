"""ModelRunner for the CUDA backend."""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from localgen.backends.cuda.embeddings import Pooler, embed_sequences
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, pages_for
from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.batch import ChunkArrays, Int32Array, StepInputs, step_inputs
from localgen.backends.cuda.steps.cuda_graphs import PreviousStepTokens
from localgen.backends.cuda.steps.decode_batch import DecodeBatch
from localgen.backends.cuda.steps.run_ahead import RunAheadStep, is_decoding, next_step_inputs
from localgen.backends.cuda.steps.sampler import UNSUPPORTED_PARAMS
from localgen.backends.cuda.steps.step_sampler import (
    CudaStepTicket,
    StepSampler,
    joined_tickets,
    with_host_copies,
)
from localgen.backends.memory.compute_buffers import cuda_max_outputs
from localgen.backends.runner.decode_step import DecodeStep
from localgen.backends.runner.interface import (
    Chunk,
    EmbedSlice,
    Limits,
    NoRoom,
    PoolUsage,
    StepFailed,
    StepResult,
)
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import MAX_DRAFT_TOKENS


class StepExecutor(Protocol):
    """Computes steps, on one device or on several with tensor parallelism."""

    device: torch.device

    def run(self, inputs: StepInputs, token_source: PreviousStepTokens | None = None) -> Tensor:
        """Logits of the output rows, float32 [outputs, vocab], valid until the next step."""
        ...

    def advance(self, tokens: Tensor, new_pages: Int32Array | None) -> Tensor | None:
        """Compute the next step of the sequences of the last one, which had a row for each.

        Nothing else is copied to the device. Returns the logits as `run` does, or None if `run` is
        needed: the step has no CUDA graph, for example. tokens: int64 [sequences], sampled after
        the last step, on the device. new_pages: int32 [sequences], the page that the token of a
        sequence begins, or -1 if none. None: no token does. All other pages are those of the last
        step.
        """
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


class CudaRunner:
    """Implements ModelRunner, AsyncRunner, TieredRunner and Embedder.

    It owns weights and KV cache of one model.

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
        self._executor = executor
        self._run_ahead_step: RunAheadStep | None = None
        self.kv_cache = kv_cache
        self.limits = replace(limits, runs_ahead=run_ahead)
        self._sampler = StepSampler(kv_cache, token_text)
        self._batch: DecodeBatch | None = None  # of the last step

    def admit(self, seq: Sequence, *, spare: int) -> int:
        self._forget(seq)
        cached = self.kv_cache.admit(seq, spare=spare)
        self._sampler.add(seq)
        return cached

    def num_cached(self, tokens: list[int], cache_salt: str) -> int:
        return self.kv_cache.num_cached(tokens, cache_salt)

    def is_loading(self, seq: Sequence) -> bool:
        return self.kv_cache.is_loading(seq)

    def load_prefix(self, seq: Sequence, until_s: float) -> int:
        return self.kv_cache.load_prefix(seq, until_s)

    def save_next_block(self) -> bool:
        return self.kv_cache.save_next_block()

    def grow(self, seq: Sequence, n: int) -> bool:
        return self.kv_cache.grow(seq, n)

    def rewind(self, seq: Sequence, length: int) -> None:
        self._forget(seq)
        self.kv_cache.rewind(seq, length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        self._forget(seq)
        self._sampler.remove(seq)
        self.kv_cache.release(seq, keep=keep)

    def _forget(self, seq: Sequence) -> None:
        """Forget what later steps would take from earlier ones of this sequence."""
        self._batch = None
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
            self._run_ahead_step = self._batch = None
            torch.cuda.empty_cache()
            return CudaStepTicket(chunks, torch.empty(0, dtype=torch.int64), error=NoRoom())

    def _launch(self, chunks: Seq[Chunk]) -> CudaStepTicket:
        """Sample the chunks that were launched ahead, compute the others, and launch ahead again.

        The rows of the chunks that were launched ahead come first, then those of the others.
        """
        ahead, self._run_ahead_step = self._run_ahead_step, None
        covered: Seq[Chunk] = ()
        rest = chunks
        if ahead is not None:
            covered, rest = ahead.split(chunks)
        self._batch = batch = self._batch_of(covered)
        parts = []
        if ahead is not None and covered:  # first: the next step overwrites its logits
            if batch is not None:
                parts.append(self._sampler.sample_batch(batch, covered, ahead.logits))
            else:
                parts.append(self._sampler.sample(covered, ahead.logits_of(covered), 0))
        if rest:
            parts.append(self._compute(rest, len(covered)))
        step = parts[0] if len(parts) == 1 else joined_tickets(parts, chunks)
        # where the next step is launched, waking up late costs nothing, and a core need not spin
        ticket = with_host_copies(step, spins=not self.limits.runs_ahead)
        if self.limits.runs_ahead:
            # without memory for it, the next step is launched when the scheduler plans it
            with suppress(torch.OutOfMemoryError):
                if batch is None or batch.steps_left < 0:
                    self._launch_run_ahead(step)
                elif ahead is not None and batch.grow(self.kv_cache):
                    self._launch_batch_ahead(step.tokens, batch, ahead)
        return ticket

    def _batch_of(self, chunks: Seq[Chunk]) -> DecodeBatch | None:
        """Return the batch of a decode step, that of the last one if it follows it."""
        if not isinstance(chunks, DecodeStep):
            return None
        if self._batch is not None and self._batch.move_to(chunks):
            return self._batch
        return DecodeBatch.of(chunks, self.kv_cache)

    def _compute(self, chunks: Seq[Chunk], first_row: int) -> CudaStepTicket:
        """Launch these chunks alone. first_row: their first row in the whole step."""
        self.kv_cache.copy_pending(self._executor.copy_pages)
        arrays = ChunkArrays.of(chunks)
        slots = self.kv_cache.slots([chunk.seq for chunk in chunks])
        tables = self.kv_cache.page_tables(slots, pages_for(int(arrays.ends.max())))
        logits = self._executor.run(step_inputs(chunks, arrays, tables))
        return self._sampler.sample(chunks, logits, first_row)

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
        seqs = tuple([chunk.seq for chunk in going])
        self.kv_cache.copy_pending(self._executor.copy_pages)
        page_tables = partial(self.kv_cache.page_tables, self.kv_cache.slots(seqs))
        inputs = next_step_inputs([chunk.start for chunk in going], page_tables, rows)
        logits = self._executor.run(inputs, PreviousStepTokens(step.tokens))
        self._run_ahead_step = RunAheadStep(
            logits, seqs, inputs.positions.tolist(), self.kv_cache.tables_version
        )

    def _launch_batch_ahead(self, tokens: Tensor, batch: DecodeBatch, ahead: RunAheadStep) -> None:
        """Launch the forward pass of the batch's next step, which has pages.

        tokens: sampled from `ahead`, whose inputs the executor may still have on the device.
        """
        self.kv_cache.copy_pending(self._executor.copy_pages)
        version, logits = self.kv_cache.tables_version, None
        if ahead.tables_version == version:
            logits = self._executor.advance(tokens, batch.new_pages(self.kv_cache))
        if logits is None:
            page_tables = partial(self.kv_cache.page_tables, batch.slots)
            inputs = next_step_inputs(batch.positions, page_tables, range(len(batch.seqs)))
            logits = self._executor.run(inputs, PreviousStepTokens(tokens))
        positions = (batch.positions + 1).tolist()
        self._run_ahead_step = RunAheadStep(logits, batch.seqs, positions, version)

    def collect(self, ticket: CudaStepTicket) -> StepResult:
        if ticket.error is not None:
            raise ticket.error
        try:
            if ticket.done_event is not None:
                ticket.done_event.synchronize()
        except RuntimeError as error:
            raise _step_failed(error) from error
        return self._sampler.results(ticket)

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

    def embed(
        self, inputs: list[list[int]], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        return embed_sequences(self._executor, self.kv_cache, self._pooler, inputs, max_tokens)

    def close(self) -> None:
        self._run_ahead_step = self._batch = None
        self._executor.close()


def _step_failed(error: RuntimeError) -> StepFailed:
    return StepFailed(f"the GPU failed to compute a step: {error}")


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
        page_tokens=PAGE_TOKENS,
        unsupported=UNSUPPORTED_PARAMS,
        can_sample_drafts=True,
    )
