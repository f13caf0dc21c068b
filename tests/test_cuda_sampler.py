"""Sampling on the device: distributions, random streams, and kernels equal to their reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sampling_reference as ref
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from sampling_cases import CASES, Case
from sampling_reference import Vector, softmax
from scipy.special import log_softmax
from scipy.stats import chisquare
from torch import Tensor

from localgen.backends.cuda.kernels.sampling import kernels, sample
from localgen.backends.cuda.kernels.sampling.gumbel import (
    gumbel_noise,
    hash_seed,
    random_bits,
    tl_gumbel_noise,
    tl_random_bits,
)
from localgen.backends.cuda.steps import sampler
from localgen.backends.cuda.steps.logprobs import top_logprobs
from localgen.backends.cuda.steps.sampler import UNSUPPORTED_PARAMS, SamplingRow, sample_rows
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams

DRAWS = 20_000
LEAST_P = 1e-4
VOCAB = 500
# every setting alone: all others off
OFF = replace(BASE_SAMPLING, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
GREEDY = replace(OFF, temperature=0.0)
# the interpreter computes in numpy, which warns of integer overflow and underflow of exp
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def drawn(seed: int, *shape: int, spread: float = 2.5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


LOGITS = drawn(1, VOCAB)
EXACT: Vector = LOGITS.double().numpy()
BEST = np.argsort(-EXACT)


@pytest.fixture(params=["twin", "kernel"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations of sampling; the kernels get poisoned output tensors."""
    if request.param == "kernel":
        make: Any = torch.empty

        def poisoned(*shape: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor:
            made: Tensor = make(*shape, dtype=dtype, **kwargs)
            return made.fill_(math.nan if dtype.is_floating_point else 101)

        monkeypatch.setattr(torch, "empty", poisoned)
        monkeypatch.setattr(sampler, "sample_tokens", sample.sample_tokens_triton)
    return str(request.param)


def choose_both(
    monkeypatch: pytest.MonkeyPatch, logits: Tensor, rows: Sequence[SamplingRow]
) -> tuple[list[int], list[int]]:
    """Tokens by the reference and by the kernels."""
    twin = sample_rows(logits, rows).tolist()
    with monkeypatch.context() as patch:
        patch.setattr(sampler, "sample_tokens", sample.sample_tokens_triton)
        return twin, sample_rows(logits, rows).tolist()


# -- distributions ----------------------------------------------------------------------------


def agreement(counts: NDArray[np.int64], p: Vector) -> float:
    """Chi-square p-value of these counts under p; rare tokens are pooled."""
    if counts[p == 0].any():
        return 0.0
    expected = counts.sum() * p
    order = np.argsort(expected)
    # pool the rarest tokens until at least five are expected
    rare = int(np.searchsorted(np.cumsum(expected[order]), 5)) + 1
    rare = max(rare, int((expected < 5).sum()))
    observed = np.append(counts[order[rare:]], counts[order[:rare]].sum())
    expected = np.append(expected[order[rare:]], expected[order[:rare]].sum())
    if len(observed) == 1:
        return 1.0
    return float(chisquare(observed, expected).pvalue)


def counts_of(params: SamplingParams, history: Sequence[int] = ()) -> NDArray[np.int64]:
    """How often each token is the first of a request, over DRAWS seeds."""
    counts = np.zeros(VOCAB, np.int64)
    for first in range(0, DRAWS, 4000):
        seeds = range(first, first + 4000)
        rows = [SamplingRow(replace(params, seed=seed), history) for seed in seeds]
        tokens = sample_rows(LOGITS.expand(len(rows), -1), rows).numpy()
        counts += np.bincount(tokens, minlength=VOCAB)
    return counts


SUPPORTED = [case for case in CASES if not UNSUPPORTED_PARAMS & case.setting.keys()]


@pytest.mark.parametrize("case", SUPPORTED, ids=lambda case: case.name)
def test_draws_follow_the_definition(case: Case) -> None:
    setting: dict[str, Any] = dict(case.setting)
    biases = setting.get("logit_bias", {})
    setting["logit_bias"] = {int(BEST[rank]): value for rank, value in biases.items()}
    counts = counts_of(replace(OFF, **setting), BEST[list(case.history)].tolist())
    assert agreement(counts, case.expected(EXACT, BEST)) > LEAST_P
    if case.setting:  # the setting does something, and the test would notice if it did not
        assert agreement(counts, softmax(EXACT)) < LEAST_P


def test_cases_cover_every_supported_sampler() -> None:
    asked = set().union(*(case.setting.keys() for case in SUPPORTED))
    assert asked >= {
        "temperature", "top_k", "top_p", "min_p", "logit_bias", "repeat_penalty",
        "presence_penalty", "frequency_penalty", "repeat_last_n",
    }  # fmt: skip


def test_all_settings_combined_follow_the_definition() -> None:
    best: list[int] = BEST.tolist()
    history = [best[rank] for rank in (0, 1, 0, 2, 0, 4, 5)]
    params = replace(
        OFF, temperature=1.3, top_k=30, top_p=0.9, min_p=0.02, logit_bias={best[1]: 1.5},
        repeat_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1,
    )  # fmt: skip
    z = ref.penalties(EXACT, history, repeat=1.1, presence=0.2, frequency=0.1)
    z = ref.bias(z, {best[1]: 1.5})
    z = ref.min_p(ref.top_p(ref.top_k(z, 30), 0.9), 0.02)
    assert agreement(counts_of(params, history), softmax(z / 1.3)) > LEAST_P


def test_positions_of_one_seed_are_independent_draws() -> None:
    rows = [SamplingRow(OFF, range(position)) for position in range(DRAWS // 4)]
    tokens = sample_rows(LOGITS.expand(len(rows), -1), rows).numpy()
    assert agreement(np.bincount(tokens, minlength=VOCAB), softmax(EXACT)) > LEAST_P
    pairs = np.corrcoef(EXACT[tokens[1:]], EXACT[tokens[:-1]])[0, 1]
    assert abs(pairs) < 4 / math.sqrt(len(tokens))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda z: softmax(ref.top_p(z / 2, 0.7)),  # the other order
        lambda z: softmax(ref.top_p(z, 0.7) / 1.8),
        lambda z: softmax(ref.top_p(z, 0.68) / 2),
        lambda z: softmax(ref.top_p(z, 0.72) / 2),
    ],
)
def test_a_wrong_reference_is_noticed(wrong: Callable[[Vector], Vector]) -> None:
    counts = counts_of(replace(OFF, temperature=2.0, top_p=0.7))
    assert agreement(counts, wrong(EXACT)) < LEAST_P


# -- noise ------------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def _noise(mixes, positions, bits, noise, tokens, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = tl.arange(0, block)
    mix, position = tl.load(mixes + row), tl.load(positions + row)
    place = row * tokens + at
    tl.store(bits + place, tl_random_bits(mix, position, at), mask=at < tokens)
    tl.store(noise + place, tl_gumbel_noise(mix, position, at), mask=at < tokens)


def splitmix(x: int) -> int:
    """Steele et al. 2014, in Python integers."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_noise_is_splitmix_on_both_sides() -> None:
    seeds, tokens = [0, 1, 2**31 - 1, 2**64 - 1, -1, 12345], 3000
    places = [0, 1, 77, 131071, 5, 2**40]
    mixes = torch.tensor([hash_seed(seed) for seed in seeds])
    positions = torch.tensor(places)
    bits = torch.full((len(seeds), tokens), -1, dtype=torch.int32)
    noise = torch.full((len(seeds), tokens), math.nan)
    _noise[(len(seeds),)](mixes, positions, bits, noise, tokens, block=4096)
    twin = random_bits(mixes, positions, tokens)
    assert (bits.long() % 2**32 == twin).all()
    for row, (seed, place) in enumerate(zip(seeds, places, strict=True)):
        start = splitmix(splitmix(seed % 2**64) + place)
        for token in (0, 1, 2, 1234, tokens - 1):
            step = token * 0x9E3779B97F4A7C15
            assert int(twin[row, token]) == splitmix((start + step) % 2**64) >> 32
    uniform = ((twin.float() + 0.5) / 2**32).clamp(max=1 - 2**-24).double()
    exact = -torch.log(-torch.log1p(-uniform))
    torch.testing.assert_close(noise.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        gumbel_noise(mixes, positions, tokens).double(), exact, rtol=1e-6, atol=1e-6
    )


# -- the kernels against the twin -------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 3.0, "top_k": 40},
    {"temperature": 100.0, "top_k": 1},
    {"temperature": 100.0, "top_k": 2},
    {"temperature": 100.0, "top_k": 63, "top_p": 0.9},
    {"temperature": 100.0, "top_k": 300},
    {"temperature": 100.0, "top_k": 300, "top_p": 0.6, "min_p": 1e-4},
    {"temperature": 100.0, "top_k": 10**9},
    {"temperature": 100.0, "top_p": 0.5},
    {"temperature": 100.0, "top_p": 0.95},
    {"temperature": 100.0, "top_p": 0.999},
    {"temperature": 100.0, "top_p": 0.0},
    {"temperature": 100.0, "top_p": 0.9, "min_p": 0.3},
    {"temperature": 100.0, "min_p": 0.05},
    {"temperature": 100.0, "min_p": 1.0},
    {"temperature": 100.0, "min_p": 1e-5},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
]


def asked(seed: int, history: Sequence[int] = (1, 2, 3)) -> list[SamplingRow]:
    """One row for each setting."""
    return [
        SamplingRow(replace(OFF, seed=seed + i, **setting), history)
        for i, setting in enumerate(SETTINGS)
    ]


@pytest.mark.parametrize("vocab", [1, 63, 1000, 4099, 9001])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_kernels_draw_what_the_twin_draws(
    monkeypatch: pytest.MonkeyPatch, vocab: int, spread: float
) -> None:
    rows = asked(100)
    twin, ours = choose_both(monkeypatch, drawn(1, len(rows), vocab, spread=spread), rows)
    assert twin == ours


@pytest.mark.parametrize("spread", [0.2, 4.0])
def test_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch, spread: float) -> None:
    rows = asked(7)
    twin, ours = choose_both(monkeypatch, drawn(5, len(rows), 32003, spread=spread), rows)
    assert twin == ours


@pytest.mark.parametrize("spread", [0.3, 4.0])
def test_a_vocabulary_of_more_groups_than_are_searched(
    monkeypatch: pytest.MonkeyPatch, spread: float
) -> None:
    rows = [row for row in asked(8) if row.params.top_k in (1, 2, 40, 300)]
    rows += [row for row in asked(9) if row.params.top_p in (0.0, 0.95) and not row.params.top_k]
    twin, ours = choose_both(monkeypatch, drawn(6, len(rows), 70001, spread=spread), rows)
    assert twin == ours


@pytest.mark.parametrize("step", [0.25, 2.0])
def test_ties_are_kept_or_removed_together(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """Logits with few distinct values, so that every threshold has ties."""
    for seed in range(2):
        rows = asked(1000 + 100 * seed)
        logits = (drawn(seed, len(rows), 3001) / step).round() * step
        twin, ours = choose_both(monkeypatch, logits, rows)
        assert twin == ours


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_kernels_draw_what_float64_draws(
    monkeypatch: pytest.MonkeyPatch, kind: torch.dtype
) -> None:
    """Also of logits that were bfloat16, of which several are equal to the last one kept."""
    rows = asked(30)
    logits = drawn(9, len(rows), 5003, spread=4.0).to(kind).float()
    exact = sample_rows(logits.double(), rows).tolist()
    monkeypatch.setattr(sampler, "sample_tokens", sample.sample_tokens_triton)
    assert sample_rows(logits, rows).tolist() == exact


@pytest.mark.parametrize(
    ("setting", "kind", "most"),
    [
        ({"top_k": 40}, torch.bfloat16, 8),
        ({"top_k": 40}, torch.float32, 13),
        ({"top_k": 40, "top_p": 0.95}, torch.bfloat16, 10),
        ({"top_k": 40, "top_p": 0.95}, torch.float32, 20),
    ],
)
def test_few_turns_find_the_threshold(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], kind: torch.dtype, most: int
) -> None:
    """Each waits for the one before. Four pivots a turn, to the last bit, take 16 and 26."""
    turns = 0
    narrow = kernels._next_bounds

    def counted(*bounds: Any) -> Any:
        nonlocal turns
        turns += 1
        return narrow(*bounds)

    monkeypatch.setattr(kernels, "_next_bounds", counted)
    monkeypatch.setattr(sampler, "sample_tokens", sample.sample_tokens_triton)
    for seed in range(2):
        logits = drawn(seed, 1, 32003, spread=4.0).to(kind).float()
        turns = 0
        sample_rows(logits, [SamplingRow(replace(OFF, **setting), ())])
        assert 0 < turns <= most


def test_rows_with_a_stride_and_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = asked(3)
    wide = drawn(3, len(rows), 800)
    for logits in (wide[:, :777], wide.half()[:, :777]):
        twin, ours = choose_both(monkeypatch, logits, rows)
        assert twin == ours


def test_both_signs_of_zero_are_one_value(path: str) -> None:
    logits = torch.full((1, 200), -5.0)
    logits[0, [3, 90]] = torch.tensor([0.0, -0.0])
    params = replace(OFF, top_k=1)
    tokens = {
        int(sample_rows(logits, [SamplingRow(replace(params, seed=i), ())])) for i in range(30)
    }
    assert tokens == {3, 90}


# -- settings, on both paths ------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_batch(path: str) -> None:
    rows = asked(50)
    logits = drawn(4, len(rows), 700)
    together = sample_rows(logits, rows).tolist()
    alone = [int(sample_rows(logits[i : i + 1], rows[i : i + 1])) for i in range(len(rows))]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample_rows(logits[order], [rows[i] for i in order]).tolist()
    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_a_seed_and_a_position_fix_the_token(path: str) -> None:
    def stream(seed: int) -> list[int]:
        params = replace(OFF, seed=seed)
        rows = [SamplingRow(params, range(position)) for position in range(12)]
        tokens: list[int] = sample_rows(LOGITS.expand(12, -1).contiguous(), rows).tolist()
        return tokens

    for seed in (0, 2**32 - 1, -1):
        own = stream(seed)
        assert own == stream(seed)
        assert own != stream(seed + 7)


def test_greedy_takes_the_lowest_of_the_best(path: str) -> None:
    logits = drawn(1, 3, 333)
    logits[0, [17, 200, 301]] = 50.0
    logits[1] = 4.0
    rows = [
        SamplingRow(replace(GREEDY, top_k=5, top_p=0.5), ()),
        SamplingRow(GREEDY, ()),
        SamplingRow(GREEDY, ()),
    ]
    assert sample_rows(logits, rows).tolist() == [17, 0, int(logits[2].argmax())]


def test_ties_with_the_last_kept_token_are_kept(path: str) -> None:
    logits = torch.full((1, 300), -9.0)
    logits[0, [5, 70, 130, 299]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    for setting in ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}):
        params = replace(OFF, temperature=5.0, **setting)
        tokens = {
            int(sample_rows(logits, [SamplingRow(replace(params, seed=i), ())])) for i in range(20)
        }
        assert tokens == {5, 70, 130, 299}


@pytest.mark.parametrize("k", [1, 2, 5, 70])
def test_neighbours_among_floats_are_told_apart(path: str, k: int) -> None:
    """Each logit is the next float above the one before it."""
    vocab = 6000 if k == 70 else 300
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(k))
    logits = torch.empty(1, vocab, dtype=torch.float32)
    logits[0, order] = 1 + torch.arange(vocab) * 2.0**-23
    expected = set(order[-k:].tolist())
    for setting in ({"top_k": k}, {"top_p": (k - 0.5) / vocab}):
        rows = [SamplingRow(replace(OFF, seed=seed, **setting), ()) for seed in range(12)]
        found = set(sample_rows(logits.expand(12, -1).contiguous(), rows).tolist())
        assert found <= expected
        assert len(found) >= min(k, 4)


def test_of_equal_scores_the_lowest_token_wins(path: str) -> None:
    """The noise is negligible beside such logits."""
    logits = torch.full((3, 9001), 1e30)
    logits[1, :5000] = 0.0
    logits[2, ::2] = 0.0
    for setting in ({}, {"min_p": 0.5}, {"top_k": 100}, {"top_k": 1, "top_p": 0.9}):
        rows = [SamplingRow(replace(OFF, **setting), ())] * 3
        assert sample_rows(logits, rows).tolist() == [0, 5000, 1]


def test_banned_tokens_never_come(path: str) -> None:
    banned = {int(token): -math.inf for token in BEST[:490]}
    rows = [SamplingRow(replace(row.params, logit_bias=banned), ()) for row in asked(60)]
    tokens = sample_rows(LOGITS.expand(len(rows), -1).contiguous(), rows).tolist()
    assert not set(tokens) & banned.keys()


def test_one_or_no_allowed_token(path: str) -> None:
    one, none = torch.full((2, 130), -math.inf)
    one[77] = -1e30
    for logits, expected in ((one, 77), (none, 0)):
        rows = asked(9)
        tokens = sample_rows(logits.expand(len(rows), -1).contiguous(), rows).tolist()
        assert tokens == [expected] * len(rows)


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-8, 1e-4])
def test_the_lowest_temperatures_are_greedy(path: str, temperature: float) -> None:
    for setting in ({}, {"top_k": 40}, {"top_p": 0.9}):
        rows = [
            SamplingRow(replace(OFF, temperature=temperature, seed=seed, **setting), ())
            for seed in (1, 2)
        ]
        tokens = sample_rows(LOGITS.expand(2, -1).contiguous(), rows).tolist()
        assert tokens == [int(BEST[0])] * 2


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 1.0, 100.0])
@pytest.mark.parametrize("size", [1e6, 3e38])
def test_largest_logits_win_at_extreme_values(path: str, temperature: float, size: float) -> None:
    """The sign alone decides."""
    logits = torch.full((1, 200), -size)
    logits[0, [20, 150]] = size
    for setting in SETTINGS:
        params = replace(OFF, **setting | {"temperature": temperature})
        assert int(sample_rows(logits, [SamplingRow(params, ())])) in (20, 150)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_nan_and_infinite_logits_give_a_valid_token(path: str, broken: float) -> None:
    rows = asked(2)
    some = drawn(2, len(rows), 300)
    some[:, ::3] = broken
    for logits in (some, torch.full_like(some, broken)):
        assert all(0 <= token < 300 for token in sample_rows(logits, rows).tolist())


def test_penalties_and_biases_choose_the_best_left(path: str) -> None:
    first, second, third = BEST[:3].tolist()

    def greedy(history: Sequence[int] = (), **setting: Any) -> int:
        return int(sample_rows(LOGITS[None], [SamplingRow(replace(GREEDY, **setting), history)]))

    assert greedy([first]) == first
    assert greedy([first], presence_penalty=100.0) == second
    assert greedy([first, second], presence_penalty=100.0) == third
    assert greedy([first, second, second], presence_penalty=100.0, repeat_last_n=2) == first
    assert greedy([first] * 70, presence_penalty=100.0, repeat_last_n=0) == first
    assert greedy([first] + [third] * 70, presence_penalty=100.0, repeat_last_n=-1) == second
    assert greedy([first], logit_bias={first: -math.inf}) == second
    assert greedy([first], logit_bias={499: 1e6}) == 499
    # a bias compensates a penalty: it is added afterwards
    assert greedy([first], frequency_penalty=50.0, logit_bias={first: 50.0}) == first
    low = LOGITS - LOGITS.max() - 1  # below 0 a penalty multiplies
    row = SamplingRow(replace(GREEDY, repeat_penalty=3.0), [first])
    assert int(sample_rows(low[None], [row])) == second


def test_edited_logits_equal_the_reference(path: str) -> None:
    """A token that is otherwise certain shows its edited logit."""
    history = [3, 4, 4, 5, 5, 5]
    z = ref.penalties(EXACT, history, repeat=1.7, presence=0.3, frequency=0.9)
    z = ref.bias(z, {5: 2.5, 9: -1.25})
    for token in (3, 4, 5, 9, 11):
        for shift, expected in ((-1e-4, 0), (1e-4, token)):
            only = {other: -math.inf for other in range(1, VOCAB) if other != token}
            own = {5: 2.5, 9: -1.25}.get(token, 0.0)
            params = replace(
                GREEDY, repeat_penalty=1.7, presence_penalty=0.3, frequency_penalty=0.9,
                logit_bias={**only, token: own, 0: float(z[token]) - EXACT[0] - shift},
            )  # fmt: skip
            assert int(sample_rows(LOGITS[None], [SamplingRow(params, history)])) == expected


def test_logits_are_left_as_they_are(path: str) -> None:
    logits = drawn(6, 2, 300)
    before = logits.clone()
    params = replace(OFF, presence_penalty=1.0, logit_bias={3: 4.0}, top_k=10)
    sample_rows(logits, [SamplingRow(params, [1, 2]), SamplingRow(OFF, [])])
    assert (logits == before).all()


def test_many_rows_take_the_larger_chunks(path: str) -> None:
    assert sample._scan_groups_and_warps(2) != sample._scan_groups_and_warps(19)
    logits = drawn(8, 19, 5000)
    rows = asked(4)
    assert sample_rows(logits, rows).tolist()[:2] == sample_rows(logits[:2], rows[:2]).tolist()


# -- log probabilities ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 20, 10_000])
def test_top_logprobs(n: int) -> None:
    logits = drawn(1, 4, 900)
    chosen = torch.tensor([0, 5, 899, 17])
    own, ids, values = top_logprobs(logits, chosen, n)
    exact = torch.from_numpy(log_softmax(logits.double().numpy(), axis=1))
    assert own.dtype is values.dtype is torch.float32
    assert ids.shape == values.shape == (4, min(n, 900))
    torch.testing.assert_close(own.double(), exact[range(4), chosen], rtol=0, atol=1e-5)
    torch.testing.assert_close(values.double(), exact.gather(1, ids), rtol=0, atol=1e-5)
    sorted_exact = exact.sort(descending=True).values[:, :n]
    torch.testing.assert_close(values.double(), sorted_exact, rtol=0, atol=1e-5)
