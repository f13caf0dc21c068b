"""Speculation without a model: drafts that are right by chance, steps that take what is said."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest

from localgen.backends.engine.speculation import speculation
from localgen.backends.engine.speculation.acceptance import AcceptanceEstimator, SharedPrior
from localgen.backends.engine.speculation.allowance import Allowance
from localgen.backends.engine.speculation.choice import (
    DraftAllocation,
    DraftMs,
    DraftOption,
    StepMs,
)
from localgen.backends.engine.speculation.drafter import DraftProposal
from localgen.backends.engine.speculation.reference import BaselineSchedule
from localgen.backends.engine.speculation.speculation import Speculation
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import SamplingParams

RIGHT, WRONG = 1, 2
DRAFTS = 5


def as_many_as_may_be(
    offers: Seq[Seq[DraftOption]], step_ms: StepMs, draft_ms: DraftMs, *, most: int
) -> list[DraftAllocation]:
    """Drafts whether they pay or not: the last drafter that has any."""
    picks = []
    for offered in offers:
        drafts = min(DRAFTS, most, len(offered[-1].tokens) - 1) if offered else 0
        most -= drafts
        picks.append(DraftAllocation(offered[-1].drafter, drafts) if drafts else DraftAllocation())
    return picks


def always_draft(monkeypatch: pytest.MonkeyPatch, *, plain_every: int = 0) -> None:
    """Whatever steps are measured to take: what a test sees must not depend on the machine.

    plain_every: steps with drafts until there are two without; 0: there are none.
    """
    monkeypatch.setattr(speculation, "allocate_drafts", as_many_as_may_be)
    monkeypatch.setattr(speculation, "_LEAST_OFFER", 1.0)
    monkeypatch.setattr(speculation, "_LEAP", 100)
    monkeypatch.setattr(Allowance, "may_look", lambda *_: True)
    asked = itertools.count()
    monkeypatch.setattr(
        BaselineSchedule,
        "is_due",
        lambda *_: plain_every > 0 and next(asked) % (plain_every + 2) >= plain_every,
    )
    # nor how much of a text a draft model has read
    monkeypatch.setattr(Allowance, "may_read", lambda *_, **__: True)
    monkeypatch.setattr(speculation, "_CATCH_UP_SHARE", 1e9)


def decoding(name: str = "a", *, limit: int = 10**9) -> Sequence:
    """A sequence whose answer has begun."""
    seq = Sequence(
        id=name, tokens=[3, 3], num_prompt=1, params=SamplingParams(), ctx=limit, max_len=limit
    )
    seq.num_computed = 1
    return seq


class Guesser:
    """A drafter whose every draft is right with probability `alpha`, if those before it were."""

    name = "guesser"
    failure = ""
    needs_probing = True

    def __init__(self, alpha: float, *, ms: float = 0.0, prior: float = 0.5, seed: int = 0) -> None:
        self.alpha, self.ms = alpha, ms
        self._chance = random.Random(seed)
        self._common = SharedPrior((prior,), weight=12.0)
        self._known: dict[Sequence, AcceptanceEstimator] = {}
        self.proposed: dict[Sequence, list[int]] = {}
        self.closed = False

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        known = self._known.setdefault(seq, AcceptanceEstimator(self._common))
        return [known.probability(0)] * max_drafts

    def draft_ms(self, num_sequences: int) -> float:
        return self.ms

    def default_acceptance(self) -> float:
        return 0.0

    def prefill(self, budget_ms: float) -> None:
        """It is always ready."""

    def propose(self, requests: Seq[tuple[Sequence, int]]) -> list[DraftProposal]:
        found = []
        for seq, count in requests:
            drafts = [RIGHT if self._chance.random() < self.alpha else WRONG for _ in range(count)]
            self.proposed[seq] = drafts
            found.append(DraftProposal(drafts))
        return found

    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        drafts = self.proposed.pop(seq, [])
        for draft, token in zip(drafts, new_tokens, strict=False):
            self._known[seq].add(0, draft == token)

    def release(self, seq: Sequence) -> None:
        self._known.pop(seq, None)

    def close(self) -> None:
        self.closed = True


class Unread(Guesser):
    """A draft model that has a long text to read. read_ms: what it has read for. is_ready: whether
    it has read it."""

    is_ready, delay_ms = False, 0.0

    def __init__(self, chance: float, *, ms: float = 0.0) -> None:
        super().__init__(chance, ms=ms)
        self.chance, self.read_ms = chance, 0.0

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        return super().acceptance_probs(seq, max_drafts) if self.is_ready else []

    def default_acceptance(self) -> float:
        return 0.0 if self.is_ready else self.chance

    def prefill(self, budget_ms: float) -> None:
        self.read_ms += budget_ms + (self.delay_ms if budget_ms else 0.0)

    def clock(self) -> float:
        return self.read_ms / 1e3


class Steps:
    """Steps of sequences that only decode. step_ms: what one takes by its tokens.

    The model says RIGHT for ever. tokens, ms: of all steps so far, proposing included. A prompt
    has been computed before.
    """

    def __init__(self, speculation: Speculation, step_ms: Callable[[int], float]) -> None:
        self.speculation, self.step_ms = speculation, step_ms
        self.tokens, self.ms, self.steps = 0, 0.0, 0
        self.lengths: list[int] = []
        prompt = Chunk(seq=decoding(), start=0, tokens=[3] * 200, is_sampled=False)
        speculation.observe([prompt], step_ms(200))

    def run(self, seqs: list[Sequence], count: int, *, draft_ms: float = 0.0) -> None:
        for _ in range(count):
            drafts = self.speculation.propose(seqs, outputs=512)
            chunks = []
            for seq in seqs:
                proposed = drafts[seq].tokens if seq in drafts else []
                right = next((i for i, t in enumerate(proposed) if t != RIGHT), len(proposed))
                tokens = [seq.tokens[-1], *proposed]
                chunks.append(
                    Chunk(
                        seq=seq,
                        start=len(seq.tokens) - 1,
                        tokens=tokens,
                        num_drafts=len(proposed),
                        is_sampled=True,
                    )
                )
                seq.tokens += [RIGHT] * (right + 1)
                self.tokens += right + 1
            ms = self.step_ms(sum(map(len, chunks)))
            self.ms += ms + draft_ms * max((len(one.tokens) for one in drafts.values()), default=0)
            self.steps += 1
            self.lengths.append(sum(len(one.tokens) for one in drafts.values()))
            self.speculation.observe(chunks, ms)
