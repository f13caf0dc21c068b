"""SentencePiece-style BPE tokenizers (Llama 2, Mistral 7B, Phi-3, Gemma) as llama.cpp's `llama`.

llama.cpp merges the pair that gives the token with the highest score; tokenizer.json lists the
merges, best first. Both are equivalent if the list has every pair that makes a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from localgen.backends.errors import LoadFailed

_SPACE = "▁"
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
# merge lists lack a few pairs, of tokens that do not occur in text
_MAX_MISSING_SHARE = 0.01

SpacePrefix = Literal["always", "first", "never"]


def is_sentencepiece(model: dict[str, Any]) -> bool:
    """model: the section `model` of tokenizer.json."""
    return model["type"] == "BPE" and bool(model.get("byte_fallback"))


def space_prefix(path: Path, tokenizer: dict[str, Any]) -> SpacePrefix:
    """Which segments of text between special tokens get a space prefix. Unlike llama.cpp, Metaspace
    adds none if the text starts with a space.

    tokenizer: contents of tokenizer.json. Raises LoadFailed for other normalizers.
    """
    normalizer = tokenizer.get("normalizer") or {"type": "Sequence", "normalizers": []}
    step = tokenizer.get("pre_tokenizer") or {"type": "none"}
    steps = normalizer.get("normalizers", [normalizer])
    # Gemma's step has no effect: its normalizer has replaced all spaces
    no_step = step["type"] == "none" or step.get("pattern") == {"String": " "}
    match steps:
        case [] if step["type"] == "Metaspace" and step.get("split") is False:
            scheme = step.get("prepend_scheme", "always")
            if step.get("replacement") == _SPACE and scheme in ("always", "first", "never"):
                return scheme  # type: ignore[no-any-return]
        case [first, second] if no_step and (first, second) == (_PREPEND, _REPLACE):
            return "always"
        case [only] if no_step and only == _REPLACE:
            return "never"
    raise LoadFailed(
        f"{path}: llama.cpp does not support normalization by "
        f"{_step_types(tokenizer.get('normalizer'))} and "
        f"{_step_types(tokenizer.get('pre_tokenizer'))}"
    )


def _step_types(step: Any) -> str:
    """Types of a step and of its inner steps."""
    if not isinstance(step, dict):
        return "nothing"
    inner = step.get("normalizers") or step.get("pretokenizers") or []
    return " ".join([str(step.get("type")), *(_step_types(part) for part in inner)])


def sentencepiece_scores(
    path: Path, tokenizer: dict[str, Any], vocab_size: int
) -> tuple[float, ...]:
    """Scores of vocab_size tokens, descending in the order of the merges that make them.

    Raises LoadFailed for merges that scores cannot express, or a byte without a token.
    """
    model = tokenizer["model"]
    ids: dict[str, int] = model["vocab"]
    for byte in range(256):
        if f"<0x{byte:02X}>" not in ids:
            raise LoadFailed(
                f"{path} has no token <0x{byte:02X}>, text with this byte would crash llama.cpp"
            )
    merges = [_split_merge(merge) for merge in model["merges"]]
    _check_merges_complete(path, ids, set(merges))
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    scores = [-float(len(merges) + 1)] * vocab_size
    for text, rank in ranks.items():
        scores[ids[text]] = -float(rank)
    return tuple(scores)


def _split_merge(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _check_merges_complete(path: Path, ids: dict[str, int], merges: set[tuple[str, str]]) -> None:
    ways = missing = 0
    for text in {left + right for left, right in merges}:
        for at in range(1, len(text)):
            pair = text[:at], text[at:]
            if pair[0] in ids and pair[1] in ids:
                ways += 1
                missing += pair not in merges
    if missing > _MAX_MISSING_SHARE * ways:
        raise LoadFailed(
            f"{path}: {missing:,} of {ways:,} pairs that make a token are not merges, but "
            "llama.cpp would merge them: only merges of SentencePiece scores can be converted"
        )
