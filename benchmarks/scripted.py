"""Drafts whose acceptance is known: counted as they come, or made to be right so often."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from localgen.backends.engine.speculation.drafter import Drafter, Proposal
from localgen.backends.runner.interface import Chunk, ModelRunner, PoolUsage, Sampled, StepResult
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import SamplingParams

# the target says this for ever where the acceptance is scripted: what it says must be known
SAID = 100
_CERTAIN = 1000.0
SCRIPTED = SamplingParams(temperature=0.0, logit_bias={SAID: _CERTAIN})


class Watched:
    """A drafter as it is; what stands between it and the engine overrides what it watches."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name, self.must_be_tried = drafter.name, drafter.must_be_tried

    def chances(self, seq: Sequence, most: int) -> Seq[float]:
        return self._drafter.chances(seq, most)

    @property
    def failure(self) -> str:
        return self._drafter.failure

    def draft_ms(self, sequences: int) -> float:
        return self._drafter.draft_ms(sequences)

    def usual_chance(self) -> float:
        return self._drafter.usual_chance()

    def catch_up(self, most_ms: float) -> None:
        self._drafter.catch_up(most_ms)

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[Proposal]:
        return self._drafter.propose(wanted)

    def learn(self, seq: Sequence, came: Seq[int]) -> None:
        self._drafter.learn(seq, came)

    def forget(self, seq: Sequence) -> None:
        self._drafter.forget(seq)

    def close(self) -> None:
        self._drafter.close()


class Counted(Watched):
    """Counts how drafts turned out: right, or the first wrong one of a step. lengths: how many
    drafts a sequence had, wherever it had any."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._proposed: dict[Sequence, list[int]] = {}
        self.right = self.wrong = 0
        self.lengths: list[int] = []

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[Proposal]:
        proposals = super().propose(wanted)
        self._proposed = {
            seq: found.tokens for (seq, _), found in zip(wanted, proposals, strict=True)
        }
        self.lengths += [len(found.tokens) for found in proposals if found.tokens]
        return proposals

    def learn(self, seq: Sequence, came: Seq[int]) -> None:
        for draft, token in zip(self._proposed.pop(seq, []), came, strict=False):
            if draft != token:
                self.wrong += 1
                break
            self.right += 1
        super().learn(seq, came)


def acceptance(counted: Seq[Counted]) -> float:
    """Share of all their drafts that were right, of those that had only right ones before them; 0:
    there were none."""
    right = sum(one.right for one in counted)
    tried = right + sum(one.wrong for one in counted)
    return right / tried if tried else 0.0


class Insisting(Watched):
    """Offers so many drafts in every step, as if they were right for certain and cost nothing."""

    def __init__(self, drafter: Drafter, drafts: int) -> None:
        super().__init__(drafter)
        self._drafts = drafts

    def chances(self, seq: Sequence, most: int) -> Seq[float]:
        return [1.0] * len(self._drafter.chances(seq, min(most, self._drafts)))

    def draft_ms(self, sequences: int) -> float:
        return 0.0

    def usual_chance(self) -> float:
        return 1.0 if self._drafter.usual_chance() else 0.0


@dataclass(frozen=True, slots=True)
class _Step:
    ticket: Any
    chunks: Seq[Chunk]


class Scripted:
    """A draft model that computes as it would, and then says `right` with probability `alpha`, or
    else another token. Closing it leaves the model as it is: the next one takes it over.
    """

    def __init__(self, runner: ModelRunner, right: int, alpha: float, *, seed: int = 0) -> None:
        self._runner, self._right, self._alpha = runner, right, alpha
        self._chance = random.Random(seed)
        self.limits = runner.limits

    def admit(self, seq: Sequence, *, spare: int) -> int:
        return self._runner.admit(seq, spare=spare)

    def grow(self, seq: Sequence, n: int) -> bool:
        return self._runner.grow(seq, n)

    def launch(self, chunks: Seq[Chunk]) -> Any:
        return _Step(self._runner.launch(chunks), chunks)

    def collect(self, ticket: Any) -> StepResult:
        return [
            Sampled(tuple(self._token() for _ in sampled.tokens))
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

    def close(self) -> None:
        """The model is not ours."""
