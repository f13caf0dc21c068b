"""ModelRunner over llama.cpp: many sequences in one llama_decode, sampled by C chains."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor

import llama_cpp.llama_cpp as C
import numpy as np

from localgen.backends.llamacpp import sampler
from localgen.backends.llamacpp.batch import Batch
from localgen.backends.llamacpp.embeddings import TextVectors
from localgen.backends.llamacpp.library import library
from localgen.backends.llamacpp.native import Context, Model
from localgen.backends.llamacpp.sampler import Logits, Sampler
from localgen.backends.llamacpp.slots import Lanes
from localgen.backends.llamacpp.vocab import Vocab
from localgen.backends.runner.interface import (
    Chunk,
    EmbedSlice,
    Limits,
    NoRoom,
    PoolUsage,
    Sampled,
    StepFailed,
    StepResult,
)
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import PositionLogprobs

_DECODE_NO_ROOM = 1
# below this many candidates in all, handing rows to threads costs more than it saves
_THREADED_CANDIDATES = 100_000


class Ticket:
    """A step in flight.

    order: the chunks as they lie in the batch. first_row: where the sampled rows of each begin
    in it, or -1.
    """

    def __init__(
        self,
        chunks: Seq[Chunk],
        order: Seq[Chunk],
        first_row: list[int],
        decoded: Future[int],
    ) -> None:
        self.chunks = chunks
        self.order = order
        self.first_row = first_row
        self.decoded = decoded


class LlamaRunner:
    """Owns the context and the pool of one model. See ModelRunner for the calls."""

    def __init__(
        self,
        model: Model,
        context: Context,
        vocab: Vocab,
        *,
        lanes: Lanes,
        max_seqs: int,
        max_len: int,
        can_rewind: bool,
        threads: int,
        vectors: TextVectors,
    ) -> None:
        self._vectors = vectors
        self._model, self._context, self._vocab = model, context, vocab
        self.limits = Limits(
            max_seqs=max_seqs,
            max_batch_tokens=context.n_batch,
            max_outputs=context.n_outputs,
            max_len=max_len,
            kv_tokens=context.kv_tokens,
            can_rewind=can_rewind,
        )
        self.lanes = lanes
        self._batch = Batch(context.n_batch)
        self._samplers: weakref.WeakKeyDictionary[Sequence, Sampler] = weakref.WeakKeyDictionary()
        self._threads = threads
        self._rows = ThreadPoolExecutor(threads, thread_name_prefix="sample")

    def admit(self, seq: Sequence, *, spare: int) -> int:
        """As ModelRunner.admit."""
        cached = self.lanes.admit(seq, spare=spare)
        if seq not in self._samplers:
            self._samplers[seq] = Sampler(
                seq, self._model.vocab, self._vocab.vocab_size, self.limits.max_len
            )
        return cached

    def grow(self, seq: Sequence, n: int) -> bool:
        """As ModelRunner.grow."""
        return self.lanes.grow(seq, n)

    def rewind(self, seq: Sequence, length: int) -> None:
        """As ModelRunner.rewind."""
        self.lanes.rewind(seq, length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """As ModelRunner.release."""
        self.lanes.release(seq, keep=keep)

    def usage(self) -> PoolUsage:
        """As ModelRunner.usage."""
        return self.lanes.usage()

    def launch(self, chunks: Seq[Chunk]) -> Ticket:
        """As ModelRunner.launch."""
        tokens = sum(map(len, chunks))
        outputs = sum(1 + chunk.num_drafts for chunk in chunks if chunk.samples)
        # llama.cpp aborts the process on these
        assert 0 < tokens <= self.limits.max_batch_tokens, tokens
        assert outputs <= self.limits.max_outputs, outputs
        self.lanes.arrange()
        # a cache in parts computes consecutive sequence ids together
        order = sorted(chunks, key=lambda chunk: self.lanes.index(chunk.seq))
        rows = self._batch.fill(order, [self.lanes.index(chunk.seq) for chunk in order])
        library().clear()
        # in a thread of its own: the loop publishes the last step meanwhile
        return Ticket(chunks, order, rows, self._context.decode(self._batch.native))

    def collect(self, ticket: Ticket) -> StepResult:
        """As ModelRunner.collect."""
        status = ticket.decoded.result()
        if status == _DECODE_NO_ROOM:
            raise NoRoom
        if status:
            raise StepFailed(f"llama_decode failed ({status}): {library().reason()}")
        outputs = sum(1 + chunk.num_drafts for chunk in ticket.order if chunk.samples)
        logits = self._logits(outputs)
        work, row = [], 0
        for chunk, index in zip(ticket.order, ticket.first_row, strict=True):
            work.append((chunk, index, logits[row : row + 1 + chunk.num_drafts]))
            row += 1 + chunk.num_drafts if chunk.samples else 0
        if outputs > 1 and outputs * self._vocab.vocab_size >= _THREADED_CANDIDATES:
            size = -(-len(work) // self._threads)  # a share each: handing over costs time too
            shares = [work[at : at + size] for at in range(0, len(work), size)]
            sampled = [
                found for share in self._rows.map(self._sample_all, shares) for found in share
            ]
        else:
            sampled = self._sample_all(work)
        by_seq = {chunk.seq: found for chunk, found in zip(ticket.order, sampled, strict=True)}
        return [by_seq[chunk.seq] for chunk in ticket.chunks]

    def _logits(self, outputs: int) -> Logits:
        """Rows of the sampled positions, in batch order: float32 [outputs, vocab], C's memory."""
        shape = (outputs, self._vocab.vocab_size)
        if not outputs:
            return np.empty(shape, np.float32)
        pointer = C.llama_get_logits(self._context.handle)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), shape)

    def _sample_all(self, work: Seq[tuple[Chunk, int, Logits]]) -> list[Sampled]:
        return [self._sample(*item) for item in work]

    def _sample(self, chunk: Chunk, index: int, logits: Logits) -> Sampled:
        """Sample after the last token and, while the drafts are what is sampled, after those."""
        if not chunk.samples:
            return Sampled()
        chooser = self._samplers[chunk.seq]
        drafts = chunk.tokens[len(chunk) - chunk.num_drafts :]
        tokens: list[int] = []
        positions: list[PositionLogprobs] = []
        matcher = chunk.seq.matcher
        for offset in range(1 + chunk.num_drafts):
            row = own = logits[offset]
            barred = chunk.seq.barred(offset)
            if matcher is not None or barred:
                # what is said of probabilities is the model's own
                own = row.copy() if chooser.num_logprobs is not None else row
            if matcher is not None:
                row[~matcher.allowed(barred)] = -np.inf
            elif barred:
                row[list(barred)] = -np.inf
            token = chooser.sample(self._context.handle, index + offset, row)
            tokens.append(token)
            if matcher is not None:
                matcher.accept(token)
            if chooser.num_logprobs is not None:
                positions.append(sampler.logprobs(own, token, chooser.num_logprobs, self._text))
            complete = matcher is not None and matcher.is_done
            if complete or offset == chunk.num_drafts or drafts[offset] != token:
                break
        return Sampled(tuple(tokens), tuple(positions))

    def _text(self, token: int) -> str:
        return self._vocab.piece(token).decode("utf-8", "replace")

    def embed(
        self, inputs: list[list[int]], most: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        """As Embedder.embed."""
        return self._vectors.embed(inputs, most)

    def close(self) -> None:
        """As ModelRunner.close."""
        self._vectors.close()
        self._rows.shutdown()
        for chooser in self._samplers.values():
            chooser.close()
        self._context.close()
        self._model.close()
