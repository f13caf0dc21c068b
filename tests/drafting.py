"""Speculation without a model: drafts that are right by chance, steps that take what is said."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest

from localgen.backends.engine.speculation import speculation
from localgen.backends.engine.speculation.acceptance import Acceptance, Common
from localgen.backends.engine.speculation.allowance import Allowance
from localgen.backends.engine.speculation.choice import DraftMs, Offer, Pick, StepMs
from localgen.backends.engine.speculation.drafter import Proposal
from localgen.backends.engine.speculation.reference import Reference
from localgen.backends.engine.speculation.speculation import Speculation
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.types import SamplingParams

RIGHT, WRONG = 1, 2
DRAFTS = 5


def as_many_as_may_be(
    offers: Seq[Seq[Offer]], step_ms: StepMs, draft_ms: DraftMs, *, most: int
) -> list[Pick]:
    """Drafts whether they pay or not: the last drafter that has any."""
    picks = []
    for offered in offers:
        drafts = min(DRAFTS, most, len(offered[-1].tokens) - 1) if offered else 0
        most -= drafts
        picks.append(Pick(offered[-1].drafter, drafts) if drafts else Pick())
    return picks


def always_draft(monkeypatch: pytest.MonkeyPatch, *, plain_every: int = 0) -> None:
    """Whatever steps are measured to take: what a test sees must not depend on the machine.

    plain_every: steps with drafts until there are two without; 0: there are none.
    """
    monkeypatch.setattr(speculation, "choose", as_many_as_may_be)
    monkeypatch.setattr(speculation, "_LEAST_OFFER", 1.0)
    monkeypatch.setattr(speculation, "_LEAP", 100)
    monkeypatch.setattr(Allowance, "may_look", lambda *_: True)
    asked = itertools.count()
    monkeypatch.setattr(
        Reference,
        "is_due",
        lambda *_: plain_every > 0 and next(asked) % (plain_every + 2) >= plain_every,
    )
    # nor how much of a text a draft model has read
    monkeypatch.setattr(Allowance, "may_read", lambda *_, **__: True)
    monkeypatch.setattr(speculation, "_CATCH_UP_SHARE", 1e9)


def decoding(name: str = "a", *, limit: int = 10**9) -> Sequence:
    """A sequence whose answer has begun."""
    seq = Sequence(
        id=name, tokens=[3, 3], num_prompt=1, params=SamplingParams(), ctx=limit, limit=limit
    )
    seq.num_computed = 1
    return seq


class Guesser:
    """A drafter whose every draft is right with probability `alpha`, if those before it were."""

    name = "guesser"
    failure = ""
    must_be_tried = True

    def __init__(self, alpha: float, *, ms: float = 0.0, prior: float = 0.5, seed: int = 0) -> None:
        self.alpha, self.ms = alpha, ms
        self._chance = random.Random(seed)
        self._common = Common((prior,), counts=12.0)
        self._known: dict[Sequence, Acceptance] = {}
        self.proposed: dict[Sequence, list[int]] = {}
        self.closed = False

    def chances(self, seq: Sequence, most: int) -> list[float]:
        known = self._known.setdefault(seq, Acceptance(self._common))
        return [known.chance(0)] * most

    def draft_ms(self, sequences: int) -> float:
        return self.ms

    def usual_chance(self) -> float:
        return 0.0

    def catch_up(self, most_ms: float) -> None:
        """It is always ready."""

    def propose(self, wanted: Seq[tuple[Sequence, int]]) -> list[Proposal]:
        found = []
        for seq, count in wanted:
            drafts = [RIGHT if self._chance.random() < self.alpha else WRONG for _ in range(count)]
            self.proposed[seq] = drafts
            found.append(Proposal(drafts))
        return found

    def learn(self, seq: Sequence, came: Seq[int]) -> None:
        drafts = self.proposed.pop(seq, [])
        for draft, token in zip(drafts, came, strict=False):
            self._known[seq].add(0, draft == token)

    def forget(self, seq: Sequence) -> None:
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

    def chances(self, seq: Sequence, most: int) -> list[float]:
        return super().chances(seq, most) if self.is_ready else []

    def usual_chance(self) -> float:
        return 0.0 if self.is_ready else self.chance

    def catch_up(self, most_ms: float) -> None:
        self.read_ms += most_ms + (self.delay_ms if most_ms else 0.0)

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
        prompt = Chunk(seq=decoding(), start=0, tokens=[3] * 200, samples=False)
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
                        samples=True,
                    )
                )
                seq.tokens += [RIGHT] * (right + 1)
                self.tokens += right + 1
            ms = self.step_ms(sum(map(len, chunks)))
            self.ms += ms + draft_ms * max((len(one.tokens) for one in drafts.values()), default=0)
            self.steps += 1
            self.lengths.append(sum(len(one.tokens) for one in drafts.values()))
            self.speculation.observe(chunks, ms)
