"""Steps of benchmarks.gpu end, however many tokens arrive together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from benchmarks.answers import Answer
from benchmarks.gpu_parts import steps
from benchmarks.session import Session
from localgen.backends.types import Failed


class JoinedSession:
    """An answer whose tokens arrive as the first one, and the others with its end."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.num_steps, self.is_prepared = tokens, 0, False
        self.answer = Answer(0.0)

    def submit(self, prompt: Sequence[int], tokens: int) -> Answer:
        return self.answer

    def step(self) -> None:
        assert self.answer.end is None, "a step that would wait for ever"
        self.num_steps += 1
        if self.num_steps in (1, self.tokens):
            self.answer.arrivals.append((float(self.num_steps), self.num_steps))
        if self.num_steps == self.tokens:
            self.answer.end = Failed("r1", "internal", "the end")

    def cancel(self, answers: Sequence[Answer]) -> None:
        assert list(answers) == [self.answer]

    def prepare(self) -> None:
        self.is_prepared = True


@pytest.mark.parametrize("tokens", [steps._FIRST_STEPS // 2, steps.answer_tokens(0)])
def test_answer_that_ends_is_not_waited_for(tokens: int) -> None:
    session = JoinedSession(tokens)
    assert steps._capture_s(cast(Session, session), [[1, 2, 3]]) >= 0
    assert session.is_prepared
    assert session.num_steps == tokens
