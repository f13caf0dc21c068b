"""ModelRunner over the decoder and its paged cache."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from localgen.backends.cuda.batch import build
from localgen.backends.cuda.cache import PagedCache
from localgen.backends.cuda.decoder import Decoder, KVCache
from localgen.backends.cuda.sampler import UNSUPPORTED, Row, choose, logprobs
from localgen.backends.engine.runner import Chunk, Limits, PoolUsage, Sampled, StepResult
from localgen.backends.engine.sequence import Sequence
from localgen.backends.types import PositionLogprobs


@dataclass(frozen=True, slots=True)
class Ticket:
    """A step in flight: its logits, float32 [outputs, vocab], and the token of each row."""

    chunks: Seq[Chunk]
    logits: Tensor
    tokens: Tensor


class CudaRunner:
    """Owns the weights and the cache of one model. See ModelRunner for the calls.

    text: what a token says, for logprobs.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        room: PagedCache,
        limits: Limits,
        text: Callable[[int], str],
    ) -> None:
        self._decoder, self._cache, self._text = decoder, cache, text
        self._device = cache.layers[0].keys.device
        self.room = room
        self.limits = limits

    def admit(self, seq: Sequence, *, spare: int) -> int:
        """As ModelRunner.admit."""
        return self.room.admit(seq, spare=spare)

    def grow(self, seq: Sequence, n: int) -> bool:
        """As ModelRunner.grow."""
        return self.room.grow(seq, n)

    def rewind(self, seq: Sequence, length: int) -> None:
        """As ModelRunner.rewind."""
        self.room.rewind(seq, length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """As ModelRunner.release."""
        self.room.release(seq, keep=keep)

    def usage(self) -> PoolUsage:
        """As ModelRunner.usage."""
        return self.room.usage()

    def launch(self, chunks: Seq[Chunk]) -> Ticket:
        """As ModelRunner.launch; on a GPU this returns before the work is done."""
        self._cache.copy(self.room.take_copies())
        batch = build(chunks, self.room.table, self._device)
        logits = self._decoder.forward(batch, self._cache)
        rows = [row for chunk in chunks if chunk.samples for row in _rows(chunk)]
        tokens = choose(logits, rows) if rows else torch.empty(0, dtype=torch.int64)
        return Ticket(chunks, logits, tokens)

    def collect(self, ticket: Ticket) -> StepResult:
        """As ModelRunner.collect."""
        tokens = ticket.tokens.tolist()
        results, row = [], 0
        for chunk in ticket.chunks:
            count = 1 + chunk.num_drafts if chunk.samples else 0
            results.append(
                self._accepted(chunk, tokens[row : row + count], ticket.logits[row : row + count])
            )
            row += count
        return results

    def _accepted(self, chunk: Chunk, tokens: list[int], logits: Tensor) -> Sampled:
        """The drafts that are what was sampled there, and the token after those."""
        if not tokens:
            return Sampled()
        drafts = chunk.tokens[len(chunk) - chunk.num_drafts :]
        right = next(
            (i for i, (a, b) in enumerate(zip(drafts, tokens, strict=False)) if a != b), len(drafts)
        )
        taken = tuple(tokens[: right + 1])
        positions: tuple[PositionLogprobs, ...] = ()
        count = chunk.seq.params.logprobs
        if count is not None:
            positions = tuple(
                logprobs(logits[i], token, count, self._text) for i, token in enumerate(taken)
            )
        return Sampled(taken, positions)

    def close(self) -> None:
        """As ModelRunner.close."""
        self._cache.layers.clear()


def _rows(chunk: Chunk) -> list[Row]:
    """The positions of a chunk that are sampled, each with all that comes before it."""
    seq = chunk.seq
    known = seq.tokens[: chunk.start] + chunk.tokens
    first = len(known) - chunk.num_drafts
    return [Row(seq.params, known[:length]) for length in range(first, len(known) + 1)]


def limits(
    *, max_seqs: int, max_batch_tokens: int, max_len: int, kv_tokens: int, share: bool
) -> Limits:
    """What this runner can do at such sizes."""
    return Limits(
        max_seqs=max_seqs,
        max_batch_tokens=max_batch_tokens,
        max_outputs=max_batch_tokens,
        max_len=max_len,
        kv_tokens=kv_tokens,
        can_rewind=share,
        unsupported=UNSUPPORTED,
    )
