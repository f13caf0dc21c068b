"""Answers as whoever asked sees them: text that came, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from localgen.backends.engine.stats import percentile
from localgen.backends.types import Failed, Finished


class AnswerFailed(Exception):
    """A request ended otherwise than was asked for; the message says how."""


class NumberTokenizer:
    """Every token says its own number, so that an answer's text tells which tokens it was."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.bos = self.eos = ""
        self.eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in text.split()]

    def encode_for_embedding(self, text: str) -> list[int]:
        return self.encode(text)

    def piece(self, token: int) -> bytes:
        return b"%d " % token


@dataclass(slots=True)
class Answer:
    """One request. arrivals: when text came, and how many tokens there were by then.

    Times are seconds of its session's clock.
    """

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    end: Finished | Failed | None = None

    @property
    def finished(self) -> Finished:
        """Its good end. AnswerFailed: there is none, or a bad one."""
        if not isinstance(self.end, Finished):
            raise AnswerFailed("no end" if self.end is None else self.end.message)
        return self.end

    @property
    def tokens(self) -> list[int]:
        """What was said, as NumberTokenizer has it."""
        return [int(number) for number in "".join(self.text).split()]

    @property
    def first_s(self) -> float:
        return self.arrivals[0][0]

    @property
    def last_s(self) -> float:
        return self.arrivals[-1][0]

    def tokens_at(self, time_s: float) -> int:
        """Tokens that had come by then."""
        return max((tokens for at_s, tokens in self.arrivals if at_s <= time_s), default=0)


def decode_tok_s(answers: Sequence[Answer]) -> float:
    """Tokens a second while all were generating: from the last first token to the first last one.

    AnswerFailed: there was no such time.
    """
    begin, end = max(a.first_s for a in answers), min(a.last_s for a in answers)
    if end <= begin:
        raise AnswerFailed("the answers never went on together: ask for longer ones")
    return sum(a.tokens_at(end) - a.tokens_at(begin) for a in answers) / (end - begin)


def served(answers: Sequence[Answer]) -> dict[str, float]:
    """What those who asked would say of a server: output tok/s from the first request to the last
    end, and waiting times."""
    took_s = max(a.last_s for a in answers) - min(a.sent_s for a in answers)
    ttft_ms = sorted((a.first_s - a.sent_s) * 1e3 for a in answers)
    itl_ms = sorted(
        (later - sooner) * 1e3 for a in answers for (sooner, _), (later, _) in pairwise(a.arrivals)
    )
    return {
        "tok_s": sum(a.finished.completion_tokens for a in answers) / took_s,
        "ttft_p50_ms": percentile(ttft_ms, 0.5),
        "ttft_p99_ms": percentile(ttft_ms, 0.99),
        "itl_p50_ms": percentile(itl_ms, 0.5),
        "itl_p99_ms": percentile(itl_ms, 0.99),
    }


def computed_tokens(answers: Sequence[Answer]) -> int:
    """Prompt tokens that did not come from the cache."""
    return sum(a.finished.timings.prompt_n for a in answers)
