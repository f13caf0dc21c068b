"""The costs of an engine's steps, measured at one replica of a running cluster."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.cluster import Cluster, ttft_ms
from benchmarks.measure import machine
from benchmarks.simulation.costs import SLOTS, EngineCosts
from benchmarks.streams import decode_rate
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.bench.measured_request import MeasuredRequest, Prompt, Target
from localgen.bench.prompts import WordPrompts
from localgen.client import LocalClient
from localgen.config import ServerSettings

_PROMPT_TOKENS = (120, 400, 800, 1500)
_BATCHES = (1, 2, 4, 8)
_BUSY_ROUNDS, _BUSY_ANSWER = 5, 32
_ROUNDS, _DECODE_TOKENS, _SHORT_TOKENS, _SHORT_REQUESTS = 3, 256, 40, 20


@dataclass(frozen=True, slots=True)
class _Decode:
    """Seconds of a decode step of so many sequences, with this context in all."""

    sequences: int
    context: float
    step_s: float


def reload(folder: Path, model: str, threads: int) -> ModelInfo:
    """Load the model of a replica again: empty caches, no drafts, and no tiers that keep anything.

    folder: runtime folder of its server. Only its socket takes sizes of tiers, and a replica that
    others may fetch from has one, of a byte here.
    """
    settings = ServerSettings(runtime_dir=folder, state_dir=folder)
    options = LoadOptions(draft="none", kv_ram=1, kv_disk=0, threads=threads, threads_batch=threads)
    with LocalClient(settings) as client:
        client.unload(model)
        return client.load(model, options, keep_alive="-1")


def counted_words(cluster: Cluster, seed: int) -> WordPrompts:
    """Prompts that know how many tokens a word has."""
    words = WordPrompts(seed)
    words.count(probe := words.make(200), _ask(cluster.replicas[0], probe, 2).prompt_tokens)
    return words


def measure_costs(cluster: Cluster, info: ModelInfo, threads: int) -> EngineCosts:
    """Costs of the first replica, while the others are idle. info: of its model."""
    words, replica = counted_words(cluster, 1), cluster.replicas[0]
    decodes = [_decode(replica, words, count) for count in _BATCHES for _ in range(_ROUNDS)]
    decodes += [_decode(replica, words, 1, _PROMPT_TOKENS[-1]) for _ in range(_ROUNDS)]
    step_s, sequence_s, context_token_s = fit_factors(
        [[1.0, each.sequences, each.context] for each in decodes],
        [each.step_s for each in decodes],
    )
    options = info.options
    assert options.max_batch_tokens is not None
    assert options.itl_target_ms is not None
    texts = [words.make(tokens) for tokens in _PROMPT_TOKENS for _ in range(_ROUNDS)]
    prompts = [_ask(replica, text, 2) for text in texts]
    # what a hit costs: a question behind a long prefix in the cache
    questions = [f"{text} {words.make(_SHORT_TOKENS * 2)}" for text in texts[-_ROUNDS:]]
    prompts += [_ask(replica, text, 2) for text in questions]
    sizes = [each.prompt_tokens - each.cached_tokens for each in prompts]
    base_s = [step_s * -(-size // options.max_batch_tokens) for size in sizes]
    prompt_token_s, attention_s = fit_factors(
        [
            [size, (each.cached_tokens + size / 2) * size]
            for size, each in zip(sizes, prompts, strict=True)
        ],
        [_prompt_s(each) - base for each, base in zip(prompts, base_s, strict=True)],
    )
    shorts = [_ask(cluster.gateway, words.make(_SHORT_TOKENS), 2) for _ in range(_SHORT_REQUESTS)]
    request_s = statistics.median(ttft_ms(each) / 1e3 - _prompt_s(each) for each in shorts)
    return EngineCosts(
        source=f"benchmarks.simulation.agreement, {info.description}, {threads} threads of "
        f"{machine()['cpu']}",
        step_s=max(step_s, 1e-6),
        prompt_token_s=prompt_token_s,
        attention_s=attention_s,
        sequence_s=sequence_s,
        context_token_s=context_token_s,
        request_s=max(0.0, request_s),
        max_seqs=info.max_seqs,
        batch_tokens=options.max_batch_tokens,
        itl_target_s=options.itl_target_ms / 1e3,
        kv_tokens=info.kv_tokens,
        kv_bytes=info.kv_bytes // info.kv_tokens,
        cache=SLOTS,
        threads=threads,
    )


def measure_slowdowns(cluster: Cluster) -> tuple[float, ...]:
    """How many times as long as alone prompts take with 1, 2, … replicas that compute."""
    words, replicas = counted_words(cluster, 2), cluster.replicas
    counts = range(1, len(replicas) + 1)
    # in turn, as a shared machine is faster at one time than at another
    rounds = [[_busy_prompt_s(replicas[:n], words) for n in counts] for _ in range(_ROUNDS)]
    return tuple(
        statistics.median(times_s[n - 1] / times_s[0] for times_s in rounds) for n in counts
    )


def _busy_prompt_s(replicas: Sequence[Target], words: WordPrompts) -> float:
    """Median time of prompts, with a request in each replica at any time."""
    prompts = [[words.make(_PROMPT_TOKENS[-1]) for _ in range(_BUSY_ROUNDS)] for _ in replicas]

    def ask_all(replica: Target, mine: list[str]) -> list[float]:
        return [_prompt_s(_ask(replica, prompt, _BUSY_ANSWER)) for prompt in mine]

    with ThreadPoolExecutor(len(replicas)) as pool:
        times_s = list(pool.map(ask_all, replicas, prompts))
    # in the last round others may have ended
    return statistics.median(each_s for mine in times_s for each_s in mine[:-1])


def _ask(target: Target, prompt: Prompt, tokens: int) -> MeasuredRequest:
    """Raises RuntimeError if there is no answer."""
    request = target.ask(prompt, tokens)
    if request.error:
        raise RuntimeError(request.error)
    return request


def _prompt_s(request: MeasuredRequest) -> float:
    """From admission to the first token, as the engine measured it."""
    assert request.timings is not None
    return request.timings.prompt_ms / 1e3


def _decode(
    replica: Target, words: WordPrompts, sequences: int, prompt_tokens: int = _SHORT_TOKENS
) -> _Decode:
    prompts = [words.make(prompt_tokens) for _ in range(sequences)]
    with ThreadPoolExecutor(sequences) as pool:
        streams = list(pool.map(lambda prompt: _ask(replica, prompt, _DECODE_TOKENS), prompts))
    context = sum(each.prompt_tokens + _DECODE_TOKENS / 2 for each in streams)
    return _Decode(sequences, context, sequences / decode_rate(streams))


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
