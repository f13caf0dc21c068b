"""The costs of an engine's steps, measured through the gateway of a running cluster."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from benchmarks.cluster import Cluster
from benchmarks.measure import machine
from benchmarks.simulation.costs import SLOTS, EngineCosts
from benchmarks.simulation.measured_steps import (
    ANSWER_TOKENS,
    FACTORS,
    QUESTION_TOKENS,
    SYSTEM_TOKENS,
    MeasuredReplica,
    MeasuredSteps,
    Steps,
    answer_s,
    ask,
    prompt_s,
)
from localgen.backends.llamacpp.shared_cache import MIN_CACHED_PREFIXES
from localgen.backends.types import Message
from localgen.bench.prompts import WordPrompts
from localgen.cluster.totals import REPLICAS

# so few that the newest MIN_CACHED_PREFIXES prefixes, which stay cached, are of more than one long
# prompt, as in the load
_BUSY_REQUESTS = 3
# of a round: single slowdowns deviate by 0.1 with two busy replicas and by 0.4 with four
_BUSY_SAMPLES = 6
_MAX_REWEIGHTINGS = 100
_LEAST_S = 1e-6
# of a model that only the first replica has, so that the gateway sends it all requests
_NAME = "measured"


def counted_words(cluster: Cluster, seed: int) -> WordPrompts:
    """Prompts that know how many tokens a word has."""
    words = WordPrompts(seed)
    words.count(probe := words.make(200), ask(cluster.replicas[0], probe, 2).prompt_tokens)
    return words


class MeasuredCosts:
    """Measured in rounds between other work, as a machine is faster at one time than at another.

    path: of the model that the replicas have. threads: of an engine. report_s: see
    MeasuredSteps.
    """

    def __init__(self, cluster: Cluster, path: str, threads: int, report_s: float) -> None:
        self._cluster, self._threads = cluster, threads
        gateway = cluster.add_model(path, _NAME)
        self._replica = MeasuredReplica(cluster.runtime_dirs[0], _NAME, threads)
        self._measured = MeasuredSteps(gateway, self._replica, report_s)
        self._words = counted_words(cluster, 1)
        self._rounds: list[list[Steps]] = []
        self._slowdowns: list[list[float]] = []

    def measure(self) -> None:
        """One round: steps of a replica while the others are idle, and with all busy. Raises
        RuntimeError if another replica took a part in the steps."""
        self._rounds.append(self._measured.measure(self._words))
        self._require_one_holder()
        counts = range(1, len(self._cluster.replicas) + 1)
        for _ in range(MIN_CACHED_PREFIXES):
            self._busy_s(counts[-1])  # caches as in the samples
        times_s = dict[int, list[float]]()
        for sample in range(_BUSY_SAMPLES):
            for count in counts if sample % 2 else reversed(counts):
                times_s.setdefault(count, []).append(self._busy_s(count))
        means_s = {count: statistics.mean(times_s[count]) for count in counts}
        self._slowdowns.append([means_s[count] / means_s[1] for count in counts])

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """How many times as long as alone requests take with 1, 2, … replicas that compute."""
        return tuple(map(statistics.median, self.slowdowns_of_rounds))

    @property
    def slowdowns_of_rounds(self) -> list[tuple[float, ...]]:
        """For each number of replicas that compute, those of all rounds."""
        return list(zip(*self._slowdowns, strict=True))

    @property
    def num_rounds(self) -> int:
        return len(self._rounds)

    def costs(self, first: int = 0) -> EngineCosts:
        """Steps are fitted to the rounds from this one on; what is no step is a median of all."""
        factors = dict(zip(FACTORS, _fit(self._steps(first)), strict=True))
        for name in ("step_s", "prompt_token_s"):  # the simulator divides by them
            factors[name] = max(factors[name], _LEAST_S)
        info = self._replica.info
        options = info.options
        assert options.max_batch_tokens is not None
        assert options.itl_target_ms is not None
        return EngineCosts(
            source=f"benchmarks.simulation.agreement, {info.description}, {self._threads} threads "
            f"of {machine()['cpu']}",
            **factors,
            request_s=statistics.median(self._measured.request_s),
            max_seqs=info.max_seqs,
            batch_tokens=options.max_batch_tokens,
            itl_target_s=options.itl_target_ms / 1e3,
            kv_tokens=info.kv_tokens,
            kv_bytes=info.kv_bytes // info.kv_tokens,
            cache=SLOTS,
            threads=self._threads,
        )

    @property
    def error(self) -> float:
        """The median relative error of a fit to all rounds."""
        steps = self._steps()
        factors = _fit(steps)

        def fitted_s(each: Steps) -> float:
            return sum(factor * count for factor, count in zip(factors, each.row, strict=True))

        return statistics.median(abs(fitted_s(each) / each.took_s - 1) for each in steps)

    def _steps(self, first: int = 0) -> list[Steps]:
        return [each for steps in self._rounds[first:] for each in steps]

    def _require_one_holder(self) -> None:
        replicas = httpx.get(f"{self._cluster.url}/v1/stats").json()[REPLICAS]
        models = [[model["name"] for model in each["models"]] for each in replicas.values()]
        if (count := sum(_NAME in names for names in models)) != 1:
            raise RuntimeError(f"{count} replicas have loaded the model that one should have")

    def _busy_s(self, count: int) -> float:
        """Seconds of an engine for a long prompt and a hit on it, with `count` clients at once."""
        gateway, words = self._cluster.gateway, self._words
        systems = [Message("system", words.make(SYSTEM_TOKENS)) for _ in range(count)]
        questions = [Message("user", words.make(QUESTION_TOKENS)) for _ in range(_BUSY_REQUESTS)]

        def engine_s(system: Message) -> float:
            asked = [ask(gateway, [system, each], ANSWER_TOKENS) for each in questions]
            # without the last, when other clients may have ended
            return sum(prompt_s(each) + answer_s(each) for each in asked[:-1])

        with ThreadPoolExecutor(count) as pool:
            return statistics.median(pool.map(engine_s, systems))


def _fit(steps: Sequence[Steps]) -> list[float]:
    return fit_factors([each.row for each in steps], [each.took_s for each in steps])


def fit_factors(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Factors of the columns, none below 0, by iteratively reweighted least squares with weights of
    1 / fitted² (quasi-likelihood, whose variance grows with the squared mean).

    With weights of 1 / measured² the fit would be too low: the slower a step happened to be, the
    less its error would count. Raises RuntimeError if the factors do not converge.
    """
    matrix, measured = np.array(rows), np.array(values)
    fitted = np.maximum(measured, _LEAST_S)
    for _ in range(_MAX_REWEIGHTINGS):
        before = fitted
        factors = _least_squares(matrix / fitted[:, None], measured / fitted)
        fitted = np.maximum(matrix @ factors, _LEAST_S)
        if np.allclose(fitted, before, rtol=1e-6, atol=0.0):
            return [float(each) for each in factors]
    raise RuntimeError("the costs of steps do not converge: measure them again")


def _least_squares(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """With no factor below 0 (Lawson & Hanson)."""
    scales = np.linalg.norm(matrix, axis=0)
    scales[scales == 0] = 1.0
    factors: NDArray[np.float64] = nnls(matrix / scales, wanted)[0] / scales
    return factors
