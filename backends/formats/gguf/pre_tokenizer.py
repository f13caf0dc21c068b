"""Pre-tokenizers of byte-level BPE, by their names in GGUF files (tokenizer.ggml.pre)."""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _tiktoken(numbers: str) -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{WHITESPACE}"
    )


def _case_split(numbers: str, tail: str = "") -> str:
    """Words change from upper to lower case at most once."""
    capitals, small = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{capitals}*{small}+{tail}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{capitals}+{small}*{tail}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{WHITESPACE}"
    )


_SINGLE_DIGITS, _TRIPLE_DIGITS = _tiktoken(r"\p{N}"), _tiktoken(r"\p{N}{1,3}")
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """patterns: applied in order, each splits the pieces left by the previous one.

    ignore_merges: a word that is a token as a whole is not merged. add_bos: default for files that
    do not set it.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_LLAMA_3 = PreTokenizer((_TRIPLE_DIGITS,), ignore_merges=True, add_bos=True)
_QWEN_2 = PreTokenizer((_SINGLE_DIGITS,))
_SPLIT_DIGITS = PreTokenizer((r"\p{N}", GPT_2))

PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "falcon3": _LLAMA_3,
    "smaug-bpe": PreTokenizer((_TRIPLE_DIGITS,)),
    "dbrx": PreTokenizer((_TRIPLE_DIGITS,)),
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "megrez": _QWEN_2,
    "gpt-2": PreTokenizer((GPT_2,)),
    "smollm": _SPLIT_DIGITS,
    "starcoder": _SPLIT_DIGITS,
    "refact": _SPLIT_DIGITS,
    "tekken": PreTokenizer((_case_split(r"\p{N}"),), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_case_split(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)),
    "deepseek-coder": PreTokenizer(
        ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
}
