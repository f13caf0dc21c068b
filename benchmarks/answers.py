"""Answers of an in-process engine with arrival times; their rates and latencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from localgen.backends.engine.stats import percentile
from localgen.backends.types import Failed, Finished


class AnswerFailed(Exception):
    """A request failed or did not end; the message says why."""


class NumberTokenizer:
    """Tokenizer whose pieces are the token ids in decimal: an answer's text contains its tokens."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.bos = self.eos = ""
        self.infill_tokens = None
        self.eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [int(number) for number in text.split()]

    def encode_for_embedding(self, text: str) -> list[int]:
        return self.encode(text)

    def piece(self, token: int) -> bytes:
        return b"%d " % token


@dataclass(slots=True)
class Answer:
    """The answer to one request. Times in seconds of the session's clock.

    arrivals: time of each piece of text, and the number of answer tokens received by then.
    """

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    end: Finished | Failed | None = None

    @property
    def finished(self) -> Finished:
        """The Finished event. Raises AnswerFailed if the request failed or has not ended."""
        if not isinstance(self.end, Finished):
            raise AnswerFailed("no end" if self.end is None else self.end.message)
        return self.end

    @property
    def tokens(self) -> list[int]:
        """Token ids, parsed from the text of NumberTokenizer."""
        return [int(number) for number in "".join(self.text).split()]

    @property
    def num_tokens(self) -> int:
        """Number of tokens received so far."""
        return self.arrivals[-1][1] if self.arrivals else 0

    @property
    def first_s(self) -> float:
        return self.arrivals[0][0]

    @property
    def last_s(self) -> float:
        return self.arrivals[-1][0]

    def tokens_at(self, time_s: float) -> int:
        """Number of tokens received by that time."""
        return max((tokens for at_s, tokens in self.arrivals if at_s <= time_s), default=0)


def decode_tok_s(answers: Sequence[Answer]) -> float:
    """Tokens/s of all answers while all of them decode.

    The interval begins when the last answer gets its first token, and ends when the first answer
    gets its last token. Raises AnswerFailed if it is empty.
    """
    begin, end = max(a.first_s for a in answers), min(a.last_s for a in answers)
    if end <= begin:
        raise AnswerFailed("the answers never decoded together: request longer ones")
    return sum(a.tokens_at(end) - a.tokens_at(begin) for a in answers) / (end - begin)


def serving_metrics(answers: Sequence[Answer]) -> dict[str, float]:
    """Serving figures: output tokens/s from first request to last token, TTFT and ITL."""
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
    """Number of prompt tokens that were computed, not found in the prefix cache."""
    return sum(a.finished.timings.prompt_n for a in answers)
