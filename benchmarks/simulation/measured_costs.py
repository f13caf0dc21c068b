"""The costs of an engine's steps, measured at one replica of a running cluster."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.cluster import Cluster, ttft_ms
from benchmarks.measure import machine
from benchmarks.simulation.costs import SLOTS, EngineCosts
from benchmarks.simulation.measured_steps import (
    QUESTION_TOKENS,
    SYSTEM_TOKENS,
    MeasuredReplica,
    Steps,
    ask,
    prompt_s,
)
from localgen.backends.types import Message
from localgen.bench.measured_request import Target
from localgen.bench.prompts import WordPrompts

_ROUNDS, _REQUESTS = 3, 20
_BUSY_REQUESTS, _BUSY_ANSWER = 5, 32


def counted_words(cluster: Cluster, seed: int) -> WordPrompts:
    """Prompts that know how many tokens a word has."""
    words = WordPrompts(seed)
    words.count(probe := words.make(200), ask(cluster.replicas[0], probe, 2).prompt_tokens)
    return words


def measure_costs(
    cluster: Cluster, replica: MeasuredReplica, threads: int
) -> tuple[EngineCosts, float]:
    """Costs of a replica while the others are idle, and the median relative error of their fit."""
    words = counted_words(cluster, 1)
    steps = [each for _ in range(_ROUNDS) for each in replica.measure(words)]
    factors = fit_factors([each.row for each in steps], [each.took_s for each in steps])
    step_s, prompt_token_s, attention_s, sequence_s, context_token_s, cell_s = factors
    info, options = replica.info, replica.info.options
    assert options.max_batch_tokens is not None
    assert options.itl_target_ms is not None
    costs = EngineCosts(
        source=f"benchmarks.simulation.agreement, {info.description}, {threads} threads of "
        f"{machine()['cpu']}",
        step_s=max(step_s, 1e-6),
        prompt_token_s=prompt_token_s,
        attention_s=attention_s,
        sequence_s=sequence_s,
        context_token_s=context_token_s,
        cell_s=cell_s,
        request_s=_request_s(cluster, words),
        max_seqs=info.max_seqs,
        batch_tokens=options.max_batch_tokens,
        itl_target_s=options.itl_target_ms / 1e3,
        kv_tokens=info.kv_tokens,
        kv_bytes=info.kv_bytes // info.kv_tokens,
        cache=SLOTS,
        threads=threads,
    )
    return costs, statistics.median(_error(each, factors) for each in steps)


def _error(steps: Steps, factors: Sequence[float]) -> float:
    fitted_s = sum(factor * count for factor, count in zip(factors, steps.row, strict=True))
    return abs(fitted_s / steps.took_s - 1)


def _request_s(cluster: Cluster, words: WordPrompts) -> float:
    """What client, gateway and server take for a long prompt, whose beginning is cached."""
    system = Message("system", words.make(SYSTEM_TOKENS))
    questions = [Message("user", words.make(QUESTION_TOKENS)) for _ in range(_REQUESTS)]
    _, *cached = [ask(cluster.gateway, [system, each], _BUSY_ANSWER) for each in questions]
    return statistics.median(ttft_ms(each) / 1e3 - prompt_s(each) for each in cached)


def measure_slowdowns(cluster: Cluster) -> tuple[float, ...]:
    """How many times as long as alone prompts take with 1, 2, … replicas that compute."""
    words, replicas = counted_words(cluster, 2), cluster.replicas
    counts = range(1, len(replicas) + 1)
    _busy_prompt_s(replicas, words)  # all caches are full then, as they are in all that follow
    # in turn, as a shared machine is faster at one time than at another
    rounds = [[_busy_prompt_s(replicas[:n], words) for n in counts] for _ in range(_ROUNDS)]
    return tuple(
        statistics.median(times_s[n - 1] / times_s[0] for times_s in rounds) for n in counts
    )


def _busy_prompt_s(replicas: Sequence[Target], words: WordPrompts) -> float:
    """Median time of prompts, with a request in each replica at any time."""
    prompts = [[words.make(SYSTEM_TOKENS) for _ in range(_BUSY_REQUESTS)] for _ in replicas]

    def ask_all(replica: Target, mine: list[str]) -> list[float]:
        return [prompt_s(ask(replica, prompt, _BUSY_ANSWER)) for prompt in mine]

    with ThreadPoolExecutor(len(replicas)) as pool:
        times_s = list(pool.map(ask_all, replicas, prompts))
    # in the last round others may have ended
    return statistics.median(each_s for mine in times_s for each_s in mine[:-1])


def fit_factors(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Factors of the columns, none below 0, with the least relative error (active set)."""
    matrix, wanted = np.array(rows), np.array(values)
    scaled = matrix / wanted[:, None]
    used = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(scaled[:, used], np.ones(len(wanted)), rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            break
        used.pop(int(found.argmin()))
    factors = [0.0] * matrix.shape[1]
    for column, factor in zip(used, found, strict=True):
        factors[column] = max(0.0, float(factor))
    return factors
