"""Speculation without a model: drafts that are right at random, and steps of a given duration."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import pytest

from localgen.backends.engine.speculation import policy
from localgen.backends.engine.speculation.allocation import Allocation, DraftOption
from localgen.backends.engine.speculation.drafter import (
    DecayedRatio,
    Drafter,
    DraftProposal,
)
from localgen.backends.engine.speculation.policy import Speculation
from localgen.backends.engine.step_costs import StepCosts
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import MAX_DRAFT_TOKENS

RIGHT, WRONG = 1, 2
DRAFTS = 5


def _last_option(self: Speculation, seq: Sequence, limit: int) -> DraftOption | None:
    limit = min(limit, seq.max_len - len(seq.tokens) - 1)
    found = [DraftOption(each, each.acceptance_probs(seq, limit)) for each in self.drafters]
    return next((option for option in reversed(found) if option.probs), None)


def _allocate_all(
    options: Seq[DraftOption | None],
    step_ms: Callable[[int], float],
    *,
    max_drafts: int,
    **_: float,
) -> Allocation:
    counts = []
    for option in options:
        counts.append(min(DRAFTS, max_drafts, len(option.probs)) if option else 0)
        max_drafts -= counts[-1]
    return Allocation(counts, speedup=2.0 if any(counts) else 0.0)


def always_draft(monkeypatch: pytest.MonkeyPatch, *, plain_every: int = 0) -> None:
    """Draft with the last drafter that can, regardless of measured times: tests are deterministic.

    plain_every: steps with drafts between two pairs without; 0: all steps have drafts.
    """
    asked = itertools.count()
    monkeypatch.setattr(policy, "allocate", _allocate_all)
    monkeypatch.setattr(Speculation, "_option", _last_option)
    monkeypatch.setattr(StepCosts, "largest", property(lambda _: 1 << 20))
    monkeypatch.setattr(
        Speculation,
        "_is_lookup_due",
        lambda *_: plain_every == 0 or next(asked) % (plain_every + 2) < plain_every,
    )


def speculation_of(
    *drafters: Drafter,
    max_drafts: int = MAX_DRAFT_TOKENS,
    clock: Callable[[], float] = time.monotonic,
    synchronize: Callable[[], float] = float,
) -> Speculation:
    """Speculation that has not seen a step yet."""
    return Speculation(
        drafters, StepCosts(), max_drafts=max_drafts, clock=clock, synchronize=synchronize
    )


def decoding(name: str = "a", *, limit: int = 10**9) -> Sequence:
    """A sequence that is decoding."""
    seq = Sequence(
        id=name, tokens=[3, 3], num_prompt=1, params=SamplingParams(), ctx=limit, max_len=limit
    )
    seq.num_computed = 1
    return seq


class Guesser(Drafter):
    """A drafter whose drafts are right with probability `alpha`, given that those before are."""

    name = "guesser"
    needs_probing = True

    def __init__(self, alpha: float, *, ms: float = 0.0, prior: float = 0.5, seed: int = 0) -> None:
        self.alpha, self.ms = alpha, ms
        self._chance = random.Random(seed)
        self._shared = DecayedRatio(prior, 12.0)
        self._known: dict[Sequence, DecayedRatio] = {}
        self.proposed: dict[Sequence, list[int]] = {}
        self.closed = False

    def acceptance_probs(self, seq: Sequence, max_drafts: int) -> list[float]:
        known = self._known.setdefault(seq, DecayedRatio(decay=0.98, shared=self._shared))
        return [known.value] * max_drafts

    def draft_ms(self) -> float:
        return self.ms

    def propose(
        self, requests: Mapping[Sequence, int], max_prefill_tokens: int
    ) -> dict[Sequence, DraftProposal]:
        found = {}
        for seq, count in requests.items():
            drafts = [RIGHT if self._chance.random() < self.alpha else WRONG for _ in range(count)]
            self.proposed[seq] = drafts
            found[seq] = DraftProposal(drafts)
        return found

    def observe(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        drafts = self.proposed.pop(seq, [])
        for draft, token in zip(drafts, new_tokens, strict=False):
            self._known[seq].add(draft == token)
            if draft != token:
                break

    def release(self, seq: Sequence) -> None:
        self._known.pop(seq, None)

    def close(self) -> None:
        self.closed = True


class Unprefilled(Guesser):
    """A draft model that has to prefill a long prompt.

    prefilled: tokens so far. ms_per_token: time of each on its clock.
    """

    is_ready = False

    def __init__(self, alpha: float, *, prior: float = 0.5, ms_per_token: float = 0.0) -> None:
        super().__init__(alpha, prior=prior)
        self.ms_per_token, self.prefilled, self.now_s = ms_per_token, 0, 0.0

    def propose(
        self, requests: Mapping[Sequence, int], max_prefill_tokens: int
    ) -> dict[Sequence, DraftProposal]:
        if self.is_ready:
            return super().propose(requests, max_prefill_tokens)
        self.prefilled += max_prefill_tokens
        self.now_s += max_prefill_tokens * self.ms_per_token / 1e3
        return {}

    def clock(self) -> float:
        return self.now_s


class Steps:
    """Steps of decoding sequences. step_ms: duration of a step by its number of tokens.

    The model always generates RIGHT. tokens, ms: totals of all steps, proposing included. The
    prompt is computed already.
    """

    def __init__(self, speculation: Speculation, step_ms: Callable[[int], float]) -> None:
        self.speculation, self.step_ms = speculation, step_ms
        self.tokens, self.ms, self.steps = 0, 0.0, 0
        self.lengths: list[int] = []
        prompt = Chunk(seq=decoding(), start=0, tokens=[3] * 200, is_sampled=False)
        speculation.observe([prompt], step_ms(200))

    @property
    def share(self) -> float:
        """Fraction of the last fifty steps that had drafts."""
        return sum(map(bool, self.lengths[-50:])) / 50

    def run(
        self,
        seqs: list[Sequence],
        count: int,
        *,
        draft_ms: float = 0.0,
        prompts: Seq[Chunk] = (),
    ) -> None:
        """Run `count` steps. prompts: admitted in each of them after the drafts were proposed."""
        for _ in range(count):
            drafts = self.speculation.propose(seqs, max_outputs=512, max_prefill_tokens=64)
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
            ms += self.speculation.waited_ms
            if not prompts:
                self.speculation.costs.observe(sum(map(len, chunks)), ms)
            self.speculation.observe([*chunks, *prompts], ms)
