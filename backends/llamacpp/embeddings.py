"""Embeddings through llama.cpp: a second context over the model's weights, created on first use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
from numpy.typing import NDArray

from localgen.backends.engine.embeddings import (
    MAX_INPUTS,
    is_last_slice,
    split_into_slices,
    unscheduled_sequences,
)
from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.backends.llamacpp import sizing
from localgen.backends.llamacpp.batch import LlamaBatch
from localgen.backends.llamacpp.free_cores import FreeCores
from localgen.backends.llamacpp.library import FLASH_ATTN, llama_library
from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import LlamaOptions
from localgen.backends.memory.system import RESERVED_BYTES, available_memory_bytes
from localgen.backends.runner.interface import Chunk, EmbeddingArray, EmbedSlice, StepFailed
from localgen.backends.runner.sequence import Sequence
from localgen.backends.units import format_size

# llama.cpp computes logits for every token whose hidden state it returns: this bounds their memory
SLICE_TOKENS = 256
MIN_CONTEXT_TOKENS = 512
# a context larger than this is freed after the request
MAX_KEPT_CONTEXT_TOKENS = 8192


class LlamaEmbedder:
    """Embeds texts with the weights of a model, in that model's compute thread.

    A causal model is computed in slices whose hidden states are pooled here. With bidirectional
    attention, and of a reranking model, all texts of a request are computed in one batch.
    """

    def __init__(
        self, model: LlamaModel, options: LlamaOptions, executor: ThreadPoolExecutor
    ) -> None:
        self._model, self._options, self._executor = model, options, executor
        self._ranks = model.can_rank
        # all tokens of a text in one batch
        self._is_whole = self._ranks or not model.is_causal
        self._free_cores = FreeCores(options.threads) if options.adapts_threads else None
        self._handle: Any = None
        self._batch = LlamaBatch(1)
        self._context_tokens = 0  # capacity of the context

    def embed(
        self, inputs: list[list[int]], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        """See Embedder.embed: of a reranking model, the inputs are pairs, the vectors scores.

        Raises InvalidRequest for a reranking model without its classifier, or OutOfMemory.
        """
        if self._model.pooling_type == C.LLAMA_POOLING_TYPE_RANK and not self._ranks:
            raise InvalidRequest(
                f"{self._model.path.name} is a reranking model without a classifier "
                "(cls.weight, cls.output.weight): use another file",
                param="model",
            )
        total = sum(map(len, inputs))
        self._ensure_context(total)
        if self._is_whole:
            yield from self._embed_whole(inputs, total)
        else:
            yield from self._embed_causal(unscheduled_sequences(inputs), max_tokens)

    def _embed_whole(
        self, inputs: list[list[int]], num_tokens: int
    ) -> Generator[EmbedSlice, None, None]:
        try:
            (chunks,) = split_into_slices(unscheduled_sequences(inputs), lambda: num_tokens)
            self._compute(chunks)
            yield EmbedSlice(
                num_tokens,
                np.stack([self._pooled_embedding(seq_id) for seq_id in range(len(inputs))]),
            )
        finally:
            self._clear()

    def _embed_causal(
        self, seqs: list[Sequence], max_tokens: Callable[[], int]
    ) -> Generator[EmbedSlice, None, None]:
        seq_ids = {seq: seq_id for seq_id, seq in enumerate(seqs)}
        sums = np.zeros((len(seqs), self._model.embedding_width), np.float64)
        total = sum(len(seq.tokens) for seq in seqs)
        # equal slices: flash attention on a CPU is slow on a short remainder (see slots.py)
        even = -(-total // -(-total // SLICE_TOKENS))
        try:
            for chunks in split_into_slices(seqs, lambda: min(max_tokens(), even)):
                self._compute(chunks, [seq_ids[chunk.seq] for chunk in chunks])
                states, row = self._hidden_states(sum(map(len, chunks))), 0
                for chunk in chunks:
                    sums[seq_ids[chunk.seq]] += self._pool_slice(
                        chunk, states[row : row + len(chunk)]
                    )
                    row += len(chunk)
                vectors = sums.astype(np.float32) if is_last_slice(chunks, seqs) else None
                yield EmbedSlice(len(states), vectors)
        finally:
            self._clear()

    def _pool_slice(self, chunk: Chunk, states: EmbeddingArray) -> NDArray[np.float64]:
        """Contribution of a slice to the vector of its text. states: [tokens, width]."""
        exact: NDArray[np.float64] = states.astype(np.float64)
        length = len(chunk.seq.tokens)
        match self._model.pooling_type:
            case C.LLAMA_POOLING_TYPE_CLS:
                exact = exact[:1] if chunk.start == 0 else exact[:0]
            case C.LLAMA_POOLING_TYPE_LAST:
                exact = exact[-1:] if chunk.start + len(chunk) == length else exact[:0]
            case _:
                exact /= length
        part: NDArray[np.float64] = exact.sum(axis=0)
        return part

    # -- the context ------------------------------------------------------------------------

    def _ensure_context(self, num_tokens: int) -> None:
        """Create a larger context if num_tokens do not fit the current one. Raises OutOfMemory."""
        if num_tokens <= self._context_tokens:
            return
        self.close()
        size = max(MIN_CONTEXT_TOKENS, 1 << (num_tokens - 1).bit_length())
        shape = sizing.llama_model_shape(self._model)
        need = int(size * sizing.kv_bytes_per_token(shape, self._options))
        free = available_memory_bytes() - RESERVED_BYTES
        if need > free:
            raise self._too_large(
                num_tokens, f"needs {format_size(need)}, {format_size(max(0, free))} are free"
            )
        log = llama_library()
        log.clear()
        self._handle = C.llama_init_from_model(self._model.handle, self._params(size))
        if not self._handle:
            raise self._too_large(num_tokens, log.reason())
        # read back the actual sizes: llama.cpp aborts the process if they are exceeded
        self._batch = LlamaBatch(int(C.llama_n_batch(self._handle)))
        self._context_tokens = int(C.llama_n_ctx(self._handle))

    def _too_large(self, tokens: int, reason: str) -> OutOfMemory:
        return OutOfMemory(f"embedding {tokens:,} tokens at once: {reason}; send shorter texts")

    def _params(self, size: int) -> Any:
        options = self._options
        params = C.llama_context_default_params()
        params.n_ctx = size
        params.n_batch = params.n_ubatch = size if self._is_whole else SLICE_TOKENS
        params.n_seq_max = MAX_INPUTS
        params.n_threads, params.n_threads_batch = options.threads, options.threads_batch
        params.flash_attn_type = FLASH_ATTN[options.flash_attn]
        params.kv_unified = params.swa_full = params.no_perf = True
        params.embeddings = True
        pooled = self._model.pooling_type if self._is_whole else C.LLAMA_POOLING_TYPE_NONE
        params.pooling_type = pooled
        return params

    def _compute(self, chunks: list[Chunk], seq_ids: list[int] | None = None) -> None:
        """Decode the chunks. Raises StepFailed if llama.cpp cannot."""
        tokens = sum(map(len, chunks))
        # llama.cpp aborts the process on these
        assert 0 < tokens <= C.llama_n_ubatch(self._handle), tokens
        assert len(chunks) <= MAX_INPUTS, len(chunks)
        self._batch.fill(chunks, range(len(chunks)) if seq_ids is None else seq_ids)
        llama_library().clear()
        if self._free_cores is not None:
            threads = self._free_cores.count()
            C.llama_set_n_threads(self._handle, threads, threads)
        status = self._executor.submit(C.llama_decode, self._handle, self._batch.native).result()
        if self._free_cores is not None:
            self._free_cores.end_step()
        if status:
            raise StepFailed(f"llama_decode failed ({status}): {llama_library().reason()}")

    def _hidden_states(self, tokens: int) -> EmbeddingArray:
        """Hidden states of all tokens of the slice, [tokens, width], in llama.cpp's memory."""
        pointer = C.llama_get_embeddings(self._handle)
        return _array(pointer, (tokens, self._model.embedding_width))

    def _pooled_embedding(self, seq_id: int) -> EmbeddingArray:
        pointer = C.llama_get_embeddings_seq(self._handle, seq_id)
        # of several classes the first is `yes`
        width = 1 if self._ranks else self._model.embedding_width
        return _array(pointer, (width,)).copy()

    def _clear(self) -> None:
        memory = C.llama_get_memory(self._handle) if self._handle else None
        if memory:
            C.llama_memory_clear(memory, False)
        if self._context_tokens > MAX_KEPT_CONTEXT_TOKENS:
            self.close()

    def close(self) -> None:
        if self._handle:
            C.llama_free(self._handle)
            self._handle, self._context_tokens = None, 0


def _array(pointer: Any, shape: tuple[int, ...]) -> EmbeddingArray:
    if not pointer:
        raise StepFailed("llama.cpp computed no embeddings")
    return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), shape)
