"""The vocabulary of a GGUF file, from a Hugging Face tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gguf import TokenType

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.hf.folder import read_json, read_optional_json
from localgen.quant.gguf.byte_level_bpe import detect_pre_tokenizer
from localgen.quant.gguf.sentencepiece_bpe import (
    is_sentencepiece,
    sentencepiece_scores,
    space_prefix,
)

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """Tokens by id, and their metadata.

    tokenizer_model: llama.cpp's name, gpt2 for byte-level merges, llama for SentencePiece scores.
    pre_tokenizer: llama.cpp's name. merges: empty for SentencePiece. scores: None for byte-level
    BPE. eos_ids: all end tokens, the tokenizer's own first. add_space_prefix: for SentencePiece
    only. special_tokens_strip_right: special tokens strip the white space after them.
    """

    tokenizer_model: Literal["gpt2", "llama"]
    pre_tokenizer: str
    tokens: tuple[str, ...]
    token_types: tuple[TokenType, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...] | None
    bos_id: int | None
    pad_id: int | None
    unk_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool
    add_space_prefix: bool | None
    special_tokens_strip_right: bool
    chat_template: str | Sequence[dict[str, str]] | None


def read_gguf_vocabulary(
    folder: Path, vocab_size: int, config: dict[str, Any], generation: dict[str, Any]
) -> GgufVocabulary:
    """Read the vocabulary of a model folder, padded with unused tokens to vocab_size.

    config, generation: contents of config.json and generation_config.json. Raises LoadFailed for a
    tokenizer that llama.cpp cannot reproduce, or one larger than the embeddings.
    """
    path = folder / "tokenizer.json"
    tokenizer = read_json(path)
    settings = read_optional_json(folder / "tokenizer_config.json")
    template = _chat_template(folder, settings)
    try:
        pieces = _check_bpe_is_sentencepiece(path, tokenizer)
        pre = "default" if pieces else detect_pre_tokenizer(path, tokenizer)
        prefix = space_prefix(path, tokenizer) if pieces else "never"
        ids = {**tokenizer["model"]["vocab"]}
        ids.update({added["content"]: added["id"] for added in tokenizer.get("added_tokens", [])})
        tokens, types = _token_list(path, tokenizer, ids, vocab_size)
        scores = sentencepiece_scores(path, tokenizer, vocab_size) if pieces else None
        merges = () if pieces else tuple(_merge_text(pair) for pair in tokenizer["model"]["merges"])
        "".join((*tokens, *merges)).encode()  # TypeError or ValueError if one is no text
        add_bos = _add_bos(tokenizer, settings)
        strips = any(added.get("rstrip") for added in tokenizer.get("added_tokens", []))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise LoadFailed(f"{path} is not a valid tokenizer: {error!r}") from None
    special = {**config, **generation}
    bos_id = _special_id("bos", settings, ids, special)
    if add_bos and bos_id is None:
        raise LoadFailed(f"{folder} adds a BOS token, but tokenizer_config.json names none")
    # "first" has no effect in a chat, which starts with a special token
    prefixed = prefix == "always" or (prefix == "first" and template is None)
    return GgufVocabulary(
        tokenizer_model="llama" if pieces else "gpt2",
        pre_tokenizer=pre,
        tokens=tokens,
        token_types=types,
        merges=merges,
        scores=scores,
        bos_id=bos_id,
        pad_id=_special_id("pad", settings, ids, special),
        unk_id=ids.get(tokenizer["model"].get("unk_token")) if pieces else None,
        eos_ids=_eos_ids(folder, settings, ids, special),
        add_bos=add_bos,
        add_space_prefix=prefixed if pieces else None,
        special_tokens_strip_right=strips,
        chat_template=template,
    )


def _check_bpe_is_sentencepiece(path: Path, tokenizer: dict[str, Any]) -> bool:
    kind = tokenizer["model"]["type"]
    if kind != "BPE":
        raise LoadFailed(f"{path}: only BPE tokenizers can be converted, this is {kind}")
    return is_sentencepiece(tokenizer["model"])


def _token_list(
    path: Path, tokenizer: dict[str, Any], ids: dict[str, int], size: int
) -> tuple[tuple[str, ...], tuple[TokenType, ...]]:
    largest = max(ids.values())
    if largest >= size or min(ids.values()) < 0:
        raise LoadFailed(f"{path} has token {largest}, the model's vocabulary ends at {size - 1}")
    pieces = is_sentencepiece(tokenizer["model"])
    tokens = [f"[PAD{token_id}]" for token_id in range(size)]
    types = [TokenType.UNUSED] * size
    for token, token_id in ids.items():
        is_byte = pieces and _BYTE.fullmatch(token)
        tokens[token_id], types[token_id] = token, TokenType.BYTE if is_byte else TokenType.NORMAL
    for added in tokenizer.get("added_tokens", []):
        token_id = added["id"]
        types[token_id] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        if pieces and not added["special"]:
            # llama.cpp matches these in the raw text
            tokens[token_id] = added["content"].replace("▁", " ")
    unknown = tokenizer["model"].get("unk_token")
    if pieces and unknown is not None:
        types[ids[unknown]] = TokenType.UNKNOWN
    return tuple(tokens), tuple(types)


def _merge_text(pair: str | list[str]) -> str:
    """A merge in GGUF's format: joined by a space, which byte-level tokens never contain."""
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


def _eos_ids(
    folder: Path, settings: dict[str, Any], ids: dict[str, int], special: dict[str, Any]
) -> tuple[int, ...]:
    listed = special.get("eos_token_id")
    end_ids = listed if isinstance(listed, list) else [listed] if listed is not None else []
    own = _special_id("eos", settings, ids, {})
    ordered = tuple(dict.fromkeys(([own] if own is not None else []) + end_ids))
    if any(not isinstance(end, int) or end < 0 for end in ordered):
        raise LoadFailed(f"{folder} names end tokens {end_ids}, which are not token ids")
    if not ordered:
        raise LoadFailed(f"{folder} names no end token: generation would never stop")
    if len(ordered) > 3:
        raise LoadFailed(f"{folder} names {len(ordered)} end tokens, a GGUF file holds 3")
    return ordered


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | Sequence[dict[str, str]] | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    return settings.get("chat_template")
