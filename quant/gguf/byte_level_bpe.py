"""Byte-level BPE tokenizers (GPT-2's kind): which of llama.cpp's pre-tokenizers theirs is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localgen.backends.errors import LoadFailed

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _tiktoken_pattern(number_pattern: str) -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number_pattern}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_WHITESPACE}"
    )


def _by_case_pattern(number_pattern: str, tail: str = "") -> str:
    """Words change from capitals to small letters once at most."""
    capitals, small = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{capitals}*{small}+{tail}|{before}{capitals}+{small}*{tail}|{number_pattern}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_WHITESPACE}"
    )


_SINGLE_DIGITS, _TRIPLE_DIGITS = _tiktoken_pattern(r"\p{N}"), _tiktoken_pattern(r"\p{N}{1,3}")
_BYTE_LEVEL = "ByteLevel"
_BYTE_LEVEL_GPT2 = "ByteLevel with its own expression"
_DIGITS = "Digits one by one"
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGITS, _BYTE_LEVEL)

# llama.cpp's name of (steps before the merges, whole words skip the merges)
_PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool], str] = {
    ((_SINGLE_DIGITS, _BYTE_LEVEL), False): "qwen2",
    ((_TRIPLE_DIGITS, _BYTE_LEVEL), True): "llama-bpe",
    ((_TRIPLE_DIGITS, _BYTE_LEVEL), False): "smaug-bpe",
    ((_by_case_pattern(r"\p{N}"), _BYTE_LEVEL), True): "tekken",
    ((_by_case_pattern(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"), _BYTE_LEVEL), False): "gpt-4o",
    ((_BYTE_LEVEL_GPT2,), False): "gpt-2",
    ((_DIGITS, _BYTE_LEVEL_GPT2), False): "smollm",
    (_DEEPSEEK_CODER, False): "deepseek-coder",
}


def detect_pre_tokenizer(path: Path, tokenizer_json: dict[str, Any]) -> str:
    """llama.cpp's name of what cuts text into words. tokenizer_json: contents of tokenizer.json.

    LoadFailed, naming its steps: llama.cpp has none that does the same.
    """
    normalizer = tokenizer_json.get("normalizer") or {"type": "Sequence", "normalizers": []}
    for change in normalizer.get("normalizers", [normalizer]):
        # NFC changes text that hardly anybody types: llama.cpp's users of Qwen do without
        if change["type"] != "NFC":
            raise LoadFailed(f"{path}: llama.cpp would not apply the normalizer {change['type']}")
    step = tokenizer_json["pre_tokenizer"] or {"type": "none"}
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    names = tuple(_step_name(step) for step in steps)
    pre = _PRE_TOKENIZERS.get((names, bool(tokenizer_json["model"].get("ignore_merges"))))
    if pre is None:
        known = ", ".join(_PRE_TOKENIZERS.values())
        raise LoadFailed(
            f"{path}: unknown pre-tokenizer {' then '.join(names)} (known are those of {known})"
        )
    return pre


def _step_name(step: dict[str, Any]) -> str:
    """What a pre-tokenizer step does; settings that llama.cpp has no word for stay visible."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return _BYTE_LEVEL_GPT2 if step.get("use_regex", True) else _BYTE_LEVEL
        case {"type": "Digits", "individual_digits": True}:
            return _DIGITS
        case {
            "type": "Split",
            "pattern": {"Regex": str(regex)},
            "behavior": "Isolated",
            "invert": False,
        }:
            return regex
        # to keep what matches is the same where everything does
        case {
            "type": "Split",
            "pattern": {"Regex": str(regex)},
            "behavior": "Removed",
            "invert": True,
        } if regex.endswith(_WHITESPACE):
            return regex
    return str(step)
