"""Samples a step: edits of the logits, the sampling kernels, and sampled drafts.

kernels/sampling/sample.py documents the samplers and their order, which is llama.cpp's, so that
parameters mean the same on both backends. The result of a seed does not depend on the rest of the
batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

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
from localgen.backends.cuda.model.host_copy import to_device
from localgen.backends.cuda.steps.sampling_slots import SamplingSlots
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
        "infill_sampler",
    }
)


class LogitEdit(NamedTuple):
    """A change of one logit. occurrences: of the token, for the penalties; else 0."""

    row: int
    token: int
    occurrences: int
    bias: float


class DraftedRow(NamedTuple):
    """A row whose draft was sampled. probs: see SamplingRow.draft_probs."""

    row: int
    token: int
    probs: Tensor


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
    slots = SamplingSlots()
    for slot, row in enumerate(rows):
        slots.set(slot, row.params)
    lengths = np.array([len(row.history) for row in rows], np.int64)
    settings = slots.tensors(np.arange(len(rows)), lengths, logits.device)
    drafted = [
        DraftedRow(at, row.draft_token, row.draft_probs)
        for at, row in enumerate(rows)
        if row.draft_probs is not None
    ]
    return draw(logits, with_edits(settings, logit_edits(enumerate(rows))), drafted, prob_rows)


def draw(
    logits: Tensor,
    settings: SamplingTensors,
    drafted: Sequence[DraftedRow],
    prob_rows: Sequence[int],
) -> tuple[Tensor, dict[int, Tensor]]:
    """Sample one token per row, and return the probabilities of `prob_rows`.

    See sample_with_probs.
    """
    drawn = sample_tokens(logits, settings)
    found: dict[int, Tensor] = {}
    if prob_rows:
        (at,) = to_device([np.array(prob_rows, np.int32)], logits.device)
        found = dict(zip(prob_rows, sampling_probs(drawn, settings, at), strict=True))
    return _verify_drafts(drawn, settings, drafted), found


def _verify_drafts(
    sampled: SamplerOutput, params: SamplingTensors, drafted: Sequence[DraftedRow]
) -> Tensor:
    """Return the tokens after rejection sampling of sampled drafts."""
    if not drafted:
        return sampled.tokens
    of_rows, drafts, given = zip(*drafted, strict=True)
    tables = [q.to(sampled.logits.device) for q in given]
    widest = max(map(len, tables))  # draft models may pad their vocabularies differently
    q = torch.stack([t if len(t) == widest else pad(t, (0, widest - len(t))) for t in tables])
    at, tokens = to_device([np.array(each, np.int32) for each in (of_rows, drafts)], q.device)
    return rejection_sample(sampled, params, SampledDrafts(at, tokens, q))


def with_edits(settings: SamplingTensors, edits: Sequence[LogitEdit]) -> SamplingTensors:
    """Return these parameters with edits of the logits."""
    if not edits:
        return settings
    of_rows, tokens, counts, biases = zip(*edits, strict=True)
    changes, amounts = to_device(
        [np.array([of_rows, tokens], np.int32), np.array([counts, biases], np.float32)],
        settings.temperature.device,
    )
    return replace(
        settings,
        edit_rows=changes[0],
        edit_tokens=changes[1],
        edit_counts=amounts[0],
        edit_biases=amounts[1],
    )


def edits_logits(params: SamplingParams) -> bool:
    """True if rows with these parameters may have edits."""
    return bool(params.logit_bias or params.min_tokens or uses_penalties(params))


def logit_edits(rows: Iterable[tuple[int, SamplingRow]]) -> list[LogitEdit]:
    """Return the edits of numbered rows: penalties, biases and banned tokens."""
    return [
        LogitEdit(number, *change)
        for number, row in rows
        if row.params.logit_bias or row.banned_tokens or uses_penalties(row.params)
        for change in _token_edits(row)
    ]


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
