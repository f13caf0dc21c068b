"""Draft models for the built-in model, suitable and unsuitable ones."""

from __future__ import annotations

from pathlib import Path

import gguf
from gguf_files import UINT32, rewrite
from models import TINY_GGUF

DRAFT_GGUF = Path(__file__).parent / "data" / "tiny-draft.gguf"
_CONTROL = 1


def other_token(target: Path) -> Path:
    """The built-in model with another text for one of its control tokens."""
    tokens = gguf.GGUFReader(TINY_GGUF).fields["tokenizer.ggml.tokens"].contents()
    tokens[_CONTROL] = "<|sesame|>"
    return rewrite(target, {"tokenizer.ggml.tokens": (tokens, gguf.GGUFValueType.ARRAY)})


def other_end(target: Path) -> Path:
    """The built-in model with another end-of-sequence token."""
    return rewrite(target, {"tokenizer.ggml.eos_token_id": (0, UINT32)})


def short_context(target: Path, tokens: int) -> Path:
    """The same model, trained for `tokens` tokens."""
    return rewrite(target, {"llama.context_length": (tokens, UINT32)})
