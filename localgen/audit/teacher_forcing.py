"""Logits of a GGUF model for given tokens, by llama.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import llama_cpp.llama_cpp as C
import numpy as np
from numpy.typing import NDArray

from localgen.backends.errors import LoadFailed
from localgen.backends.llamacpp.batch import LlamaBatch
from localgen.backends.llamacpp.native import LlamaContext, LlamaModel
from localgen.backends.llamacpp.options import resolve_llama_options
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.model_info import LoadOptions

# tokens of one step, and rows of its logits
STEP_TOKENS = 256
_SEQUENCE = 0


class ForcedModel:
    """The weights of a GGUF file. Raises LoadFailed as LlamaModel."""

    def __init__(self, path: Path, threads: int | None, on_progress: Callable[[float], None]):
        self.options = replace(
            resolve_llama_options(LoadOptions(threads=threads, parallel=1)),
            max_batch_tokens=STEP_TOKENS,
            adapts_threads=False,
        )
        self.model = LlamaModel(path, self.options, on_progress)
        self.tokenizer = LlamaCppTokenizer(self.model)

    def close(self) -> None:
        self.model.close()


class ForcedContext:
    """A KV cache of one type for `ctx` tokens. kv_type: of keys and values, f16, q8_0, …"""

    def __init__(self, forced: ForcedModel, *, ctx: int, kv_type: str) -> None:
        options = replace(forced.options, cache_type_k=kv_type, cache_type_v=kv_type)
        self._context = LlamaContext(
            forced.model, options, kv_tokens=ctx, n_seq_max=1, n_outputs=STEP_TOKENS
        )
        self._batch = LlamaBatch(STEP_TOKENS)
        self._vocab_size = forced.tokenizer.vocab_size
        self._cached: list[int] = []

    def begin(self, tokens: Sequence[int], scored: int) -> int:
        """Keep the cached beginning that `tokens` share, but nothing from `scored` - 1 on.

        Returns how many tokens are kept.
        """
        most = min(len(self._cached), scored - 1)
        keep = next((at for at in range(most) if self._cached[at] != tokens[at]), most)
        if not self._context.truncate(_SEQUENCE, keep):  # recurrent models keep all or nothing
            self._context.truncate(_SEQUENCE, 0)
            keep = 0
        del self._cached[keep:]
        return keep

    def advance(self, tokens: Sequence[int], num_outputs: int) -> NDArray[np.float32]:
        """Compute the next tokens. Returns the logits after the last num_outputs, [rows, vocab].

        They are valid until the next call. Raises LoadFailed if llama.cpp fails.
        """
        self._batch.fill_run(tokens, len(self._cached), num_outputs)
        status = self._context.decode(self._batch.native).result()
        if status:
            raise LoadFailed(f"llama.cpp cannot compute {len(tokens)} tokens (status {status})")
        self._cached += tokens
        shape = (num_outputs, self._vocab_size)
        if not num_outputs:
            return np.empty(shape, np.float32)
        pointer = C.llama_get_logits(self._context.handle)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), shape)

    def close(self) -> None:
        self._context.close()
