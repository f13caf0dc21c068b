"""ModelRunner for llama.cpp: one llama_decode for many sequences, sampled by C sampler chains."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor

import llama_cpp.llama_cpp as C
import numpy as np

from localgen.backends.engine_stats import AdapterStats
from localgen.backends.llamacpp import sampler
from localgen.backends.llamacpp.adapters import LoadedAdapters
from localgen.backends.llamacpp.batch import LlamaBatch
from localgen.backends.llamacpp.embeddings import LlamaEmbedder
from localgen.backends.llamacpp.library import llama_library
from localgen.backends.llamacpp.native import LlamaContext, LlamaModel
from localgen.backends.llamacpp.sampler import Logits, SamplerChain
from localgen.backends.llamacpp.slots import SlotCache
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.runner.interface import (
    Chunk,
    EmbedSlice,
    Limits,
    NoRoom,
    PoolUsage,
    SampledTokens,
    StepFailed,
    StepResult,
    ThreadUsage,
)
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import PositionLogprobs

_DECODE_NO_ROOM = 1
# below this many logits in total, sampling in threads costs more than it saves
_MIN_THREADED_CANDIDATES = 100_000


class LlamaStepTicket:
    """A step in flight.

    batch_order: the chunks in batch order. first_rows: batch index of the first sampled row of
    each that is sampled.
    """

    def __init__(
        self,
        chunks: Seq[Chunk],
        order: Seq[Chunk],
        first_row: list[int],
        decoded: Future[int],
    ) -> None:
        self.chunks = chunks
        self.batch_order = order
        self.first_rows = first_row
        self.decode_future = decoded


class LlamaRunner:
    """The ModelRunner of one model; owns its context and KV cache."""

    def __init__(
        self,
        model: LlamaModel,
        context: LlamaContext,
        tokenizer: LlamaCppTokenizer,
        *,
        kv_cache: SlotCache,
        max_seqs: int,
        max_len: int,
        can_rewind: bool,
        threads: int,
        embedder: LlamaEmbedder,
    ) -> None:
        self._embedder = embedder
        self._model, self._context, self._tokenizer = model, context, tokenizer
        self.limits = Limits(
            max_seqs=max_seqs,
            max_batch_tokens=context.n_batch,
            max_outputs=context.n_outputs,
            max_len=max_len,
            kv_tokens=context.kv_tokens,
            can_rewind=can_rewind,
            can_rank=model.can_rank,
            unsupported=frozenset()
            if tokenizer.has_infill_sampler
            else frozenset({"infill_sampler"}),
        )
        self.kv_cache = kv_cache
        self._adapters = LoadedAdapters(model, context)
        self._batch = LlamaBatch(context.n_batch)
        self._samplers: weakref.WeakKeyDictionary[Sequence, SamplerChain] = (
            weakref.WeakKeyDictionary()
        )
        self._threads = threads
        self._sampling_pool = ThreadPoolExecutor(threads, thread_name_prefix="sample")

    def admit(self, seq: Sequence, *, spare: int) -> int:
        self._adapters.acquire(seq.adapters)
        try:
            cached = self.kv_cache.admit(seq, spare=spare)
        except NoRoom:
            self._adapters.release(seq.adapters)
            raise
        if seq not in self._samplers:
            self._samplers[seq] = SamplerChain(
                seq, self._model.vocab, self._tokenizer.vocab_size, self.limits.max_len
            )
        return cached

    def num_cached(self, tokens: list[int], cache_salt: str) -> int:
        return self.kv_cache.num_cached(tokens, cache_salt)

    def grow(self, seq: Sequence, n: int) -> bool:
        return self.kv_cache.grow(seq, n)

    def rewind(self, seq: Sequence, length: int) -> None:
        self.kv_cache.rewind(seq, length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        self.kv_cache.release(seq, keep=keep)
        self._adapters.release(seq.adapters)

    def usage(self) -> PoolUsage:
        return self.kv_cache.usage()

    def is_loading(self, seq: Sequence) -> bool:
        return self.kv_cache.is_loading(seq)

    def load_prefix(self, seq: Sequence, until_s: float) -> int:
        return self.kv_cache.load_prefix(seq, until_s)

    def save_next_block(self) -> bool:
        return self.kv_cache.save_next_block()

    def adapters(self) -> tuple[AdapterStats, ...]:
        return self._adapters.stats()

    def threads(self) -> ThreadUsage:
        return self._context.threads

    def launch(self, chunks: Seq[Chunk]) -> LlamaStepTicket:
        tokens = sum(map(len, chunks))
        outputs = sum([chunk.num_outputs for chunk in chunks])
        # llama.cpp aborts the process on these
        assert 0 < tokens <= self.limits.max_batch_tokens, tokens
        assert outputs <= self.limits.max_outputs, outputs
        self.kv_cache.make_contiguous()
        # a split cache computes consecutive sequence ids together
        order = sorted(chunks, key=lambda chunk: self.kv_cache.seq_id_of(chunk.seq))
        rows = self._batch.fill(order, [self.kv_cache.seq_id_of(chunk.seq) for chunk in order])
        llama_library().clear()
        self._adapters.use(order[0].seq.adapters)
        # decode in another thread: the engine loop publishes the previous step meanwhile
        return LlamaStepTicket(chunks, order, rows, self._context.decode(self._batch.native))

    def collect(self, ticket: LlamaStepTicket) -> StepResult:
        status = ticket.decode_future.result()
        if status == _DECODE_NO_ROOM:
            raise NoRoom
        if status:
            raise StepFailed(f"llama_decode failed ({status}): {llama_library().reason()}")
        outputs = sum([chunk.num_outputs for chunk in ticket.batch_order])
        logits = self._logits(outputs)
        work, row = [], 0
        for chunk, index in zip(ticket.batch_order, ticket.first_rows, strict=True):
            work.append((chunk, index, logits[row : row + chunk.num_outputs]))
            row += chunk.num_outputs
        if outputs > 1 and outputs * self._tokenizer.vocab_size >= _MIN_THREADED_CANDIDATES:
            size = -(-len(work) // self._threads)  # one share per thread: each hand-over costs time
            shares = [work[at : at + size] for at in range(0, len(work), size)]
            sampled = [
                found
                for share in self._sampling_pool.map(self._sample_all, shares)
                for found in share
            ]
        else:
            sampled = self._sample_all(work)
        by_seq = {
            chunk.seq: found for chunk, found in zip(ticket.batch_order, sampled, strict=True)
        }
        return [by_seq[chunk.seq] for chunk in ticket.chunks]

    def _logits(self, outputs: int) -> Logits:
        """Logits of the output positions in batch order: float32 [outputs, vocab], not copied."""
        shape = (outputs, self._tokenizer.vocab_size)
        if not outputs:
            return np.empty(shape, np.float32)
        pointer = C.llama_get_logits(self._context.handle)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), shape)

    def _sample_all(self, work: Seq[tuple[Chunk, int, Logits]]) -> list[SampledTokens]:
        return [self._sample(*item) for item in work]

    def _sample(self, chunk: Chunk, index: int, logits: Logits) -> SampledTokens:
        """Sample after the last token, then after each draft token while drafts are accepted."""
        scored: tuple[PositionLogprobs, ...] = ()
        if chunk.num_scored:
            scored, logits = self._score(chunk, logits), logits[chunk.num_scored :]
        if not chunk.is_sampled:
            return SampledTokens(scored=scored)
        chooser = self._samplers[chunk.seq]
        drafts = chunk.tokens[len(chunk) - chunk.num_drafts :]
        tokens: list[int] = []
        positions: list[PositionLogprobs] = []
        matcher = chunk.seq.matcher
        for offset in range(1 + chunk.num_drafts):
            row = own = logits[offset]
            banned = chunk.seq.banned_tokens(offset)
            if matcher is not None or banned:
                # logprobs are reported for the unmasked distribution
                own = row.copy() if chooser.num_logprobs is not None else row
            if matcher is not None:
                row[~matcher.allowed_mask(banned)] = -np.inf
            elif banned:
                row[list(banned)] = -np.inf
            token = chooser.sample(self._context.handle, index + offset, row)
            tokens.append(token)
            if matcher is not None:
                matcher.accept(token)
            if chooser.num_logprobs is not None:
                positions.append(
                    sampler.position_logprobs(own, token, chooser.num_logprobs, self._text)
                )
            complete = matcher is not None and matcher.is_done
            if complete or offset == chunk.num_drafts or drafts[offset] != token:
                break
        return SampledTokens(tuple(tokens), tuple(positions), scored=scored)

    def _score(self, chunk: Chunk, logits: Logits) -> tuple[PositionLogprobs, ...]:
        """Logprobs of the chunk's scored tokens. logits: of all its outputs."""
        count = chunk.seq.params.logprobs
        assert count is not None
        return tuple(
            [
                sampler.position_logprobs(row, token, count, self._text)
                for row, token in zip(logits, chunk.scored_tokens, strict=False)
            ]
        )

    def _text(self, token: int) -> str:
        return self._tokenizer.piece(token).decode("utf-8", "replace")

    def embed(
        self, inputs: list[list[int]], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        return self._embedder.embed(inputs, max_tokens)

    def close(self) -> None:
        self._embedder.close()
        self._sampling_pool.shutdown()
        for chooser in self._samplers.values():
            chooser.close()
        self._context.close()
        self._model.close()
