"""Drafts do not change distributions: tokens follow the target's logits under each setting.

Every token has a distribution of its own, which a reference computes in float64 from the logits of
the whole text. The quantile of a token in it is uniform, whatever came before (Rosenblatt 1952):
one chi-square test for all of them. A wrong acceptance rule fails it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import sampling_reference as ref
import torch
from drafting import always_draft
from scipy.stats import chisquare
from small_models import Rows, Small, SmallCuda, SmallLlama, generate
from torch import Tensor

from localgen.backends.cuda.kernels.sampling import rejection
from localgen.backends.cuda.steps.step_sampler import CudaStepTicket, StepSampler
from localgen.backends.engine.speculation.draft_model import ModelDrafter
from localgen.backends.llamacpp.runner import LlamaRunner
from localgen.backends.runner.interface import Chunk, SampledTokens
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING

DRAWS, TOKENS = 24_000, 100
# fewer suffice for a wrong rule: with many sequences at once, each has few drafts
FEW = 8_000
LEAST_P, NEVER_P = 1e-3, 1e-9
BINS = 64
OFF = replace(BASE_SAMPLING, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top p": {"top_p": 0.8, "temperature": 1.2},
    "min p": {"min_p": 0.1, "temperature": 1.5},
    "penalties": {
        "repeat_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.1,
        "repeat_last_n": 32,
    },
}
KINDS = ("cuda point", "cuda stochastic", "llama.cpp point")


@dataclass(frozen=True)
class Pair:
    """A target and a draft model close to it, and how drafts are made."""

    target: Small
    draft: Small
    stochastic: bool

    def generate(self, draws: int) -> list[Sequence]:
        """Sequences of all settings in one batch."""
        drafter = ModelDrafter(self.draft.runner, "draft")
        settings = list(SETTINGS.values())
        made = generate(
            self.target.runner,
            [drafter],
            lambda i: replace(OFF, seed=i, **settings[i % len(settings)]),
            seqs=draws // TOKENS,
            tokens=TOKENS,
            stochastic=self.stochastic,
        )
        assert self.target.runner.usage().used == self.draft.runner.usage().used == 0
        return made


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    backend, kind = request.param.split()
    make = SmallCuda if backend == "cuda" else SmallLlama
    folder = tmp_path_factory.mktemp("small")
    with torch.inference_mode():
        target: Small = make(folder, kv_tokens=1 << 14)
        draft: Small = make(folder, noise=0.25, kv_tokens=1 << 14)
        yield Pair(target, draft, kind == "stochastic")
    target.runner.close()
    draft.runner.close()


@pytest.fixture(autouse=True)
def drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)


def exact(logits: Rows, seq: Sequence) -> Rows:
    """Probabilities for each token of the answer, [answer, VOCAB]."""
    p: Any = seq.params
    rows = []
    for at in range(seq.num_prompt, len(seq.tokens)):
        z = logits[at - 1]
        if p.repeat_penalty != 1:
            z = ref.penalties(
                z,
                seq.tokens[max(0, at - p.repeat_last_n) : at],
                repeat=p.repeat_penalty,
                presence=p.presence_penalty,
                frequency=p.frequency_penalty,
            )
        z = ref.top_p(z, p.top_p) if p.top_p < 1 else z
        z = ref.min_p(z, p.min_p) if p.min_p else z
        rows.append(ref.softmax(z / p.temperature))
    return np.array(rows)


def places(pair: Pair, seqs: Seq[Sequence]) -> list[Rows]:
    """Quantile of each token of the answers in its distribution.

    Uniform from 0 to 1 if it was sampled from that; above 1 if it has probability 0. Tokens that
    the draft model prefers more than the target come first: a wrong rule errs on them.
    """
    chance, found = np.random.default_rng(0), []
    for seq in seqs:
        p, q = (exact(model.logits(seq.tokens), seq) for model in (pair.target, pair.draft))
        answer = np.array(seq.tokens[seq.num_prompt :])[:, None]
        own, liked = (np.take_along_axis(of, answer, 1) for of in (p, q - p))
        before = np.where(q - p > liked, p, 0).sum(1, keepdims=True)
        place = before + own * chance.random(own.shape)
        found.append(np.where(own > 0, place, 2.0)[:, 0])
    return found


def agreement(found: Seq[Rows]) -> float:
    """Chi-square p-value of quantiles that should be uniform."""
    values = np.concatenate(found)
    if values.max() > 1 + 1e-9:
        return 0.0
    return float(chisquare(np.histogram(values, BINS, (0, 1))[0]).pvalue)


def test_drafts_change_no_distribution(pair: Pair) -> None:
    made = pair.generate(DRAWS)
    found = places(pair, made)
    assert sum(map(len, found)) >= DRAWS
    assert agreement(found) > LEAST_P
    for at, name in enumerate(SETTINGS):
        assert agreement(found[at :: len(SETTINGS)]) > LEAST_P, name
    drafted, accepted = (sum(getattr(s, n) for s in made) for n in ("num_drafted", "num_accepted"))
    assert drafted > DRAWS / 4
    assert 0.1 < accepted / drafted < 0.9, "both ways are taken"
    assert all(seq.used_sampled_drafts == (pair.stochastic and seq.num_drafted > 0) for seq in made)


def keep_one_on_cuda(patch: pytest.MonkeyPatch) -> None:
    right = StepSampler._accept_drafts

    def wrong(
        self: StepSampler, chunk: Chunk, tokens: list[int], ticket: CudaStepTicket, row: int
    ) -> SampledTokens:
        first = [chunk.tokens[1]] if chunk.num_drafts else tokens[:1]
        return right(self, chunk, first + tokens[1:], ticket, row)

    patch.setattr(StepSampler, "_accept_drafts", wrong)


def keep_one_on_llama(patch: pytest.MonkeyPatch) -> None:
    right = LlamaRunner._sample

    def wrong(self: LlamaRunner, chunk: Chunk, index: int, logits: Any) -> SampledTokens:
        sampled = right(self, chunk, index, logits)
        if chunk.num_drafts and sampled.tokens[0] != chunk.tokens[1]:
            return SampledTokens((chunk.tokens[1],))
        return sampled

    patch.setattr(LlamaRunner, "_sample", wrong)


def keep_by_the_inverse(patch: pytest.MonkeyPatch) -> None:
    def wrong(p: Tensor, q: Tensor, coins: Tensor) -> Tensor:
        return coins * p < q

    patch.setattr(rejection, "_is_accepted", wrong)


def draw_again_from_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rejection, "_residual_probs", lambda p, q: p)


WRONG: dict[str, list[Callable[[pytest.MonkeyPatch], None]]] = {
    "cuda point": [keep_one_on_cuda],
    "cuda stochastic": [
        keep_one_on_cuda,
        keep_by_the_inverse,
        draw_again_from_all,
    ],
    "llama.cpp point": [keep_one_on_llama],
}


@pytest.mark.parametrize(
    ("pair", "wrong"),
    [(kind, wrong) for kind, rules in WRONG.items() for wrong in rules],
    indirect=["pair"],
)
def test_wrong_acceptance_rule_is_detected(
    pair: Pair, wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(monkeypatch)
    made = pair.generate(FEW)
    assert sum(seq.num_drafted for seq in made) > FEW / 4
    assert agreement(places(pair, made)) < NEVER_P
