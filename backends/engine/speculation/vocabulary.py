"""Whether two models speak of the same tokens, as a draft model and its target must."""

from __future__ import annotations

import re
from typing import Protocol

from localgen.backends.errors import InvalidRequest

# rows of an embedding beyond the tokenizer; GGUF files write them so
_PADDING = re.compile(rb"(\[PAD\d+\])?")
_HINT = "take a draft model of the same family, or leave --draft out"


class TokenizerVocabulary(Protocol):
    """A Tokenizer that tells its tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def id_to_token(self, token: int) -> bytes:
        """How the vocabulary writes a token, control tokens too; empty: it has none there. Only to
        be compared with that of another model on the same runner."""
        ...


def require_same_vocabulary(
    target: TokenizerVocabulary, draft: TokenizerVocabulary, *, target_name: str, draft_name: str
) -> None:
    """InvalidRequest, naming both models and what differs: a token, their number but for padding
    at the end, or those that begin and end a text."""
    difference = _difference(target, draft, target_name, draft_name)
    if difference is not None:
        raise InvalidRequest(
            f"{draft_name} cannot draft for {target_name}: {difference}: {_HINT}", param="draft"
        )


def _difference(
    target: TokenizerVocabulary, draft: TokenizerVocabulary, target_name: str, draft_name: str
) -> str | None:
    ours, theirs = _tokens(target), _tokens(draft)
    for token, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            in_target = f"{_printable(one)} in {target_name}"
            return f"token {token:,} is {_printable(other)} there and {in_target}"
    if len(ours) != len(theirs):
        return f"it has {len(theirs):,} tokens, {target_name} has {len(ours):,}"
    for role, own, its in (
        ("begins", _bos_prefix(target), _bos_prefix(draft)),
        ("ends", target.eos, draft.eos),
    ):
        if own != its:
            return f"{its or 'nothing'} {role} its texts, {own or 'nothing'} {target_name}'s"
    return None


def _tokens(tokenizer: TokenizerVocabulary) -> list[bytes]:
    """All of them, without padding at the end."""
    found = [tokenizer.id_to_token(token) for token in range(tokenizer.vocab_size)]
    while found and _PADDING.fullmatch(found[-1]):
        found.pop()
    return found


def _bos_prefix(tokenizer: TokenizerVocabulary) -> str:
    """What is put before every text, whatever the vocabulary calls the beginning."""
    return b"".join(map(tokenizer.id_to_token, tokenizer.encode(""))).decode("utf-8", "replace")


def _printable(token: bytes) -> str:
    return repr(token.decode("utf-8", "replace"))
