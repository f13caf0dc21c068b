"""Builds a tokenizer of the `tokenizers` library from the vocabulary of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.gguf.file import GgufFile
from localgen.backends.formats.gguf.pre_tokenizer import PRE_TOKENIZERS, PreTokenizer
from localgen.backends.formats.hf.tokenizer import HfTokenizer

_SPACE = "▁"
# token types of GGUF; tokens of other types, such as unused, have no text
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_VISIBLE_TYPES = frozenset({_NORMAL, _USER_DEFINED, _BYTE})
# most files give one of several end tokens; as in llama.cpp, the others are known by their text
_EOG_TOKENS = frozenset(
    {
        "</s>",
        "<eos>",
        "<EOT>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<｜end▁of▁sentence｜>",
        "<|fim_pad|>",
        "<fim_pad>",
        "<|repo_name|>",
        "<reponame>",
        "<|file_sep|>",
    }
)
# all other special tokens of Phi-3 strip the white space after them
_PHI_3_NO_RSTRIP = frozenset({"<unk>", "<s>", "<|endoftext|>"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _GgufVocabulary:
    """Texts, types and, for SentencePiece, scores by token id; ids by text."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    ids: dict[str, int]

    def special_token(
        self, fields: ConfigFields, name: str, default: int | None = None
    ) -> int | None:
        """Id of a special token, or None if it is not set."""
        token = fields.values.get(name, default)
        if token is None:
            return None
        if not isinstance(token, int) or not 0 <= token < len(self.tokens):
            raise fields.invalid_value(name, f"one of {len(self.tokens):,} tokens")
        return token

    def token_text(self, token: int | None) -> str:
        return "" if token is None else self.tokens[token]


def read_gguf_tokenizer(file: GgufFile, vocab_size: int) -> HfTokenizer:
    """Build the tokenizer of a GGUF file. vocab_size: rows of the embedding.

    Raises LoadFailed if a key is missing or invalid, or the kind of tokenizer is not supported.
    """
    fields = file.section("tokenizer.ggml.")
    kind = fields.string("model")
    if kind not in ("gpt2", "llama"):
        raise fields.load_error(f"tokenizer {kind!r} is not supported, only gpt2 and llama")
    pieces = kind == "llama"
    vocabulary = _read_vocabulary(fields, with_scores=pieces)
    pre = PreTokenizer((), add_bos=True) if pieces else _pre_tokenizer(fields)
    bos = vocabulary.special_token(fields, "bos_token_id", 1 if pieces else None)
    eos = vocabulary.special_token(fields, "eos_token_id", 2 if pieces else None)
    try:
        tokenizer = (
            _sentencepiece_bpe(fields, vocabulary)
            if pieces
            else _byte_level_bpe(fields, vocabulary, pre)
        )
        _add_tokens(tokenizer, vocabulary, file)
    except LoadFailed:
        raise
    except Exception as error:  # the library raises nothing more specific
        reason = " ".join(str(error).split())
        raise fields.load_error(f"the tokenizer cannot be built: {reason}") from None
    ends = {eos, *(vocabulary.special_token(fields, f"{name}_token_id") for name in ("eot", "eom"))}
    ends.update(vocabulary.ids.get(text) for text in _EOG_TOKENS)
    return HfTokenizer(
        tokenizer,
        source=file.path,
        vocab_size=vocab_size,
        bos=vocabulary.token_text(bos),
        eos=vocabulary.token_text(eos),
        end_ids=frozenset(token for token in ends if token is not None),
        add_bos=fields.flag("add_bos_token", pre.add_bos),
        byte_level=not pieces,
        hidden_ids=frozenset(
            i for i, kind in enumerate(vocabulary.types) if kind not in _VISIBLE_TYPES
        ),
        infill={
            name: token
            for name in ("pre", "suf", "mid", "rep", "sep")
            if (token := vocabulary.special_token(fields, f"fim_{name}_token_id")) is not None
        },
    )


def _read_vocabulary(fields: ConfigFields, *, with_scores: bool) -> _GgufVocabulary:
    texts = fields.strings("tokens")
    # as in llama.cpp: an empty token keeps its id under a placeholder
    tokens = [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]
    ids = {text: token for token, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(text for token, text in enumerate(tokens) if ids[text] != token)
        raise fields.load_error(f"{fields.prefix}tokens has {twice!r} twice")
    types = _number_list(fields, "token_type", len(tokens), [_NORMAL] * len(tokens))
    types = [
        _CONTROL if text in _EOG_TOKENS and kind != _UNKNOWN else kind
        for text, kind in zip(tokens, types, strict=True)
    ]
    scores = _number_list(fields, "scores", len(tokens), None) if with_scores else []
    return _GgufVocabulary(tokens=tokens, types=types, scores=scores, ids=ids)


def _number_list(
    fields: ConfigFields, key: str, length: int, default: list[Any] | None
) -> list[Any]:
    """A list with one number per token."""
    values = fields.values.get(key, default)
    if values is None:
        raise LoadFailed(f"{fields.path} has no {fields.prefix}{key}")
    if not isinstance(values, list) or any(isinstance(value, str) for value in values[:1]):
        raise fields.invalid_value(key, "a list of numbers")
    if len(values) < length:
        raise fields.load_error(
            f"{fields.prefix}{key} has {len(values)} values, {length} are needed"
        )
    return values[:length]


def _pre_tokenizer(fields: ConfigFields) -> PreTokenizer:
    name = fields.string("pre", "default")
    if name not in PRE_TOKENIZERS:
        raise fields.load_error(
            f"pre-tokenizer {name!r} is not supported, only {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level_bpe(
    fields: ConfigFields, vocabulary: _GgufVocabulary, pre: PreTokenizer
) -> tokenizers.Tokenizer:
    """Byte-level BPE (GPT-2): regular expressions split words, listed merges join their bytes."""
    merges = [_parse_merge(fields, vocabulary, text) for text in fields.strings("merges")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.ignore_merges)
    )
    cuts = [pre_tokenizers.Split(Regex(text), "isolated") for text in pre.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def _parse_merge(fields: ConfigFields, vocabulary: _GgufVocabulary, text: str) -> tuple[str, str]:
    left, _, right = text[1:].partition(" ")
    left = text[:1] + left
    # invalid merges can abort the process within the library
    if not all(part in vocabulary.ids for part in (left, right, left + right)):
        raise fields.load_error(
            f"{fields.prefix}merges has {text!r}, which does not join two tokens"
        )
    return left, right


def _sentencepiece_bpe(fields: ConfigFields, vocabulary: _GgufVocabulary) -> tokenizers.Tokenizer:
    """SentencePiece BPE: characters are merged to the token with the highest score."""
    unknown = vocabulary.special_token(fields, "unknown_token_id", 0)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges_by_score(vocabulary),
            unk_token=vocabulary.token_text(unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend(_SPACE)] if fields.flag("add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    return tokenizer


def _merges_by_score(vocabulary: _GgufVocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that make a third, by descending score of the result."""
    ids, found = vocabulary.ids, []
    for token, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind == _BYTE:
            continue
        score = -vocabulary.scores[token]
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in ids and right in ids:
                found.append((score, ids[left], ids[right], left, right))
    return [(left, right) for _, _, _, left, right in sorted(found)]


def _add_tokens(
    tokenizer: tokenizers.Tokenizer, vocabulary: _GgufVocabulary, file: GgufFile
) -> None:
    """Add special and user-defined tokens, which are matched before the text is split."""
    name = str(file.section("general.name").values.get("", "")).lower()
    phi_3 = "phi-3" in name or "phi3" in name

    def added(kinds: Sequence[int], special: bool) -> list[AddedToken]:
        return [
            AddedToken(
                text,
                special=special,
                normalized=False,
                rstrip=phi_3 and text not in _PHI_3_NO_RSTRIP,
            )
            for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind in kinds
        ]

    tokenizer.add_tokens(added((_USER_DEFINED,), False))
    tokenizer.add_special_tokens(added((_CONTROL, _UNKNOWN), True))
