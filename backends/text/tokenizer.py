"""What the engine needs of a model's vocabulary."""

from __future__ import annotations

from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back; each runner brings its own. Safe to call from any thread."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids with which the model ends an answer (end of generation)."""
        ...

    @property
    def bos(self) -> str:
        """Text of the begin-of-sequence token; empty if there is none."""
        ...

    @property
    def eos(self) -> str:
        """Text of the end-of-sequence token; empty if there is none."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a whole prompt.

        Special tokens written in the text count as such; the begin-of-sequence token is
        put in front where the model wants one and the text does not start with it.
        """
        ...

    def encode_for_embedding(self, text: str) -> list[int]:
        """Token ids of a text that is no prompt but to be understood, with the special tokens
        that the model wants around one."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for in an answer; empty for control tokens."""
        ...
