"""Load drafters: validate the options, check a draft model's vocabulary, fall back to n-grams."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from localgen.backends.engine.loaded_model import LoadedDraftModel, LoadedModel
from localgen.backends.engine.speculation.draft_model import ModelDrafter
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.model_info import (
    DRAFT_NGRAM,
    DRAFT_NONE,
    DraftModelRequest,
    LoadOptions,
    ModelLoadRequest,
)

# rows of an embedding beyond the tokenizer's last token; GGUF files name them so
_PADDING = re.compile(rb"(\[PAD\d+\])?")
_Result = TypeVar("_Result")


def validate_draft_options(request: ModelLoadRequest) -> None:
    """Raises InvalidRequest if the drafter is unknown."""
    options = request.options
    if request.draft is None and options.draft not in (None, DRAFT_NGRAM, DRAFT_NONE):
        raise InvalidRequest(
            f"draft is {options.draft!r}, it must be {DRAFT_NGRAM} or {DRAFT_NONE}, or a model",
            param="draft",
        )


def require_prefix_cache(request: DraftModelRequest, prefix_cache: bool) -> None:
    """Raises InvalidRequest without a prefix cache: only then can runners drop rejected drafts."""
    if not prefix_cache:
        raise InvalidRequest(
            f"{request.name} cannot draft with --no-prefix-cache: without it, rejected draft "
            "tokens cannot be removed from the KV cache: leave out one of the two options",
            param="prefix_cache",
        )


def create_drafters(model: LoadedModel) -> list[Drafter]:
    """The drafters that a model was loaded with: n-gram, and the draft model if there is one."""
    drafters: list[Drafter] = []
    if model.info.options.draft not in (None, DRAFT_NONE):
        drafters.append(NgramDrafter())
    if (draft := model.draft) is not None:
        size = draft.shared_vocab_size
        drafters.append(ModelDrafter(draft.runner, draft.info.name, shared_vocab_size=size))
    return drafters


class OptionalDraftLoader:
    """Runs the steps of loading a draft model. If an optional one fails, it leaves a note."""

    def __init__(self, request: DraftModelRequest | None) -> None:
        self._request = request
        self._failures: list[str] = []

    @property
    def request(self) -> DraftModelRequest:
        """The draft model to load; only within a step."""
        assert self._request is not None
        return self._request

    def run(self, step: Callable[[], _Result]) -> _Result | None:
        """The step's result. Returns None if no draft model was requested or an optional one
        failed; raises LocalgenError if a required one fails."""
        if self._request is None or self._failures:
            return None
        try:
            return step()
        except LocalgenError as error:
            if not self._request.optional:
                raise
            self._failures.append(f"using the n-gram drafter: {error.message}")
            return None

    def notes(
        self, draft: LoadedDraftModel | None, *, ctx: int, size_bytes: int
    ) -> tuple[str, ...]:
        """Warnings for the user. ctx, size_bytes: of the target model."""
        if draft is None:
            return tuple(self._failures)
        info = draft.info
        notes = []
        if info.ctx < ctx:
            notes.append(
                f"{info.name} was trained for {info.ctx:,} tokens and does not draft beyond them"
            )
        if info.size_bytes >= size_bytes:
            notes.append(
                f"{info.name} is no smaller than the target model: drafts will hardly be faster"
            )
        return tuple(notes)

    def resolved_options(self, options: LoadOptions, draft: LoadedDraftModel | None) -> LoadOptions:
        """The load options, with the n-gram drafter in place of a draft model that failed."""
        has_failed = self._request is not None and draft is None
        return replace(options, draft=DRAFT_NGRAM) if has_failed else options


class TokenizerVocabulary(Protocol):
    """A tokenizer whose tokens can be listed."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def id_to_token(self, token: int) -> bytes:
        """The vocabulary's spelling of a token, control tokens included; empty if it has none.
        Comparable only between models on the same runner."""
        ...


def require_same_vocabulary(
    target: TokenizerVocabulary, draft: TokenizerVocabulary, *, target_name: str, draft_name: str
) -> None:
    """Raises InvalidRequest, naming the first difference, if two vocabularies differ in a token,
    in their size without padding at the end, or in their BOS and EOS tokens."""
    difference = _difference(target, draft, target_name, draft_name)
    if difference is not None:
        raise InvalidRequest(
            f"{draft_name} cannot draft for {target_name}: {difference}: "
            "take a draft model of the same family, or leave --draft out",
            param="draft",
        )


def _difference(
    target: TokenizerVocabulary, draft: TokenizerVocabulary, target_name: str, draft_name: str
) -> str | None:
    target_tokens, draft_tokens = _tokens(target), _tokens(draft)
    for token, (ours, theirs) in enumerate(zip(target_tokens, draft_tokens, strict=False)):
        if ours != theirs:
            in_target = f"{_printable(ours)} in {target_name}"
            return f"token {token:,} is {_printable(theirs)} there and {in_target}"
    if len(target_tokens) != len(draft_tokens):
        return f"it has {len(draft_tokens):,} tokens, {target_name} has {len(target_tokens):,}"
    for name, own, its in (
        ("BOS", _bos(target), _bos(draft)),
        ("EOS", target.eos, draft.eos),
    ):
        if own != its:
            return f"its {name} token is {its or 'none'}, that of {target_name} {own or 'none'}"
    return None


def _tokens(tokenizer: TokenizerVocabulary) -> list[bytes]:
    """All tokens, without padding at the end."""
    tokens = [tokenizer.id_to_token(token) for token in range(tokenizer.vocab_size)]
    while tokens and _PADDING.fullmatch(tokens[-1]):
        tokens.pop()
    return tokens


def _bos(tokenizer: TokenizerVocabulary) -> str:
    """Tokens that encoding puts before every text, as text."""
    return b"".join(map(tokenizer.id_to_token, tokenizer.encode(""))).decode("utf-8", "replace")


def _printable(token: bytes) -> str:
    return repr(token.decode("utf-8", "replace"))
