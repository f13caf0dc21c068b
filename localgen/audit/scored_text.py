"""Token sequences whose last part is scored: answers of stored conversations, or a text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from localgen.backends.text.template import PromptTemplate
from localgen.backends.text.tokenizer import Tokenizer
from localgen.backends.types import Message
from localgen.chat.session_store import SessionRecord

# tokens of one sequence of a plain text
_TEXT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Most tokens of a sequence. remedy: what to do about longer ones, for people."""

    tokens: int
    remedy: str


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A sequence to read. name: for people. start: the first scored token, at least 1."""

    name: str
    tokens: tuple[int, ...]
    start: int

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - self.start


@dataclass(frozen=True, slots=True)
class Selection:
    """Sequences to audit. num_too_long: answers that do not fit the context, left out."""

    texts: tuple[ScoredText, ...]
    num_too_long: int = 0

    @property
    def num_scored(self) -> int:
        return sum(text.num_scored for text in self.texts)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(text.tokens) for text in self.texts)

    @property
    def num_tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)


def select_answers(
    records: Iterable[SessionRecord],
    template: PromptTemplate,
    tokenizer: Tokenizer,
    *,
    ctx: int,
    max_scored: int,
) -> Selection:
    """The answers of stored conversations until max_scored tokens are reached.

    Each is read after the prompt that the template makes of the conversation so far, without the
    reasoning. Equal answers to equal prompts count once: forked sessions repeat turns. Raises
    InvalidRequest as PromptTemplate.render.
    """
    found: list[ScoredText] = []
    seen: set[tuple[str, str]] = set()
    scored = too_long = 0
    for record in records:
        for name, prompt, answer in _prompts_and_answers(record, template):
            if scored >= max_scored:
                return Selection(tuple(found), too_long)
            if (prompt, answer) in seen:
                continue
            seen.add((prompt, answer))
            before, tokens = tokenizer.encode(prompt), tokenizer.encode(prompt + answer)
            start = max(1, _num_common(before, tokens))
            if start == len(tokens):
                continue
            if start >= ctx:
                too_long += 1
                continue
            # of a long answer, what the context holds and the limit leaves
            end = min(len(tokens), ctx, start + max_scored - scored)
            found.append(ScoredText(name, tuple(tokens[:end]), start))
            scored += end - start
    return Selection(tuple(found), too_long)


def select_text(text: str, tokenizer: Tokenizer, *, ctx: int, max_scored: int) -> Selection:
    """A plain text in sequences, each scored from its second token on."""
    tokens = tokenizer.encode_for_embedding(text)[: max_scored + 1]
    length = min(ctx, _TEXT_TOKENS)
    parts = [tuple(tokens[at : at + length]) for at in range(0, len(tokens), length)]
    return Selection(
        tuple(
            ScoredText(f"part {number}", part, 1)
            for number, part in enumerate(parts, 1)
            if len(part) > 1
        )
    )


def _prompts_and_answers(
    record: SessionRecord, template: PromptTemplate
) -> Iterator[tuple[str, str, str]]:
    # the tools that an answer was offered are not stored with it
    turns = tuple(itertools.takewhile(lambda turn: not turn.steps, record.conversation.turns))
    messages = replace(record.conversation, turns=turns).messages()
    for at, message in enumerate(messages):
        if message.role == "assistant" and message.content:
            name = f"session {record.id}, answer {_num_answers(messages[: at + 1])}"
            yield name, template.render(messages[:at]), message.content


def _num_answers(messages: tuple[Message, ...]) -> int:
    return sum(message.role == "assistant" for message in messages)


def _num_common(one: list[int], other: list[int]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
