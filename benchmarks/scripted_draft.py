"""A draft model with a scripted acceptance rate."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from localgen.backends.runner.interface import (
    AsyncRunner,
    Chunk,
    ModelRunner,
    PoolUsage,
    SampledTokens,
    StepResult,
)
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import SamplingParams

# the only token that the target model generates, because of the logit bias: so drafts can be made
# right or wrong
FORCED_TOKEN = 100
_LOGIT_BIAS = 1000.0
FORCED_SAMPLING = SamplingParams(temperature=0.0, logit_bias={FORCED_TOKEN: _LOGIT_BIAS})


@dataclass(frozen=True, slots=True)
class _Step:
    ticket: Any
    chunks: Seq[Chunk]


class ScriptedDraftRunner:
    """Computes every step of a draft model, and replaces its tokens.

    A token is `right` with probability `alpha`, else a wrong one. Closing it does not close the
    model.
    """

    def __init__(self, runner: ModelRunner, right: int, alpha: float, *, seed: int = 0) -> None:
        self._runner, self._right, self._alpha = runner, right, alpha
        self._chance = random.Random(seed)
        self.limits = runner.limits

    def admit(self, seq: Sequence, *, spare: int) -> int:
        return self._runner.admit(seq, spare=spare)

    def num_cached(self, tokens: list[int], cache_salt: str) -> int:
        return self._runner.num_cached(tokens, cache_salt)

    def grow(self, seq: Sequence, n: int) -> bool:
        return self._runner.grow(seq, n)

    def launch(self, chunks: Seq[Chunk]) -> Any:
        return _Step(self._runner.launch(chunks), chunks)

    def collect(self, ticket: Any) -> StepResult:
        return [
            SampledTokens(tuple(self._token() for _ in sampled.tokens))
            for sampled in self._runner.collect(ticket.ticket)
        ]

    def _token(self) -> int:
        return self._right + (self._chance.random() >= self._alpha)

    def rewind(self, seq: Sequence, length: int) -> None:
        self._runner.rewind(seq, length)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        self._runner.release(seq, keep=keep)

    def usage(self) -> PoolUsage:
        return self._runner.usage()

    @property
    def is_warming_up(self) -> bool:
        return isinstance(self._runner, AsyncRunner) and self._runner.is_warming_up

    def synchronize(self) -> None:
        if isinstance(self._runner, AsyncRunner):
            self._runner.synchronize()

    def prepare_while_idle(self) -> bool:
        return isinstance(self._runner, AsyncRunner) and self._runner.prepare_while_idle()

    def close(self) -> None:
        """The model belongs to the caller."""
