"""Byte-level BPE tokenizers (as GPT-2's): detection of the matching llama.cpp pre-tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.gguf.pre_tokenizer import GPT_2, PRE_TOKENIZERS, WHITESPACE

_BYTE_LEVEL = "ByteLevel"
_BYTE_LEVEL_GPT2 = "ByteLevel with its own expression"
_DIGITS = "Digits one by one"


def _step_names(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the steps by which tokenizer.json splits text at these patterns."""
    names = tuple(_DIGITS if pattern == r"\p{N}" else pattern for pattern in patterns)
    return (*names[:-1], _BYTE_LEVEL_GPT2) if names[-1] == GPT_2 else (*names, _BYTE_LEVEL)


# llama.cpp's names by (steps before the merges, ignore_merges), the first of several
_PRE_TOKENIZERS = {
    (_step_names(pre.patterns), pre.ignore_merges): name
    for name, pre in reversed(PRE_TOKENIZERS.items())
    if name != "default"
}


def detect_pre_tokenizer(path: Path, tokenizer_json: dict[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer. tokenizer_json: contents of tokenizer.json.

    Raises LoadFailed with its steps if llama.cpp has no equivalent.
    """
    normalizer = tokenizer_json.get("normalizer") or {"type": "Sequence", "normalizers": []}
    for change in normalizer.get("normalizers", [normalizer]):
        # NFC rarely changes typed text, and llama.cpp omits it for Qwen
        if change["type"] != "NFC":
            raise LoadFailed(f"{path}: llama.cpp does not support the normalizer {change['type']}")
    step = tokenizer_json["pre_tokenizer"] or {"type": "none"}
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    names = tuple(_step_name(step) for step in steps)
    pre = _PRE_TOKENIZERS.get((names, bool(tokenizer_json["model"].get("ignore_merges"))))
    if pre is None:
        known = ", ".join(_PRE_TOKENIZERS.values())
        raise LoadFailed(
            f"{path}: unknown pre-tokenizer {' then '.join(names)} (supported are those of {known})"
        )
    return pre


def _step_name(step: dict[str, Any]) -> str:
    """Name of a pre-tokenizer step; a step with unknown settings is named by its JSON."""
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
        # the same as isolating the matches if the pattern matches everything
        case {
            "type": "Split",
            "pattern": {"Regex": str(regex)},
            "behavior": "Removed",
            "invert": True,
        } if regex.endswith(WHITESPACE):
            return regex
    return str(step)
