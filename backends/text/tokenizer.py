"""The tokenizer interface of the engine."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from localgen.backends.infill import InfillTokens


class Tokenizer(Protocol):
    """Converts text to token ids and back; implemented by each runner. Thread-safe."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end generation."""
        ...

    @property
    def bos(self) -> str:
        """Text of the begin-of-sequence token; empty if there is none."""
        ...

    @property
    def eos(self) -> str:
        """Text of the end-of-sequence token; empty if there is none."""
        ...

    @property
    def infill_tokens(self) -> InfillTokens | None:
        """Ids of the tokens for infill, or None if the model has none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode a prompt.

        Special tokens in the text are parsed. The begin-of-sequence token is added if the model
        expects one and the text does not start with it.
        """
        ...

    def encode_for_embedding(self, text: str) -> list[int]:
        """Encode a text to embed: special tokens are not parsed in it, but added around it."""
        ...

    def piece(self, token: int) -> bytes:
        """Bytes of a token in the generated text; empty for control tokens."""
        ...


@runtime_checkable
class PairTokenizer(Protocol):
    """Tokenizer of a reranking model."""

    def encode_pair(self, query: str, document: str) -> list[int]:
        """Encode a query and a document in the form that the model was trained with."""
        ...
