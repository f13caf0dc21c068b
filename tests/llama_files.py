"""GGUF files opened through llama.cpp's C interface, without localgen's own runner."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


class LlamaFile:
    """A model, or only its vocabulary."""

    def __init__(self, path: Path, *, vocab_only: bool = False) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = vocab_only
        # test the file, not its repacked layouts for this processor (AMX, …)
        params.use_extra_bufts = False
        self.model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, f"llama.cpp cannot load {path}"
        self.vocab: Any = llama_cpp.llama_model_get_vocab(self.model)

    def close(self) -> None:
        llama_cpp.llama_model_free(self.model)

    def tokenize(self, text: str, *, first: bool = False) -> list[int]:
        """Tokens of a text. first: add the begin-of-sequence token if the file says so."""
        raw = text.encode()
        tokens = (ctypes.c_int32 * (len(raw) + 8))()
        count = llama_cpp.llama_tokenize(
            self.vocab, raw, len(raw), tokens, len(tokens), first, True
        )
        assert count >= 0
        return list(tokens[:count])

    def metadata(self, key: str) -> str | None:
        buffer = ctypes.create_string_buffer(4096)
        size = llama_cpp.llama_model_meta_val_str(self.model, key.encode(), buffer, len(buffer))
        return buffer.value.decode() if size >= 0 else None

    def text(self, tokens: list[int]) -> str:
        """Text of these tokens, control tokens included."""
        piece, text = ctypes.create_string_buffer(256), b""
        for token in tokens:
            length = llama_cpp.llama_token_to_piece(self.vocab, token, piece, 256, 0, True)
            text += piece.raw[:length]
        return text.decode()

    def greedy(self, prompt: str, max_tokens: int = 48) -> str:
        return self.text(self.greedy_tokens(self.tokenize(prompt), max_tokens))

    def greedy_tokens(self, tokens: list[int], max_tokens: int, ctx: int = 512) -> list[int]:
        """Greedy tokens up to an end token, which is not included."""
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = ctx, 1, 1
        context: Any = llama_cpp.llama_init_from_model(self.model, params)
        size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        answer: list[int] = []
        for _ in range(max_tokens):
            array = (ctypes.c_int32 * len(tokens))(*tokens)
            batch = llama_cpp.llama_batch_get_one(array, len(tokens))
            assert llama_cpp.llama_decode(context, batch) == 0
            logits = llama_cpp.llama_get_logits_ith(context, -1)
            tokens = [int(np.argmax(np.ctypeslib.as_array(logits, shape=(size,))))]
            if llama_cpp.llama_vocab_is_eog(self.vocab, tokens[0]):
                break
            answer += tokens
        llama_cpp.llama_free(context)
        return answer
