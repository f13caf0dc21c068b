"""A Hugging Face tokenizer.json as the vocabulary of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import TokenType

from localgen.backends.errors import LoadFailed
from localgen.quant.checkpoint import read_json, read_optional_json

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_SINGLE_DIGITS = _SPLIT.format(numbers=r"\p{N}")
_SPLIT_TRIPLE_DIGITS = _SPLIT.format(numbers=r"\p{N}{1,3}")
_GPT2_BYTES = "ByteLevel with its own expression"
_DIGITS = "Digits one by one"

# llama.cpp's name of (steps before the merges, whole words skip the merges)
_PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool], str] = {
    ((_SPLIT_SINGLE_DIGITS, "ByteLevel"), False): "qwen2",
    ((_SPLIT_TRIPLE_DIGITS, "ByteLevel"), True): "llama-bpe",
    ((_SPLIT_TRIPLE_DIGITS, "ByteLevel"), False): "smaug-bpe",
    ((_GPT2_BYTES,), False): "gpt-2",
    ((_DIGITS, _GPT2_BYTES), False): "smollm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Tokens by id, and what a GGUF file says of them.

    pre: llama.cpp's name of the pre-tokenizer. end_ids: every token that ends an answer, the
    tokenizer's own end token first. chat_template: None where the model has none.
    """

    pre: str
    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    merges: tuple[str, ...]
    bos_id: int | None
    pad_id: int | None
    end_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | Sequence[dict[str, str]] | None


def read_vocabulary(folder: Path, config: dict[str, Any], generation: dict[str, Any]) -> Vocabulary:
    """The vocabulary of a model folder, filled up with unused tokens to the model's size.

    config, generation: contents of config.json and generation_config.json. LoadFailed: a
    tokenizer llama.cpp would split text with otherwise, or one larger than the embeddings.
    """
    path = folder / "tokenizer.json"
    tokenizer = read_json(path)
    settings = read_optional_json(folder / "tokenizer_config.json")
    try:
        pre = _pre_tokenizer(path, tokenizer)
        ids = {**tokenizer["model"]["vocab"]}
        ids.update({added["content"]: added["id"] for added in tokenizer.get("added_tokens", [])})
        tokens, types = _token_list(path, tokenizer, ids, config["vocab_size"])
        merges = tuple(_merge(pair) for pair in tokenizer["model"]["merges"])
        add_bos = _add_bos(tokenizer, settings)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise LoadFailed(f"{path} is not laid out as a tokenizer: {error!r}") from None
    special = {**config, **generation}
    bos_id = _special_id("bos", settings, ids, special)
    if add_bos and bos_id is None:
        raise LoadFailed(f"{folder} asks for a first token but tokenizer_config.json names none")
    return Vocabulary(
        pre=pre,
        tokens=tokens,
        types=types,
        merges=merges,
        bos_id=bos_id,
        pad_id=_special_id("pad", settings, ids, special),
        end_ids=_end_ids(folder, settings, ids, special),
        add_bos=add_bos,
        chat_template=_chat_template(folder, settings),
    )


def _pre_tokenizer(path: Path, tokenizer: dict[str, Any]) -> str:
    model = tokenizer["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise LoadFailed(
            f"{path}: only byte-level BPE tokenizers can be converted, this is "
            f"{model['type']}{' with byte fallback' if model.get('byte_fallback') else ''}"
        )
    if tokenizer.get("normalizer") is not None:
        kind = tokenizer["normalizer"]["type"]
        raise LoadFailed(f"{path}: llama.cpp would not apply the normalizer {kind}")
    step = tokenizer["pre_tokenizer"] or {"type": "none"}
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    names = tuple(_step_name(step) for step in steps)
    pre = _PRE_TOKENIZERS.get((names, bool(model.get("ignore_merges"))))
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
            return _GPT2_BYTES if step.get("use_regex", True) else "ByteLevel"
        case {"type": "Digits", "individual_digits": True}:
            return _DIGITS
        case {
            "type": "Split",
            "pattern": {"Regex": str(regex)},
            "behavior": "Isolated",
            "invert": False,
        }:
            return regex
    return str(step)


def _token_list(
    path: Path, tokenizer: dict[str, Any], ids: dict[str, int], size: int
) -> tuple[tuple[str, ...], tuple[TokenType, ...]]:
    largest = max(ids.values())
    if largest >= size or min(ids.values()) < 0:
        raise LoadFailed(f"{path} has token {largest}, the model's vocabulary ends at {size - 1}")
    tokens = [f"[PAD{token_id}]" for token_id in range(size)]
    types = [TokenType.UNUSED] * size
    for token, token_id in ids.items():
        tokens[token_id], types[token_id] = token, TokenType.NORMAL
    for added in tokenizer.get("added_tokens", []):
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    return tuple(tokens), tuple(types)


def _merge(pair: str | list[str]) -> str:
    """A merge as GGUF writes it. Byte-level tokens hold no space, so one joins them."""
    return pair if isinstance(pair, str) else " ".join(pair)


def _add_bos(tokenizer: dict[str, Any], settings: dict[str, Any]) -> bool:
    if isinstance(settings.get("add_bos_token"), bool):
        return bool(settings["add_bos_token"])
    step = tokenizer.get("post_processor") or {}
    for part in step.get("processors", [step]):
        if part.get("type") == "TemplateProcessing" and "SpecialToken" in part["single"][0]:
            return True
    return False


def _special_id(
    kind: str, settings: dict[str, Any], ids: dict[str, int], special: dict[str, Any]
) -> int | None:
    token = settings.get(f"{kind}_token")
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str) and text in ids:
        return ids[text]
    token_id = special.get(f"{kind}_token_id")
    return token_id if isinstance(token_id, int) and token_id >= 0 else None


def _end_ids(
    folder: Path, settings: dict[str, Any], ids: dict[str, int], special: dict[str, Any]
) -> tuple[int, ...]:
    listed = special.get("eos_token_id")
    end_ids = listed if isinstance(listed, list) else [listed] if listed is not None else []
    own = _special_id("eos", settings, ids, {})
    ordered = tuple(dict.fromkeys(([own] if own is not None else []) + end_ids))
    if any(not isinstance(end, int) or end < 0 for end in ordered):
        raise LoadFailed(f"{folder} names end tokens {end_ids}, which are no token ids")
    if not ordered:
        raise LoadFailed(f"{folder} names no end token, an answer would never stop")
    if len(ordered) > 3:
        raise LoadFailed(f"{folder} names {len(ordered)} end tokens, a GGUF file holds 3")
    return ordered


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | Sequence[dict[str, str]] | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    return settings.get("chat_template")
