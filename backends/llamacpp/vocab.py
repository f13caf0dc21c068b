"""A GGUF vocabulary as a Tokenizer for the engine."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np

from localgen.backends.errors import InvalidRequest
from localgen.backends.infill import infill_tokens
from localgen.backends.llamacpp.native import LlamaModel

_PIECE_BYTES = 256
# llama.cpp's infill sampler aborts at a longer piece
_INFILL_PIECE_BYTES = 512


class LlamaCppTokenizer:
    """Tokenizer of a loaded model. Thread-safe, as llama.cpp's tokenizer is."""

    def __init__(self, model: LlamaModel) -> None:
        self._handle = model.vocab
        self.vocab_size = int(C.llama_vocab_n_tokens(self._handle))
        self.eos_token_ids = frozenset(
            token for token in range(self.vocab_size) if C.llama_vocab_is_eog(self._handle, token)
        )
        self._bos_id = int(C.llama_vocab_bos(self._handle))
        self._add_bos = bool(C.llama_vocab_get_add_bos(self._handle)) and self._bos_id >= 0
        self.bos = self._text(self._bos_id)
        self.eos = self._text(int(C.llama_vocab_eos(self._handle)))
        self._pieces: dict[int, bytes] = {}
        self.infill_tokens = infill_tokens(
            self._special(C.llama_vocab_fim_pre),
            self._special(C.llama_vocab_fim_suf),
            self._special(C.llama_vocab_fim_mid),
            repository=self._special(C.llama_vocab_fim_rep),
            file=self._special(C.llama_vocab_fim_sep),
        )
        template = C.llama_model_chat_template(model.handle, b"rerank")
        self._rerank_template = template.decode("utf-8", "replace") if template else ""
        # WordPiece ends each text with its separator
        ends_with_it = C.llama_vocab_type(self._handle) == C.LLAMA_VOCAB_TYPE_WPM
        separator = self._special(C.llama_vocab_sep)
        adds_it = bool(C.llama_vocab_get_add_sep(self._handle)) and not ends_with_it
        self._separator = [separator] if adds_it and separator is not None else []

    @property
    def has_infill_sampler(self) -> bool:
        """True if llama.cpp's sampler for infill can sample from this vocabulary."""
        ends = (C.llama_vocab_eot, C.llama_vocab_eos)
        if self.infill_tokens is None or all(self._special(get) is None for get in ends):
            return False
        buffer = ctypes.create_string_buffer(_INFILL_PIECE_BYTES)
        pieces = (
            C.llama_token_to_piece(self._handle, token, buffer, len(buffer), 0, False)
            for token in range(self.vocab_size)
        )
        return all(size >= 0 for size in pieces)

    def _special(self, get: Callable[[Any], int]) -> int | None:
        token = int(get(self._handle))
        return token if token >= 0 else None

    def _text(self, token: int) -> str:
        if token < 0:
            return ""
        return self._piece(token, special=True).decode("utf-8", "replace")

    def encode(self, text: str) -> list[int]:
        """See Tokenizer.encode. Raises InvalidRequest for text that cannot be encoded as UTF-8."""
        tokens = self._tokens(text, add_special=False, parse_special=True)
        if self._add_bos and tokens[:1] != [self._bos_id]:
            tokens.insert(0, self._bos_id)
        return tokens

    def encode_for_embedding(self, text: str) -> list[int]:
        """See Tokenizer.encode_for_embedding. Raises InvalidRequest like `encode`."""
        return self._tokens(text, add_special=True, parse_special=False)

    def encode_pair(self, query: str, document: str) -> list[int]:
        """See PairTokenizer. Raises InvalidRequest like `encode`.

        By the model's own template, which has no special tokens for BERT: [CLS] query [SEP]
        document [SEP], and for RoBERTa: <s> query </s> </s> document </s>.
        """
        if self._rerank_template:
            marks = {"{query}": query, "{document}": document}
            parts = re.split(r"(\{query\}|\{document\})", self._rerank_template)
            text = "".join(marks.get(part, part) for part in parts)
            return self._tokens(text, add_special=False, parse_special=True)
        first, second = map(self.encode_for_embedding, (query, document))
        if self._add_bos and second[:1] == [self._bos_id]:
            del second[0]
        return [*first, *self._separator, *second]

    def _tokens(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        try:
            utf8 = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the prompt is not valid Unicode: {error}") from error
        # a token covers at least one byte; the extra entries are for a space prefix and special
        # tokens
        ids = np.empty(len(utf8) + 8, dtype=np.int32)
        pointer = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        count = C.llama_tokenize(
            self._handle, utf8, len(utf8), pointer, len(ids), add_special, parse_special
        )
        if count < 0:
            raise InvalidRequest(f"the prompt cannot be tokenized (llama.cpp returned {count})")
        tokens: list[int] = ids[:count].tolist()
        return tokens

    def piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token, special=False)
        return piece

    def id_to_token(self, token: int) -> bytes:
        return bytes(C.llama_vocab_get_text(self._handle, token))

    def _piece(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        size = C.llama_token_to_piece(self._handle, token, buffer, len(buffer), 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = C.llama_token_to_piece(self._handle, token, buffer, len(buffer), 0, special)
        return buffer.raw[: max(0, size)]
