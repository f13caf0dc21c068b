"""Servers of the benchmark's tests: their answers take a virtual time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from localgen.bench.measured_request import MeasuredRequest, Prompt, Target


@dataclass
class VirtualClock:
    """Seconds that pass only while a VirtualTarget answers."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class VirtualTarget(Target):
    """Answers one request after the other, at fixed rates; each word is a token."""

    def __init__(self, prefill: float, decode: float, context: int | None = 8192) -> None:
        self.context = context
        self.clock = VirtualClock()
        self.prompts: list[str] = []
        self.fail: Callable[[int], str] = lambda number: ""
        self._prefill, self._decode, self._lock = prefill, decode, threading.Lock()

    def abort(self) -> None:
        """It has no connection."""

    def ask(
        self, prompt: Prompt, max_tokens: int, json_schema: str | None = None
    ) -> MeasuredRequest:
        assert isinstance(prompt, str)
        with self._lock:
            cached = max((_common(prompt, earlier) for earlier in self.prompts), default=0)
            self.prompts.append(prompt)
            tokens = len(prompt.split())
            sent_s = self.clock.now_s
            if error := self.fail(len(self.prompts)):
                return MeasuredRequest(sent_s, sent_s + 1.0, error=error)
            first_s = sent_s + max(1, tokens - cached) / self._prefill
            times = [first_s + at / self._decode for at in range(max_tokens)]
            self.clock.now_s = times[-1]
        arrivals = tuple((at_s, number) for number, at_s in enumerate(times, 1))
        return MeasuredRequest(sent_s, times[-1], arrivals, first_s, tokens, cached, max_tokens)


def measured(ttft_s: float, tpot_s: float = 0.01, tokens: int = 11) -> MeasuredRequest:
    """A request with these latencies."""
    times = [ttft_s + at * tpot_s for at in range(tokens)]
    arrivals = tuple((at_s, number) for number, at_s in enumerate(times, 1))
    return MeasuredRequest(0.0, times[-1], arrivals, ttft_s, 10, 0, tokens)


def _common(one: str, other: str) -> int:
    """Words at the begin that both have."""
    words = [one.split(), other.split()]
    pairs = enumerate(zip(*words, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(map(len, words)))
