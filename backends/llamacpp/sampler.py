"""Sampling with llama.cpp: one sampler chain per request, and logprobs from the raw logits."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
from numpy.typing import NDArray

from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import SamplingParams, uses_adaptive_p, uses_penalties
from localgen.backends.types import PositionLogprobs, TokenLogprob

Logits = NDArray[np.float32]
_MIN_KEEP = 1
_MIROSTAT_CANDIDATES = 100  # m in the paper (Basu et al. 2021)
# llama.cpp treats 0xFFFFFFFF as "random seed"; the remainder is never that
_NUM_SEEDS = 0xFFFFFFFF
# seeds XTC differently from the token draw
_XTC_SEED_OFFSET = 0x9E3779B9
# below this only the best token has a chance, and dividing by it would overflow
_MIN_TEMPERATURE = 1e-6
# relative probability below which tokens count as excluded (banned or masked): they hold no mass,
# but the logarithm of zero would corrupt the entropy that typical-p computes
_EXCLUDED_PROB = 1e-30


class SamplerChain:
    """Samples the tokens of one request; owns a llama.cpp chain and its random state.

    Penalties count the prompt of `seq`, which is added at the start. A chain lives as long as its
    sequence, across preemptions, so that preemption does not change the text.
    """

    def __init__(self, seq: Sequence, vocab: Any, vocab_size: int, ctx: int) -> None:
        params = seq.params
        self._is_greedy = params.temperature == 0 and not (
            params.logit_bias
            or uses_penalties(params)
            or params.dry_multiplier
            or params.infill_sampler
        )
        self._chain = None if self._is_greedy else _build_chain(params, vocab, vocab_size, ctx)
        self.num_logprobs = params.logprobs
        if self._chain and (uses_penalties(params) or params.dry_multiplier):
            for token in seq.tokens[: seq.num_prompt]:
                C.llama_sampler_accept(self._chain, token)

    def sample(self, context: Any, index: int, logits: Logits) -> int:
        """Return the next token. index: row in the batch. logits: that row, float32 [vocab]."""
        if self._chain is None:
            return int(logits.argmax())
        return int(C.llama_sampler_sample(self._chain, context, index))

    def close(self) -> None:
        if self._chain:
            C.llama_sampler_free(self._chain)
            self._chain = None

    def __del__(self) -> None:
        self.close()


def _build_chain(params: SamplingParams, vocab: Any, vocab_size: int, ctx: int) -> Any:
    """Build the chain in llama.cpp's default order.

    top-k comes early because the samplers after it sort the remaining candidates.
    """
    chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
    for part in _chain_samplers(params, vocab, vocab_size, ctx):
        C.llama_sampler_chain_add(chain, part)
    return chain


def _chain_samplers(params: SamplingParams, vocab: Any, vocab_size: int, ctx: int) -> list[Any]:
    p: Any = params  # InputProcessor has set every field
    parts = _history_samplers(p, vocab, vocab_size, ctx)
    seed = (p.seed or 0) % _NUM_SEEDS
    if p.temperature == 0 and not p.infill_sampler:
        return [*parts, C.llama_sampler_init_greedy()]
    temperature = C.llama_sampler_init_temp_ext(
        max(p.temperature, _MIN_TEMPERATURE), p.dynatemp_range, p.dynatemp_exponent
    )
    if p.mirostat == 1:
        chosen = C.llama_sampler_init_mirostat(
            vocab_size, seed, p.mirostat_tau, p.mirostat_eta, _MIROSTAT_CANDIDATES
        )
        return [*parts, temperature, chosen]
    if p.mirostat == 2:
        chosen = C.llama_sampler_init_mirostat_v2(seed, p.mirostat_tau, p.mirostat_eta)
        return [*parts, temperature, chosen]
    steps: list[tuple[bool, Callable[..., Any], tuple[Any, ...]]] = [
        (p.top_n_sigma >= 0, C.llama_sampler_init_top_n_sigma, (p.top_n_sigma,)),
        (p.top_k > 0, C.llama_sampler_init_top_k, (min(p.top_k, vocab_size),)),
        (p.typical_p < 1, C.llama_sampler_init_min_p, (_EXCLUDED_PROB, _MIN_KEEP)),
        (p.typical_p < 1, C.llama_sampler_init_typical, (p.typical_p, _MIN_KEEP)),
        (p.top_p < 1, C.llama_sampler_init_top_p, (p.top_p, _MIN_KEEP)),
        (p.min_p > 0, C.llama_sampler_init_min_p, (p.min_p, _MIN_KEEP)),
        (
            p.xtc_probability > 0,
            C.llama_sampler_init_xtc,
            # a separate random stream, or XTC would repeat the draw of the token
            (p.xtc_probability, p.xtc_threshold, _MIN_KEEP, (seed + _XTC_SEED_OFFSET) % _NUM_SEEDS),
        ),
    ]
    parts += [make(*arguments) for wanted, make, arguments in steps if wanted]
    if p.infill_sampler:
        parts.append(C.llama_sampler_init_infill(vocab))
    if p.temperature == 0:
        return [*parts, C.llama_sampler_init_greedy()]
    if uses_adaptive_p(p):
        last = C.llama_sampler_init_adaptive_p(p.adaptive_target, p.adaptive_decay, seed)
    else:
        last = C.llama_sampler_init_dist(seed)
    return [*parts, temperature, last]


def _history_samplers(p: Any, vocab: Any, vocab_size: int, ctx: int) -> list[Any]:
    """Logit bias and the samplers that use the token history: repetition penalties and DRY."""
    parts = []
    if p.logit_bias:
        biases = (C.llama_logit_bias * len(p.logit_bias))(
            *(C.llama_logit_bias(token, bias) for token, bias in p.logit_bias.items())
        )
        parts.append(C.llama_sampler_init_logit_bias(vocab_size, len(biases), biases))
    if uses_penalties(p):
        last_n = _penalty_window(p.repeat_last_n, ctx)
        parts.append(
            C.llama_sampler_init_penalties(
                vocab_size, last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty
            )
        )
    if p.dry_multiplier:
        last_n = _penalty_window(p.dry_penalty_last_n, ctx)
        breakers = [text.encode() for text in p.dry_sequence_breakers or ()]
        parts.append(
            C.llama_sampler_init_dry(
                vocab,
                p.dry_multiplier,
                p.dry_base,
                min(p.dry_allowed_length, ctx),
                last_n,
                (ctypes.c_char_p * len(breakers))(*breakers),
                len(breakers),
            )
        )
    return parts


def _penalty_window(last_n: int, ctx: int) -> int:
    """Number of past tokens to consider, at most ctx, because llama.cpp allocates for all."""
    return ctx if last_n == -1 else min(last_n, ctx)


def position_logprobs(
    logits: Logits, token: int, count: int, text: Callable[[int], str]
) -> PositionLogprobs:
    """Log probabilities of the model before any sampler.

    logits: float32 [vocab]. count: number of top tokens to list.
    """
    values = logits.astype(np.float64)
    values -= values.max()
    values -= math.log(np.exp(values).sum())
    count = min(count, len(values))
    best = np.argpartition(-values, count - 1)[:count] if count else np.empty(0, np.int64)
    best = best[np.argsort(-values[best], kind="stable")]

    def entry(token: int) -> TokenLogprob:
        return TokenLogprob(token, text(token), float(values[token]))

    return PositionLogprobs(entry(token), tuple(entry(int(token)) for token in best))
