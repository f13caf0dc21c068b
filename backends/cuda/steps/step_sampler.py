"""Samples the rows of a step: parameters of the running sequences, grammars, drafts, logprobs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from localgen.backends.cuda.kv.paged_cache import PagedCache
from localgen.backends.cuda.model.batch import ChunkArrays
from localgen.backends.cuda.steps.decode_batch import DecodeBatch
from localgen.backends.cuda.steps.grammar_masks import apply_grammar_masks
from localgen.backends.cuda.steps.logprobs import StepLogprobs, step_logprobs
from localgen.backends.cuda.steps.sampler import (
    DraftedRow,
    SamplingRow,
    draw,
    edits_logits,
    logit_edits,
    with_edits,
)
from localgen.backends.cuda.steps.sampling_slots import SamplingSlots
from localgen.backends.runner.interface import Chunk, SampledTokens, StepResult
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import uses_penalties
from localgen.backends.types import PositionLogprobs


@dataclass(slots=True, eq=False)
class CudaStepTicket:
    """A step in flight.

    tokens: tokens of all output rows, on the host after `done_event`; those of scored rows, which
    are sampled with the others, mean nothing.
    first_rows: first sampled row of each chunk.
    is_plain: one row for each chunk, in their order, of sequences that need nothing but its token.
    logprobs: requested log probabilities, on the host after `done_event`.
    probs_by_row: distribution that a token was sampled from, by row.
    error: the error that prevented the step, raised by collect.
    """

    chunks: Seq[Chunk]
    tokens: Tensor
    first_rows: Seq[int] = ()
    is_plain: bool = False
    logprobs: tuple[StepLogprobs, ...] = ()
    probs_by_row: dict[int, Tensor] = field(default_factory=dict)
    done_event: torch.cuda.Event | None = None
    error: Exception | None = None


class StepSampler:
    """Samples steps of running sequences. token_text: text of a token, for logprobs."""

    def __init__(self, kv_cache: PagedCache, token_text: Callable[[int], str]) -> None:
        self._kv_cache, self._token_text = kv_cache, token_text
        self._slots = SamplingSlots()
        # sequences whose sampling takes more than the parameters in their slots
        self._special: set[Sequence] = set()

    def add(self, seq: Sequence) -> None:
        """Take in a sequence that the KV cache has admitted."""
        self._slots.set(self._kv_cache.slot(seq), seq.params)
        wants_logprobs = seq.params.logprobs is not None
        if wants_logprobs or seq.matcher is not None or edits_logits(seq.params):
            self._special.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self._special.discard(seq)

    def are_plain(self, seqs: Seq[Sequence]) -> bool:
        """True if these sequences need nothing but their tokens."""
        return not self._special or self._special.isdisjoint(seqs)

    def sample_batch(self, batch: DecodeBatch, step: Seq[Chunk], logits: Tensor) -> CudaStepTicket:
        """Launch the sampling of `step`, of this batch. logits: float32 [sequences, vocab]."""
        if not self.are_plain(batch.seqs):
            return self.sample(step, logits, 0)
        settings = self._slots.following_tensors(batch.slots)
        if settings is None:
            positions = batch.positions.astype(np.int64) + 1
            settings = self._slots.tensors(batch.slots, positions, logits.device)
        tokens, _ = draw(logits, settings, (), ())
        return CudaStepTicket(step, tokens, range(len(step)), is_plain=True)

    def sample(self, chunks: Seq[Chunk], logits: Tensor, first_row: int) -> CudaStepTicket:
        """Launch the sampling of these chunks.

        logits: float32 [outputs, vocab], of their rows. first_row: the first of them in the step.
        """
        arrays = ChunkArrays.of(chunks)
        counts = arrays.num_outputs
        ends = np.cumsum(counts)
        num_scored = np.array([chunk.num_scored for chunk in chunks], np.int32)
        first_rows: list[int] = (ends - counts + num_scored + first_row).tolist()
        last_rows: list[int] = (ends - 1).tolist()
        if last_rows[-1] < 0:
            none = torch.empty(0, dtype=torch.int64, device=logits.device)
            return CudaStepTicket(chunks, none, first_rows)
        seqs = [chunk.seq for chunk in chunks]
        slots = np.repeat(self._kv_cache.slots(seqs), counts)
        settings = self._slots.tensors(slots, arrays.output_lengths(), logits.device)
        allowed, is_special = logits, not self.are_plain(seqs)
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

    def results(self, ticket: CudaStepTicket) -> StepResult:
        """The results of a finished step."""
        tokens: list[int] = ticket.tokens.tolist()
        if ticket.is_plain:
            return [SampledTokens((token,)) for token in tokens]
        special = self._special
        return [
            self._accept_drafts(chunk, tokens[row : row + 1 + chunk.num_drafts], ticket, row)
            if chunk.num_drafts or chunk.return_probs or chunk.seq in special
            else SampledTokens((tokens[row],) if chunk.is_sampled else ())
            for chunk, row in zip(ticket.chunks, ticket.first_rows, strict=True)
        ]

    def _accept_drafts(
        self, chunk: Chunk, tokens: list[int], ticket: CudaStepTicket, row: int
    ) -> SampledTokens:
        """Accept leading draft tokens that equal the sampled ones, and the next sampled token."""
        scored: tuple[PositionLogprobs, ...] = ()
        if chunk.num_scored:
            scored = tuple(self._logprobs(ticket, row - chunk.num_scored, chunk.scored_tokens))
        if not chunk.is_sampled:
            return SampledTokens(scored=scored)
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
        logprobs = tuple(self._logprobs(ticket, row, taken))
        return SampledTokens(taken, logprobs, ticket.probs_by_row.get(row), scored)

    def _logprobs(
        self, ticket: CudaStepTicket, row: int, tokens: Seq[int]
    ) -> Generator[PositionLogprobs]:
        """Yield the logprobs of tokens in consecutive rows of the step, if they were requested."""
        for at, token in enumerate(tokens, row):
            for logprobs in ticket.logprobs:
                found = logprobs.for_row(at, token, self._token_text)
                if found is not None:
                    yield found


def joined_tickets(parts: Seq[CudaStepTicket], chunks: Seq[Chunk]) -> CudaStepTicket:
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


def with_host_copies(step: CudaStepTicket, *, spins: bool) -> CudaStepTicket:
    """Return the ticket with its copies to the host started and an event after them.

    spins: wait for the event with a busy core, which notices it sooner.
    """
    if step.tokens.device.type != "cuda":
        return step
    host = _copy_to_host(step.tokens)
    logprobs = tuple(part.transferred(_copy_to_host) for part in step.logprobs)
    done = torch.cuda.Event(blocking=not spins)  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(step.tokens.device))
    return replace(step, tokens=host, logprobs=logprobs, done_event=done)


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
