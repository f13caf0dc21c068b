"""Handles of llama.cpp models and contexts, and their lifetimes.

Arguments that would make the C side abort the process are checked here first.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
from numpy.typing import NDArray

from localgen.backends.errors import InvalidRequest, LoadFailed
from localgen.backends.formats.gguf.limits import check_gguf_numbers
from localgen.backends.formats.gguf.reader import GgufReader, read_gguf_header
from localgen.backends.llamacpp.free_cores import FreeCores
from localgen.backends.llamacpp.library import (
    CACHE_TYPES,
    FLASH_ATTN,
    MAX_SEQUENCES,
    BufferSizes,
    llama_library,
)
from localgen.backends.llamacpp.options import LlamaOptions
from localgen.backends.runner.interface import ThreadUsage
from localgen.backends.units import format_params

_LOAD_MODES = {
    (False, False): C.LLAMA_LOAD_MODE_NONE,
    (True, False): C.LLAMA_LOAD_MODE_MMAP,
    (False, True): C.LLAMA_LOAD_MODE_MLOCK,
    (True, True): C.LLAMA_LOAD_MODE_MMAP_MLOCK,
}
_POOLINGS = (
    C.LLAMA_POOLING_TYPE_MEAN,
    C.LLAMA_POOLING_TYPE_CLS,
    C.LLAMA_POOLING_TYPE_LAST,
    C.LLAMA_POOLING_TYPE_RANK,
)
_CLASSIFIERS = {"cls.weight", "cls.output.weight"}
# the second word of a description; 8x7B and 30B.A3B are no numbers
_NAMED_SIZE = re.compile(r"(?<= )(?:(\d+(?:\.\d+)?)([KMB])|\?B)(?= |$)")
_SIZE_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9}
_ROUNDED = 0.25  # gemma's 2B has 2.5 billion
_NOT_A_DECODER = "it is not a text-generating decoder model"


class NoKVCache(LoadFailed):
    """The model is an encoder, which llama.cpp runs without a KV cache; it cannot generate text."""


class LlamaModel:
    """Weights and vocabulary of a GGUF file.

    header: metadata as read_gguf_header returns it. buffers: memory allocated for the model and its
    contexts. on_progress: called with the fraction loaded, 0 to 1. Raises LoadFailed with the path
    and llama.cpp's reason.
    """

    def __init__(
        self, path: Path, options: LlamaOptions, on_progress: Callable[[float], None]
    ) -> None:
        self.header = _read_checked_header(path)
        log = llama_library()
        log.clear()
        self.buffers = log.buffers = BufferSizes()
        self.path = path
        params = C.llama_model_default_params()
        params.n_gpu_layers = options.gpu_layers
        params.load_mode = _LOAD_MODES[options.mmap, options.mlock]
        params.use_extra_bufts = options.repack
        params.progress_callback = _progress_callback(on_progress)
        self.handle = C.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise LoadFailed(f"cannot load {path}: {log.reason()}")
        self.vocab = C.llama_model_get_vocab(self.handle)
        if not C.llama_model_has_decoder(self.handle) or C.llama_model_has_encoder(self.handle):
            self.close()
            raise LoadFailed(f"cannot load {path}: {_NOT_A_DECODER}")
        if C.llama_vocab_type(self.vocab) == C.LLAMA_VOCAB_TYPE_NONE:
            self.close()
            raise LoadFailed(f"cannot load {path}: it has no vocabulary")

    def metadata_value(self, key: str) -> str | None:
        """Return a scalar or string of the GGUF metadata, or None if it is absent."""
        size = C.llama_model_meta_val_str(self.handle, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        C.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def metadata_number(self, key: str) -> float | None:
        """Return a number of the GGUF metadata, or None if it is absent or not a number."""
        try:
            return float(self.metadata_value(key) or "")
        except ValueError:
            return None

    @property
    def architecture(self) -> str:
        """Architecture in GGUF's terms: llama, qwen3, gemma3, …"""
        return self.metadata_value("general.architecture") or "unknown"

    @property
    def description(self) -> str:
        """llama.cpp's description: architecture, size and quantization."""
        buffer = ctypes.create_string_buffer(256)
        C.llama_model_desc(self.handle, buffer, len(buffer))
        return correct_size(buffer.value.decode("utf-8", "replace"), self.num_params)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return int(C.llama_model_size(self.handle))

    @property
    def num_params(self) -> int:
        return int(C.llama_model_n_params(self.handle))

    @property
    def num_layers(self) -> int:
        return int(C.llama_model_n_layer(self.handle))

    @property
    def ctx_train(self) -> int:
        """Context length the model was trained for, in tokens."""
        return int(C.llama_model_n_ctx_train(self.handle))

    @property
    def hidden_size(self) -> int:
        return int(C.llama_model_n_embd(self.handle))

    @property
    def embedding_width(self) -> int:
        return int(C.llama_model_n_embd_out(self.handle))

    @property
    def pooling_type(self) -> int:
        """LLAMA_POOLING_TYPE_* from the metadata; mean pooling if it is absent or unknown."""
        pooling = int(self.metadata_number(f"{self.architecture}.pooling_type") or 0)
        return pooling if pooling in _POOLINGS else C.LLAMA_POOLING_TYPE_MEAN

    @property
    def can_rank(self) -> bool:
        """True for a reranking model with its classifier, without which llama.cpp aborts."""
        if self.pooling_type != C.LLAMA_POOLING_TYPE_RANK:
            return False
        return any(tensor.name in _CLASSIFIERS for tensor in GgufReader(self.path).tensors)

    @property
    def is_causal(self) -> bool:
        """Return False if the metadata declares bidirectional attention."""
        return self.metadata_value(f"{self.architecture}.attention.causal") != "false"

    @property
    def template(self) -> str | None:
        """The model's chat template, or None if it has none."""
        source = C.llama_model_chat_template(self.handle, None)
        return source.decode("utf-8", "replace") if source else None

    @property
    def is_recurrent(self) -> bool:
        """Return True if (part of) the model keeps recurrent state instead of a KV cache."""
        recurrent = C.llama_model_is_recurrent(self.handle)
        return bool(recurrent or C.llama_model_is_hybrid(self.handle))

    @property
    def has_sliding_window(self) -> bool:
        """Return True if some layers use sliding-window attention."""
        return bool(C.llama_model_n_swa(self.handle))

    def close(self) -> None:
        """Free the weights. Contexts must be closed first."""
        if self.handle:
            C.llama_model_free(self.handle)
            self.handle = None


def correct_size(description: str, num_params: int) -> str:
    """llama.cpp's description with the size of the model.

    llama.cpp derives the size from the number of layers: any llama of 30 layers is 256M, also one
    of 135M, and one of a number that it does not know is ?B. Names that are only rounded, such as
    7B for 7.6 billion, stay.
    """
    named = _NAMED_SIZE.search(description)
    if named is None:
        return description
    claimed = float(named[1]) * _SIZE_UNITS[named[2]] if named[1] else 0.0
    is_right = abs(claimed - num_params) <= _ROUNDED * num_params
    size = named[0] if is_right else format_params(num_params)
    return description[: named.start()] + size + description[named.end() :]


def _read_checked_header(path: Path) -> dict[str, Any]:
    """Raise LoadFailed for metadata that llama.cpp aborts on."""
    try:
        header = read_gguf_header(path, whole=True)
    except LoadFailed:
        return {}  # llama.cpp reports what is not GGUF
    check_gguf_numbers(header, path)
    return header


def _progress_callback(on_progress: Callable[[float], None]) -> Any:
    reported = -1.0

    def take(share: float, _user: Any) -> bool:
        nonlocal reported
        if share >= reported + 0.01:
            reported = share
            on_progress(share)
        return True

    return C.llama_progress_callback(take)


def _uint8_pointer(state: NDArray[np.uint8]) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class LlamaContext:
    """A context of a model: its KV cache (unified or split, see kv_unified) and compute thread.

    n_seq_max: number of sequence ids. n_outputs: maximum sampled positions of a step, default
    n_seq_max. Raises LoadFailed with llama.cpp's reason, or NoKVCache for an encoder.

    executor: thread that runs all llama_decode calls of the process; None creates one. Decoding
    never runs in the thread that created the context: OpenMP gives each computing thread its own
    pool, and with more threads than cores its barriers sleep instead of spinning, which costs a
    fifth of the speed.
    """

    def __init__(
        self,
        model: LlamaModel,
        options: LlamaOptions,
        *,
        kv_tokens: int,
        n_seq_max: int,
        n_outputs: int | None = None,
        executor: ThreadPoolExecutor | None = None,
    ) -> None:
        log = llama_library()
        log.clear()
        log.buffers = model.buffers
        if not 0 < n_seq_max <= MAX_SEQUENCES:
            raise InvalidRequest(f"{n_seq_max} sequences, llama.cpp allows {MAX_SEQUENCES}")
        params = C.llama_context_default_params()
        params.n_ctx = kv_tokens
        params.n_batch = params.n_ubatch = options.max_batch_tokens
        params.n_seq_max = n_seq_max
        self.n_seq_max, self.n_outputs = n_seq_max, n_outputs or n_seq_max
        params.n_outputs_max = self.n_outputs  # bounds the logits buffer
        params.n_threads, params.n_threads_batch = options.threads, options.threads_batch
        self._threads = self._most_threads = options.threads
        self._free_cores = FreeCores(options.threads) if options.adapts_threads else None
        params.flash_attn_type = FLASH_ATTN[options.flash_attn]
        params.type_k = CACHE_TYPES[options.cache_type_k]
        params.type_v = CACHE_TYPES[options.cache_type_v]
        params.kv_unified = options.kv_unified
        params.swa_full = True  # keep tokens outside the sliding window: prefixes can be shared
        params.no_perf = True
        self.handle = C.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise LoadFailed(f"cannot create a context for {model.path}: {log.reason()}")
        self.memory = C.llama_get_memory(self.handle)
        self._owns_executor = executor is None
        self.executor = executor or ThreadPoolExecutor(1, thread_name_prefix="decode")
        if not self.memory:
            self.close()
            raise NoKVCache(f"cannot load {model.path}: {_NOT_A_DECODER}")
        self.n_batch = int(C.llama_n_batch(self.handle))
        self.kv_tokens = int(C.llama_n_ctx(self.handle))

    @property
    def threads(self) -> ThreadUsage:
        """Threads of the last decode(), and at most."""
        return ThreadUsage(self._threads, self._most_threads)

    def decode(self, batch: Any) -> Future[int]:
        """Start llama_decode. Returns a future of its status; no other call may come before it."""
        if self._free_cores is None:
            return self.executor.submit(C.llama_decode, self.handle, batch)
        threads = self._free_cores.count()
        if threads != self._threads:
            self._threads = threads
            C.llama_set_n_threads(self.handle, threads, threads)
        return self.executor.submit(self._decode, self._free_cores, batch)

    def _decode(self, free_cores: FreeCores, batch: Any) -> int:
        status: int = C.llama_decode(self.handle, batch)
        free_cores.end_step()
        return status

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Share the first `length` cells of sequence `source` with sequence `target`."""
        self._check(source)
        self._check(target)
        C.llama_memory_seq_cp(self.memory, source, target, 0, length)

    def save(self, sequence: int) -> NDArray[np.uint8]:
        """Return the state of a sequence, for `restore` in a context of the same shape."""
        self._check(sequence)
        size = C.llama_state_seq_get_size(self.handle, sequence)
        state = np.empty(size, np.uint8)
        written = C.llama_state_seq_get_data(self.handle, _uint8_pointer(state), size, sequence)
        assert written == size, (written, size)
        return state

    def restore(self, sequence: int, state: NDArray[np.uint8]) -> None:
        """Replace a sequence by a saved state."""
        self._check(sequence)
        read = C.llama_state_seq_set_data(self.handle, _uint8_pointer(state), len(state), sequence)
        assert read == len(state), llama_library().reason()

    def save_range(self, source: int, scratch: int, start: int, end: int) -> NDArray[np.uint8]:
        """Return the state of some positions of a sequence, for `restore_range`.

        scratch: an unused sequence id. The cache must be unified.
        """
        self._check(source)
        self._check(scratch)
        C.llama_memory_seq_cp(self.memory, source, scratch, start, end)
        try:
            return self.save(scratch)
        finally:
            self.truncate(scratch, 0)

    def restore_range(
        self, target: int, scratch: int, start: int, end: int, state: NDArray[np.uint8]
    ) -> bool:
        """Append saved positions, from start to end, to a sequence that ends at start.

        Returns False, and appends none, if the state does not begin there or does not fit.
        """
        self._check(target)
        self._check(scratch)
        read = C.llama_state_seq_set_data(self.handle, _uint8_pointer(state), len(state), scratch)
        try:
            first = int(C.llama_memory_seq_pos_min(self.memory, scratch))
            if read != len(state) or first != start or self.last_position(scratch) < end - 1:
                return False
            C.llama_memory_seq_cp(self.memory, scratch, target, start, end)
            return True
        finally:
            self.truncate(scratch, 0)

    def truncate(self, sequence: int, length: int) -> bool:
        """Remove all but the first `length` tokens. Returns False if the model cannot."""
        self._check(sequence)
        return bool(C.llama_memory_seq_rm(self.memory, sequence, length, -1))

    def last_position(self, sequence: int) -> int:
        """Position of the last cached token, or -1 if the sequence is empty."""
        self._check(sequence)
        return int(C.llama_memory_seq_pos_max(self.memory, sequence))

    def _check(self, sequence: int) -> None:
        assert 0 <= sequence < self.n_seq_max, sequence

    def close(self) -> None:
        """Shut down the compute thread, if this context created it, and free the KV cache."""
        if self._owns_executor:
            self.executor.shutdown()
        if self.handle:
            C.llama_free(self.handle)
            self.handle = None
