"""Sampled drafts: kernels of verification equal their reference, and the resulting distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sampling_reference as ref
import torch
from scipy.stats import chisquare
from torch import Tensor

from localgen.backends.cuda.kernels.sampling import rejection, sample
from localgen.backends.cuda.steps import sampler
from localgen.backends.cuda.steps.sampler import SamplingRow, sample_rows, sample_with_probs
from localgen.backends.sampling_params import BASE_SAMPLING

OFF = replace(BASE_SAMPLING, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1e-5},
    {"temperature": 100.0},
    {"top_k": 5},
    {"top_p": 0.8, "temperature": 1.5},
    {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8},
    {"presence_penalty": 1.5, "repeat_last_n": 64},
    {"logit_bias": {0: 3.0, 1: -math.inf}},
]
# the interpreter computes in numpy, which warns of integer overflow and underflow of exp
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def normal(seed: int, *shape: int, spread: float = 2.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def asked(seed: int) -> list[SamplingRow]:
    """One row for each setting."""
    return [
        SamplingRow(replace(OFF, seed=100 * seed + i, **setting), (1, 2, 3))
        for i, setting in enumerate(SETTINGS)
    ]


def with_drafts(rows: Sequence[SamplingRow], logits: Tensor) -> list[SamplingRow]:
    """Rows with a draft sampled from these logits, with independent noise."""
    own = [replace(row, params=replace(row.params, seed=~row.params.seed)) for row in rows]  # type: ignore[operator]
    tokens, q = sample_with_probs(logits, own, range(len(rows)))
    return [
        replace(row, draft_token=int(token), draft_probs=q[at])
        for at, (row, token) in enumerate(zip(rows, tokens, strict=True))
    ]


def by_kernels(patch: pytest.MonkeyPatch) -> None:
    make: Any = torch.empty

    def poisoned(*shape: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor:
        made: Tensor = make(*shape, dtype=dtype, **kwargs)
        return made.fill_(math.nan if dtype.is_floating_point else 101)

    patch.setattr(torch, "empty", poisoned)
    patch.setattr(sampler, "sample_tokens", sample.sample_tokens_triton)
    patch.setattr(sampler, "rejection_sample", rejection.rejection_sample_triton)
    patch.setattr(sampler, "sampling_probs", rejection.sampling_probs_triton)


@pytest.mark.parametrize("vocab", [1, 2, 63, 4096, 9001])
@pytest.mark.parametrize("apart", [0.0, 0.3, 3.0])
def test_kernels_verify_as_the_twin_does(
    monkeypatch: pytest.MonkeyPatch, vocab: int, apart: float
) -> None:
    kept = 0
    for seed in range(2):
        rows = asked(seed)
        if vocab < 3:  # no such tokens
            rows = [row for row in rows if not row.params.logit_bias]
        rows = [replace(row, history=()) for row in rows] if vocab < 4 else rows
        logits = normal(seed, len(rows), vocab)
        rows = with_drafts(rows, logits + normal(seed + 10, *logits.shape, spread=apart))
        twin = sample_rows(logits, rows).tolist()
        with monkeypatch.context() as patch:
            by_kernels(patch)
            assert sample_rows(logits, rows).tolist() == twin
        same = [row.draft_token == token for row, token in zip(rows, twin, strict=True)]
        assert all(same) or apart
        kept += sum(same)
    assert kept
    if vocab > 4 and apart > 1:
        assert kept < 2 * len(SETTINGS), "some are replaced"


@pytest.mark.parametrize("vocab", [5000, 33_000])
def test_kernels_choose_what_float64_chooses(monkeypatch: pytest.MonkeyPatch, vocab: int) -> None:
    rows = asked(3)
    logits = normal(7, len(rows), vocab)
    rows = with_drafts(rows, logits + normal(8, *logits.shape, spread=1.0))
    exact = sample_rows(logits.double(), rows).tolist()
    by_kernels(monkeypatch)
    assert sample_rows(logits, rows).tolist() == exact


def test_the_replacement_may_be_in_any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, draft = 3 * rejection._CHUNK + 5, rejection._CHUNK + 9
    by_kernels(monkeypatch)
    for token in (0, draft - 1, 2 * rejection._CHUNK, vocab - 1):
        logits = torch.full((1, vocab), -30.0)
        logits[0, token] = 30.0
        q = torch.zeros(vocab)
        q[draft] = 1.0
        row = SamplingRow(OFF, (), draft_token=draft, draft_probs=q)
        assert sample_rows(logits, [row]).tolist() == [token]


def test_programs_divide_a_row() -> None:
    """Of 128,256 tokens; only the sum of their results is one program per row."""
    grids = dict[str, tuple[int, ...]]()

    def launch(kernel: Any, grid: tuple[int, ...]) -> Any:
        grids[kernel.fn.__name__] = grid
        return lambda *args, **options: None

    logits = torch.zeros(3, 128_256)
    row = SamplingRow(OFF, (), draft_probs=torch.zeros(128_256))
    with pytest.MonkeyPatch.context() as patch:
        by_kernels(patch)
        patch.setattr(rejection, "launch", launch)
        sample_with_probs(logits, [row] * 3, [0])
    assert grids.pop("_combine_chunks_kernel") == (3,)
    assert {name: grid[1] for name, grid in grids.items()} == dict.fromkeys(
        ("_sum_exps_kernel", "_sampling_probs_kernel", "_rejection_sample_kernel"), 63
    )


@pytest.mark.parametrize("vocab", [1, 63, 5000])
def test_returned_probabilities_are_those_sampled_from(
    monkeypatch: pytest.MonkeyPatch, vocab: int
) -> None:
    rows = asked(1) if vocab > 3 else [SamplingRow(replace(OFF, seed=3), ())]
    logits = normal(3, len(rows), vocab)
    at = list(range(len(rows)))[::-2]
    shown = sample_with_probs(logits, rows, at)[1]
    with monkeypatch.context() as patch:
        by_kernels(patch)
        ours = sample_with_probs(logits, rows, at)[1]
    assert shown.keys() == ours.keys() == set(at)
    for row in at:
        z = logits[row].double().numpy()
        p: Any = rows[row].params
        z = ref.penalties(z, rows[row].history, presence=p.presence_penalty)
        z = ref.bias(z, p.logit_bias)
        z = ref.top_k(z, p.top_k) if p.top_k else z
        z = ref.top_p(z, p.top_p) if p.top_p < 1 else z
        z = ref.min_p(z, p.min_p) if p.min_p else z
        exact = ref.softmax(z / p.temperature)
        for found in (shown[row], ours[row]):
            np.testing.assert_allclose(found.numpy(), exact, rtol=2e-5, atol=1e-7)
            assert found.sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("by_kernel", [False, True])
def test_banned_draft_is_replaced(monkeypatch: pytest.MonkeyPatch, by_kernel: bool) -> None:
    if by_kernel:
        by_kernels(monkeypatch)
    logits = torch.zeros(2, 300)
    logits[:, 7] = -math.inf
    q = torch.zeros(300)
    q[[7, 8]] = 0.5
    rows = [
        SamplingRow(replace(OFF, seed=seed), (), draft_token=7, draft_probs=q) for seed in range(2)
    ]
    assert not set(sample_rows(logits, rows).tolist()) & {7, 8}


@pytest.mark.parametrize("by_kernel", [False, True])
def test_all_tokens_banned_gives_token_0(monkeypatch: pytest.MonkeyPatch, by_kernel: bool) -> None:
    if by_kernel:
        by_kernels(monkeypatch)
    q = torch.full((300,), 1 / 300)
    row = SamplingRow(replace(OFF, seed=1), (), draft_token=9, draft_probs=q)
    assert sample_rows(torch.full((1, 300), -math.inf), [row]).tolist() == [0]
    shown = sample_with_probs(torch.full((1, 300), -math.inf), [SamplingRow(OFF, ())], [0])[1]
    assert not shown[0].any()


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("padded", [100, 300, 320])
def test_draft_model_with_another_vocabulary_padding(
    monkeypatch: pytest.MonkeyPatch, by_kernel: bool, padded: int
) -> None:
    """Its probabilities cover a smaller or larger vocabulary; two may be in one step."""
    if by_kernel:
        by_kernels(monkeypatch)
    logits = normal(1, 2, 300)
    q = torch.zeros(padded)
    q[3] = 1.0
    other = torch.zeros(300)
    other[299] = 1.0
    logits[0, 3] = 90.0
    logits[1, 299] = -90.0
    params = replace(OFF, seed=5)
    rows = [
        SamplingRow(params, (), draft_token=3, draft_probs=q),
        SamplingRow(params, (), draft_token=299, draft_probs=other),
    ]
    first, second = sample_rows(logits, rows).tolist()
    assert first == 3
    assert second == int(sample_rows(logits[1:], [SamplingRow(params, ())])), (
        "its own noise draws it"
    )


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_nan_and_infinite_logits_give_a_valid_token(
    monkeypatch: pytest.MonkeyPatch, by_kernel: bool, broken: float
) -> None:
    rows = with_drafts(asked(2), normal(4, len(SETTINGS), 300))
    some = normal(2, len(rows), 300)
    some[:, ::3] = broken
    if by_kernel:
        by_kernels(monkeypatch)
    for logits in (some, torch.full_like(some, broken)):
        assert all(0 <= token < 300 for token in sample_rows(logits, rows).tolist())


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = normal(4, 2 * len(SETTINGS), 700)
    rows = [*with_drafts(asked(5), normal(6, len(SETTINGS), 700)), *asked(7)]
    together = sample_rows(logits, rows).tolist()
    alone = [int(sample_rows(logits[i : i + 1], rows[i : i + 1])) for i in range(len(rows))]
    assert together == alone
    assert together[len(SETTINGS) :] == sample_rows(logits[len(SETTINGS) :], asked(7)).tolist()


@pytest.mark.parametrize("apart", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("setting", [{}, {"top_p": 0.7}, {"top_k": 4, "temperature": 2.0}])
def test_tokens_follow_the_target_and_as_many_drafts_are_kept_as_can_be(
    apart: float, setting: dict[str, Any]
) -> None:
    """The acceptance rate is the overlap of both distributions (Leviathan et al. 2023)."""
    vocab, count = 40, 20_000
    logits = normal(1, 1, vocab)
    others = logits + normal(2, 1, vocab, spread=apart)
    rows = [SamplingRow(replace(OFF, seed=seed, **setting), ()) for seed in range(count)]
    rows = with_drafts(rows, others.expand(count, -1))
    tokens = sample_rows(logits.expand(count, -1), rows).numpy()
    p, q = (
        sample_with_probs(x, [SamplingRow(replace(OFF, **setting), ())], [0])[1][0].double()
        for x in (logits, others)
    )
    counts, expected = np.bincount(tokens, minlength=vocab), count * p.numpy()
    assert not counts[expected == 0].any()
    common = expected >= 5
    expected = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    observed = np.append(counts[common], counts[~common].sum())
    if expected[-1] < 5:
        expected[-2:-1] += expected[-1]
        observed[-2:-1] += observed[-1]
        expected, observed = expected[:-1], observed[:-1]
    expected *= observed.sum() / expected.sum()
    assert chisquare(observed, expected).pvalue > 1e-3
    kept = np.mean([row.draft_token == token for row, token in zip(rows, tokens, strict=True)])
    assert kept == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.015)
