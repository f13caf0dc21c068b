"""Every sampler setting draws from the distribution of its definition (chi-square)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import pytest
import sampling_reference as ref
from models import TINY_GGUF
from numpy.typing import NDArray
from sampling_cases import CASES, Case
from sampling_reference import Vector, softmax
from scipy.special import log_softmax
from scipy.stats import chisquare

from localgen.backends.llamacpp.batch import LlamaBatch
from localgen.backends.llamacpp.native import LlamaContext, LlamaModel
from localgen.backends.llamacpp.options import resolve_llama_options
from localgen.backends.llamacpp.sampler import SamplerChain, position_logprobs
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.model_info import LoadOptions
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence as Job
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams

DRAWS = 10_000
LEAST_P = 1e-4
CTX = 256
# every setting alone: all others off
OFF = replace(BASE_SAMPLING, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


class Bench:
    """The built-in model after a fixed prompt: its logits in numpy and in llama.cpp."""

    def __init__(self, path: Path) -> None:
        options = resolve_llama_options(LoadOptions(parallel=1, threads=1))
        self.model = LlamaModel(path, options, lambda share: None)
        self.vocab = LlamaCppTokenizer(self.model)
        self.context = LlamaContext(self.model, options, kv_tokens=CTX, n_seq_max=1)
        self.prompt = self.vocab.encode("Once upon a time there was a")
        batch = LlamaBatch(len(self.prompt))
        job = self.job(OFF, self.prompt)
        batch.fill([Chunk(seq=job, start=0, tokens=self.prompt, is_sampled=True)], [0])
        assert C.llama_decode(self.context.handle, batch.native) == 0
        self.row = len(self.prompt) - 1
        pointer = C.llama_get_logits_ith(self.context.handle, self.row)
        self.logits = np.ctypeslib.as_array(pointer, (self.vocab.vocab_size,)).copy()
        self.exact = self.logits.astype(np.float64)
        self.best = np.argsort(-self.exact)

    def job(self, params: SamplingParams, history: Sequence[int]) -> Job:
        tokens = list(history)
        return Job(
            id="x", tokens=tokens, num_prompt=len(tokens), params=params, ctx=CTX, max_len=CTX
        )

    def sampler(self, params: SamplingParams, history: Sequence[int] = ()) -> SamplerChain:
        job = self.job(params, history)
        return SamplerChain(job, self.model.vocab, self.vocab.vocab_size, CTX)

    def continue_drawing(self, params: SamplingParams, n: int) -> list[int]:
        """n tokens as a request at this prompt gets them; each enters its history."""
        chooser = self.sampler(params)
        return [chooser.sample(self.context.handle, self.row, self.logits) for _ in range(n)]

    def first_draws(self, params: SamplingParams, seeds: range) -> list[int]:
        """The first token of one request for each seed."""
        choosers = (self.sampler(replace(params, seed=seed)) for seed in seeds)
        return [c.sample(self.context.handle, self.row, self.logits) for c in choosers]

    def draws(self, params: SamplingParams, history: Sequence[int], n: int) -> list[int]:
        """n tokens from one chain, none of which enters its history."""
        candidates = (C.llama_token_data * self.vocab.vocab_size)()
        kind = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        view = np.frombuffer(memoryview(candidates), kind)
        fresh = np.zeros(self.vocab.vocab_size, kind)
        fresh["id"], fresh["logit"] = np.arange(len(fresh)), self.logits
        first = ctypes.cast(candidates, ctypes.POINTER(C.llama_token_data))
        chooser = self.sampler(params, history)
        tokens: list[int] = []
        for _ in range(n):
            view[:] = fresh
            array: Any = C.llama_token_data_array(first, len(fresh), -1, False)
            C.llama_sampler_apply(chooser._chain, ctypes.byref(array))
            tokens.append(array.data[array.selected].id)
        return tokens

    def counts(self, params: SamplingParams, history: Sequence[int] = ()) -> NDArray[np.int64]:
        """How often each token occurs in DRAWS draws: two streams, sampled together."""
        with ThreadPoolExecutor(2) as threads:
            halves = threads.map(
                lambda seed: self.draws(replace(params, seed=seed), history, DRAWS // 2), (1, 2)
            )
            return np.bincount(np.concatenate(list(halves)), minlength=self.vocab.vocab_size)

    def close(self) -> None:
        self.context.close()
        self.model.close()


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(TINY_GGUF)
    yield bench
    bench.close()


def agreement(counts: NDArray[np.int64], p: Vector) -> float:
    """Chi-square p-value of these counts under p; small expected counts are pooled."""
    if counts[p == 0].any():
        return 0.0
    expected = counts.sum() * p
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    if expected[-1] < 5:  # the pool itself is too small: into the smallest bin with it
        small = int(np.argmin(expected[:-1]))
        observed[small] += observed[-1]
        expected[small] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    if len(observed) == 1:
        return 1.0
    return float(chisquare(observed, expected).pvalue)


# -- the settings -----------------------------------------------------------------------------


def asked(bench: Bench, case: Case) -> SamplingParams:
    """The case's settings with token ids in place of ranks."""
    setting: dict[str, Any] = dict(case.setting)
    biases = setting.get("logit_bias", {})
    setting["logit_bias"] = {int(bench.best[rank]): value for rank, value in biases.items()}
    return replace(OFF, **setting)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_draws_follow_the_definition(bench: Bench, case: Case) -> None:
    counts = bench.counts(asked(bench, case), bench.best[list(case.history)].tolist())
    assert agreement(counts, case.expected(bench.exact, bench.best)) > LEAST_P
    if case.setting:  # the setting does something, and the test would notice if it did not
        assert agreement(counts, softmax(bench.exact)) < LEAST_P


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"mirostat": 1}, lambda z: ref.mirostat_1(z, 3.0, candidates=100)),
        ({"mirostat": 2}, lambda z: ref.mirostat_2(z, 3.0)),
        ({"mirostat": 2, "temperature": 1.4}, lambda z: ref.mirostat_2(z / 1.4, 3.0)),
    ],
)
def test_first_draws_of_mirostat(
    bench: Bench, setting: dict[str, Any], expected: Callable[[Vector], Vector]
) -> None:
    params = replace(OFF, mirostat_tau=3.0, **setting)
    counts = np.bincount(bench.first_draws(params, range(DRAWS)), minlength=len(bench.exact))
    assert agreement(counts, softmax(expected(bench.exact))) > LEAST_P
    assert agreement(counts, softmax(bench.exact)) < LEAST_P


@pytest.mark.parametrize("end_bias", [-100.0, -2.0, 0.0, 3.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 4.0])
def test_draws_of_infill(bench: Bench, end_bias: float, temperature: float) -> None:
    """Of 3 tokens and an end, which end_bias makes unlikely or likely; temperature after it."""
    ends = sorted(bench.vocab.eos_token_ids)
    end = ends[0]
    biased = bench.exact.copy()
    biased[end] = bench.exact[bench.best[0]] + end_bias
    bias = {end: biased[end] - bench.exact[end]}
    params = replace(OFF, top_k=4, infill_sampler=True, logit_bias=bias, temperature=temperature)
    pieces = [bench.vocab.piece(token) for token in range(len(biased))]
    kept = ref.infill(ref.top_k(biased, 4), pieces, ends)
    counts = bench.counts(params)
    if np.isneginf(kept).all():  # no token is likely
        assert counts[ends].sum() == DRAWS
    elif temperature == 0:
        assert counts[kept.argmax()] == DRAWS
    else:
        assert agreement(counts, softmax(kept / temperature)) > LEAST_P


@pytest.mark.parametrize(
    "wrong",
    [
        lambda z: softmax(ref.top_p(z / 2, 0.7)),  # the other order
        lambda z: softmax(ref.top_p(z, 0.7) / 1.8),
        lambda z: softmax(ref.top_p(z, 0.68) / 2),
        lambda z: softmax(ref.top_p(z, 0.72) / 2),
    ],
)
def test_a_wrong_reference_is_noticed(bench: Bench, wrong: Callable[[Vector], Vector]) -> None:
    counts = bench.counts(replace(OFF, temperature=2.0, top_p=0.7))
    assert agreement(counts, wrong(bench.exact)) < LEAST_P


# -- streams and history ----------------------------------------------------------------------


@pytest.mark.parametrize("setting", [{}, {"top_k": 40, "top_p": 0.9}, {"xtc_probability": 0.5}])
def test_a_request_draws_what_the_bench_draws(bench: Bench, setting: dict[str, Any]) -> None:
    params = replace(OFF, **setting)
    assert bench.continue_drawing(params, 200) == bench.draws(params, (), 200)


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**32 - 1, 2**64 - 1, -1])
@pytest.mark.parametrize(
    "setting", [{}, {"xtc_probability": 0.5}, {"mirostat": 1}, {"mirostat": 2}]
)
def test_a_seed_fixes_the_draws(bench: Bench, setting: dict[str, Any], seed: int) -> None:
    params = replace(OFF, seed=seed, **setting)
    drawn = bench.continue_drawing(params, 60)
    assert drawn == bench.continue_drawing(params, 60)
    assert drawn != bench.continue_drawing(replace(params, seed=seed + 7), 60)


def test_greedy_is_the_best_token(bench: Bench) -> None:
    greedy = replace(OFF, temperature=0.0)
    assert bench.continue_drawing(greedy, 3) == [int(bench.exact.argmax())] * 3


def test_greedy_with_a_bias_and_penalties(bench: Bench) -> None:
    first, second, third = bench.best[:3].tolist()
    banned = replace(OFF, temperature=0.0, logit_bias={first: -math.inf})
    assert bench.continue_drawing(banned, 3) == [second] * 3
    varied = replace(OFF, temperature=0.0, presence_penalty=100.0)
    assert bench.continue_drawing(varied, 3) == [first, second, third]


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-8, 1e-4])
def test_the_lowest_temperatures_are_greedy(bench: Bench, temperature: float) -> None:
    for top_k in (0, 40):
        params = replace(OFF, temperature=temperature, top_k=top_k)
        assert bench.continue_drawing(params, 3) == [int(bench.exact.argmax())] * 3


def test_drawn_tokens_enter_the_window_and_leave_it(bench: Bench) -> None:
    params = replace(OFF, presence_penalty=100.0, repeat_last_n=3, top_k=5)
    drawn = bench.continue_drawing(params, 100)
    for at in range(len(drawn)):
        assert drawn[at] not in drawn[max(0, at - 3) : at]
    assert any(drawn[at] == drawn[at - 4] for at in range(4, 100))


@pytest.mark.parametrize(
    "setting",
    [
        {"repeat_last_n": -1, "presence_penalty": 1.0},
        {"dry_penalty_last_n": -1, "dry_multiplier": 1.0, "dry_sequence_breakers": ()},
        {"top_k": 4096},
    ],
)
@pytest.mark.parametrize("huge", [2**31 - 1, 2**31, 2**32 + 1])
def test_counts_beyond_the_context_mean_all_of_it(
    bench: Bench, setting: dict[str, Any], huge: int
) -> None:
    usual = replace(OFF, **setting)
    more = replace(OFF, **(setting | {next(iter(setting)): huge}))
    assert bench.continue_drawing(more, 60) == bench.continue_drawing(usual, 60)


# -- log probabilities ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 4096, 10_000])
def test_logprobs_are_the_model_s_own(bench: Bench, count: int) -> None:
    before = bench.logits.copy()
    expected = log_softmax(bench.exact)
    chosen = int(bench.best[17])
    got = position_logprobs(bench.logits, chosen, count, lambda token: f"<{token}>")
    assert (got.chosen.token_id, got.chosen.text) == (chosen, f"<{chosen}>")
    assert got.chosen.logprob == pytest.approx(expected[chosen], abs=1e-9)
    ids = [entry.token_id for entry in got.top]
    assert len(ids) == len(set(ids)) == min(count, 4096)
    values = [entry.logprob for entry in got.top]
    assert values == pytest.approx(expected[ids], abs=1e-9)
    assert values == sorted(expected, reverse=True)[:count]
    assert all(entry.text == f"<{entry.token_id}>" for entry in got.top)
    assert (bench.logits == before).all()


def test_all_probabilities_add_up_to_one(bench: Bench) -> None:
    got = position_logprobs(bench.logits, 0, len(bench.logits), str)
    assert math.fsum(math.exp(entry.logprob) for entry in got.top) == pytest.approx(1, abs=1e-12)
