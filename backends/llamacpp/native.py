"""Handles of llama.cpp and their lifetimes. The only place that loads the library.

Everything that the C side would answer with an abort is checked before it gets there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
from numpy.typing import NDArray

from localgen.backends.errors import InvalidRequest, LoadFailed
from localgen.backends.llamacpp.library import (
    CACHE_TYPES,
    FLASH_ATTN,
    MAX_SEQUENCES,
    BufferSizes,
    llama_library,
)
from localgen.backends.llamacpp.options import LlamaOptions

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
_NOT_A_DECODER = "it is not a text-generating decoder model"


class NoKVCache(LoadFailed):
    """The model is an encoder, which llama.cpp runs without a KV cache: it writes no text."""


class LlamaModel:
    """Weights and vocabulary of a GGUF file. buffers: what was allocated for it, contexts included.

    on_progress: share read so far, 0 to 1. LoadFailed, naming the file and llama.cpp's reason.
    """

    def __init__(
        self, path: Path, options: LlamaOptions, on_progress: Callable[[float], None]
    ) -> None:
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
        """A scalar or string of the GGUF metadata."""
        size = C.llama_model_meta_val_str(self.handle, key.encode(), None, 0)
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        C.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    def metadata_number(self, key: str) -> float | None:
        """A number of the GGUF metadata; None where it is absent or not one."""
        try:
            return float(self.metadata_value(key) or "")
        except ValueError:
            return None

    @property
    def architecture(self) -> str:
        """As GGUF names it: llama, qwen3, gemma3, …"""
        return self.metadata_value("general.architecture") or "unknown"

    @property
    def description(self) -> str:
        """Architecture, size and quantization in llama.cpp's words."""
        buffer = ctypes.create_string_buffer(256)
        C.llama_model_desc(self.handle, buffer, len(buffer))
        size = f"{self.num_params / 1e6:.1f}M"
        # llama.cpp does not name sizes that no known model has
        return buffer.value.decode("utf-8", "replace").replace("?B", size)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return int(C.llama_model_size(self.handle))

    @property
    def num_params(self) -> int:
        """Number of weights."""
        return int(C.llama_model_n_params(self.handle))

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return int(C.llama_model_n_layer(self.handle))

    @property
    def ctx_train(self) -> int:
        """Longest sequence the model was trained for, in tokens."""
        return int(C.llama_model_n_ctx_train(self.handle))

    @property
    def hidden_size(self) -> int:
        """Elements of the hidden state."""
        return int(C.llama_model_n_embd(self.handle))

    @property
    def embedding_width(self) -> int:
        """Elements of an embedding."""
        return int(C.llama_model_n_embd_out(self.handle))

    @property
    def pooling_type(self) -> int:
        """How states become one vector (LLAMA_POOLING_TYPE_*): as the file says, or their mean."""
        asked = int(self.metadata_number(f"{self.architecture}.pooling_type") or 0)
        return asked if asked in _POOLINGS else C.LLAMA_POOLING_TYPE_MEAN

    @property
    def is_causal(self) -> bool:
        """Whether tokens look at those before them only, unless the architecture knows better."""
        return self.metadata_value(f"{self.architecture}.attention.causal") != "false"

    @property
    def template(self) -> str | None:
        """The chat template that came with the model."""
        source = C.llama_model_chat_template(self.handle, None)
        return source.decode("utf-8", "replace") if source else None

    @property
    def is_recurrent(self) -> bool:
        """Whether a state takes the place of (part of) the KV cache."""
        recurrent = C.llama_model_is_recurrent(self.handle)
        return bool(recurrent or C.llama_model_is_hybrid(self.handle))

    @property
    def has_sliding_window(self) -> bool:
        """Whether some layers look at the latest tokens only."""
        return bool(C.llama_model_n_swa(self.handle))

    def close(self) -> None:
        """Free the weights. Contexts must be closed before."""
        if self.handle:
            C.llama_model_free(self.handle)
            self.handle = None


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
    """A KV cache over a model, for all sequences together or in equal parts (kv_unified).

    n_seq_max: sequence ids in use. n_outputs: most tokens of a step that are sampled; usually as
    many. LoadFailed with llama.cpp's reason; NoKVCache.

    executor: where all computing of the process is done; None: one of its own. Not where the
    context was made: OpenMP gives each thread that computes a pool of its own, and once there are
    more threads than cores its barriers sleep instead of spinning, which costs a fifth of the
    speed.
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
        params.flash_attn_type = FLASH_ATTN[options.flash_attn]
        params.type_k = CACHE_TYPES[options.cache_type_k]
        params.type_v = CACHE_TYPES[options.cache_type_v]
        params.kv_unified = options.kv_unified
        params.swa_full = True  # keep what a sliding window has left behind: it can be shared
        params.no_perf = True
        self.handle = C.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise LoadFailed(f"cannot make a context for {model.path}: {log.reason()}")
        self.memory = C.llama_get_memory(self.handle)
        self._owns_executor = executor is None
        self.executor = executor or ThreadPoolExecutor(1, thread_name_prefix="decode")
        if not self.memory:
            self.close()
            raise NoKVCache(f"cannot load {model.path}: {_NOT_A_DECODER}")
        self.n_batch = int(C.llama_n_batch(self.handle))
        self.kv_tokens = int(C.llama_n_ctx(self.handle))

    def decode(self, batch: Any) -> Future[int]:
        """Compute a llama_batch; llama_decode's status. Nothing else may be called meanwhile."""
        return self.executor.submit(C.llama_decode, self.handle, batch)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Tag the first `length` cells of one sequence as those of another too."""
        self._check(source)
        self._check(target)
        C.llama_memory_seq_cp(self.memory, source, target, 0, length)

    def save(self, sequence: int) -> NDArray[np.uint8]:
        """What is computed of a sequence, for `restore` in a context of the same shape."""
        self._check(sequence)
        size = C.llama_state_seq_get_size(self.handle, sequence)
        state = np.empty(size, np.uint8)
        written = C.llama_state_seq_get_data(self.handle, _uint8_pointer(state), size, sequence)
        assert written == size, (written, size)
        return state

    def restore(self, sequence: int, state: NDArray[np.uint8]) -> None:
        """Put a saved sequence in the place of another."""
        self._check(sequence)
        read = C.llama_state_seq_set_data(self.handle, _uint8_pointer(state), len(state), sequence)
        assert read == len(state), llama_library().reason()

    def truncate(self, sequence: int, length: int) -> bool:
        """Forget all but the first `length` tokens; False if the model cannot."""
        self._check(sequence)
        return bool(C.llama_memory_seq_rm(self.memory, sequence, length, -1))

    def last_position(self, sequence: int) -> int:
        """Position of the last token in the cache; -1 if there is none."""
        self._check(sequence)
        return int(C.llama_memory_seq_pos_max(self.memory, sequence))

    def _check(self, sequence: int) -> None:
        assert 0 <= sequence < self.n_seq_max, sequence

    def close(self) -> None:
        """Free the pool."""
        if self._owns_executor:
            self.executor.shutdown()
        if self.handle:
            C.llama_free(self.handle)
            self.handle = None
