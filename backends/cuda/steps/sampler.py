"""Samples a step: copies sampling parameters to the device and runs the sampling kernels.

Two host-to-device copies per step: parameters, and logit edits (penalties, biases, banned tokens).
kernels/sampling/sample.py documents the samplers and their order, which is llama.cpp's, so that
parameters mean the same on both backends. The result of a seed does not depend on the rest of the
batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from localgen.backends.cuda.kernels.sampling.gumbel import hash_seed
from localgen.backends.cuda.kernels.sampling.rejection import (
    SampledDrafts,
    rejection_sample,
    sampling_probs,
)
from localgen.backends.cuda.kernels.sampling.sample import (
    SamplerOutput,
    SamplingTensors,
    sample_tokens,
)
from localgen.backends.cuda.model.host_copy import HostArray, to_device
from localgen.backends.sampling_params import SamplingParams, uses_penalties

# parameters not supported by this sampler; requests that set them are rejected
UNSUPPORTED_PARAMS = frozenset(
    {
        "typical_p",
        "top_n_sigma",
        "xtc_probability",
        "dynatemp_range",
        "adaptive_target",
        "mirostat",
        "dry_multiplier",
    }
)
_MIN_TEMPERATURE = 1e-6
_MAX_TOP_K = 2**31 - 1
# the float32 rows of the packed parameters, as named in SamplingParams
_FLOAT_PARAMS = attrgetter(
    "temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"
)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """A position to sample.

    history: all tokens before it. banned_tokens: tokens that must not be sampled. draft_probs:
    float32 [draft vocab], the probabilities that draft_token was sampled from; None if there is no
    draft, or a deterministic one, which the runner verifies by comparing tokens.
    """

    params: SamplingParams
    history: Sequence[int]
    banned_tokens: frozenset[int] = frozenset()
    draft_token: int = 0
    draft_probs: Tensor | None = None


def sample_rows(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Sample one token per row, int64 [rows]. logits: float32 [rows, vocab], not modified."""
    return sample_with_probs(logits, rows, [])[0]


def sample_with_probs(
    logits: Tensor, rows: Sequence[SamplingRow], prob_rows: Sequence[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Like sample_rows; also return the probabilities of `prob_rows`, float32 [vocab] by row.

    Rows in prob_rows and rows with a draft must not be greedy.
    """
    settings = _sampling_tensors(logits, rows)
    drawn = sample_tokens(logits, settings)
    found: dict[int, Tensor] = {}
    if prob_rows:
        (at,) = to_device([np.array(prob_rows, np.int32)], logits.device)
        found = dict(zip(prob_rows, sampling_probs(drawn, settings, at), strict=True))
    return _verify_drafts(drawn, settings, rows), found


def _verify_drafts(
    sampled: SamplerOutput, params: SamplingTensors, rows: Sequence[SamplingRow]
) -> Tensor:
    """Return the tokens after rejection sampling of sampled drafts."""
    found = [
        (at, row.draft_token, row.draft_probs)
        for at, row in enumerate(rows)
        if row.draft_probs is not None
    ]
    if not found:
        return sampled.tokens
    of_rows, drafts, given = zip(*found, strict=True)
    tables = [q.to(sampled.logits.device) for q in given]
    widest = max(map(len, tables))  # draft models may pad their vocabularies differently
    q = torch.stack([t if len(t) == widest else pad(t, (0, widest - len(t))) for t in tables])
    at, tokens = to_device([np.array(each, np.int32) for each in (of_rows, drafts)], q.device)
    return rejection_sample(sampled, params, SampledDrafts(at, tokens, q))


def _sampling_tensors(logits: Tensor, rows: Sequence[SamplingRow]) -> SamplingTensors:
    wholes, floats, top_k = to_device(_param_arrays(rows), logits.device)
    seeds, positions = wholes.unbind()
    temperature, top_p, min_p, repeat, presence, frequency = floats.unbind()
    changes, amounts = to_device(_logit_edits(rows), logits.device)
    edit_rows, edit_tokens = changes.unbind()
    edit_counts, edit_biases = amounts.unbind()
    return SamplingTensors(
        temperature=temperature,
        top_k=top_k[0],
        top_p=top_p,
        min_p=min_p,
        seed_hash=seeds,
        position=positions,
        repeat_penalty=repeat,
        presence_penalty=presence,
        frequency_penalty=frequency,
        edit_rows=edit_rows,
        edit_tokens=edit_tokens,
        edit_counts=edit_counts,
        edit_biases=edit_biases,
    )


def _param_arrays(rows: Sequence[SamplingRow]) -> list[HostArray]:
    """Return the parameters of all rows as packed arrays.

    int64 [2, rows]: seed hashes and positions. float32 [6, rows]: _FLOAT_PARAMS. int32 [1, rows]:
    top_k.
    """
    seeds = [hash_seed(row.params.seed or 0) for row in rows]
    wholes = np.array([seeds, [len(row.history) for row in rows]], np.int64)
    exact = np.array([_FLOAT_PARAMS(row.params) for row in rows], np.float64).T
    floats = np.ascontiguousarray(exact, np.float32)
    # float32 rounding must not turn a tiny temperature into 0, which means greedy
    floats[0] = np.where(exact[0] == 0, 0, np.maximum(exact[0], _MIN_TEMPERATURE))
    top_k = [min(row.params.top_k or 0, _MAX_TOP_K) for row in rows]
    return [wholes, floats, np.array([top_k], np.int32)]


def _logit_edits(rows: Sequence[SamplingRow]) -> list[HostArray]:
    """Return int32 [2, edits], row and token, and float32 [2, edits], count and bias."""
    found = [
        (index, *change)
        for index, row in enumerate(rows)
        if row.params.logit_bias or row.banned_tokens or uses_penalties(row.params)
        for change in _token_edits(row)
    ]
    columns = zip(*found, strict=True) if found else ((),) * 4
    of_rows, tokens, counts, biases = columns
    return [np.array([of_rows, tokens], np.int32), np.array([counts, biases], np.float32)]


def _token_edits(row: SamplingRow) -> list[tuple[int, int, float]]:
    """Return (token, occurrences, bias) of each edit; occurrences are 0 without penalties."""
    params: Any = row.params
    seen: Counter[int] = Counter()
    if uses_penalties(params):
        last_n = params.repeat_last_n
        seen.update(row.history if last_n < 0 else row.history[-last_n:])
    biases = params.logit_bias
    if row.banned_tokens:
        biases = biases | dict.fromkeys(row.banned_tokens, -math.inf)
    if not biases:
        return [(token, count, 0.0) for token, count in seen.items()]
    return [(token, seen[token], biases.get(token, 0.0)) for token in seen.keys() | biases.keys()]
