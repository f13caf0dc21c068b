"""Drafts whose acceptance is known: counted as they come, or made to be right so often."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from localgen.backends.engine.speculation.drafter import Drafter, DraftProposal
from localgen.backends.runner.interface import (
    Chunk,
    ModelRunner,
    PoolUsage,
    SampledTokens,
    StepResult,
)
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import SamplingParams

# the target says this for ever where the acceptance is scripted: what it says must be known
SAID = 100
_CERTAIN = 1000.0
SCRIPTED = SamplingParams(temperature=0.0, logit_bias={SAID: _CERTAIN})


class Watched(Drafter):
    """A drafter as it is; what stands between it and the engine overrides what it watches."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name, self.needs_probing = drafter.name, drafter.needs_probing

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> Seq[float]:
        return self._drafter.acceptance_probs(seq, max_drafts)

    def draft_ms(self) -> float:
        return self._drafter.draft_ms()

    def prefill_acceptance(self) -> float:
        return self._drafter.prefill_acceptance()

    def prefill(self, max_tokens: int) -> None:
        self._drafter.prefill(max_tokens)

    def propose(self, requests: Seq[tuple[Sequence, int]]) -> list[DraftProposal]:
        return self._drafter.propose(requests)

    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        self._drafter.observe(seq, new_tokens)

    def release(self, seq: Sequence) -> None:
        self._drafter.release(seq)

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

    def propose(self, requests: Seq[tuple[Sequence, int]]) -> list[DraftProposal]:
        proposals = super().propose(requests)
        self._proposed = {
            seq: found.tokens for (seq, _), found in zip(requests, proposals, strict=True)
        }
        self.lengths += [len(found.tokens) for found in proposals if found.tokens]
        return proposals

    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        for draft, token in zip(self._proposed.pop(seq, []), new_tokens, strict=False):
            if draft != token:
                self.wrong += 1
                break
            self.right += 1
        super().observe(seq, new_tokens)


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

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> Seq[float]:
        return [1.0] * len(self._drafter.acceptance_probs(seq, min(max_drafts, self._drafts)))

    def draft_ms(self) -> float:
        return 0.0

    def prefill_acceptance(self) -> float:
        return 1.0 if self._drafter.prefill_acceptance() else 0.0


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

    def close(self) -> None:
        """The model is not ours."""
