"""What requests ask of sampling, as tensors beside the logits: a copy a step, a second for edits.

What the settings mean, and in what order, is in kernels/sampling/sample.py: llama.cpp's order, so
that the same settings mean the same on both backends. Same seed, same text, whatever else is in the
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
from numpy.typing import NDArray
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
from localgen.backends.sampling_params import SamplingParams

# settings that this sampler does not have; asking for them is an error
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
# the float columns, as SamplingParams calls them
_FLOAT_PARAMS = attrgetter(
    "temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"
)
# every block of a packed copy begins at a multiple of so many bytes
_BLOCK_ALIGNMENT = 16

HostArray = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """A position to sample. history: all tokens before it. banned_tokens: tokens that may not be
    drawn.

    draft_token: what was proposed here, if it was drawn; draft_probs: from which probabilities,
    float32 [any vocabulary]. None: nothing, or a point, which need not be known.
    """

    params: SamplingParams
    history: Sequence[int]
    banned_tokens: frozenset[int] = frozenset()
    draft_token: int = 0
    draft_probs: Tensor | None = None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0


def sample_rows(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """A token for each row, int64 [rows]. logits: float32 [rows, vocab], left as they are."""
    return sample_with_probs(logits, rows, [])[0]


def sample_with_probs(
    logits: Tensor, rows: Sequence[SamplingRow], prob_rows: Sequence[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """As sample_rows, and what the tokens of `prob_rows` were drawn from, float32 [vocab] each.

    Neither these nor rows with a draft are greedy.
    """
    settings = _sampling_tensors(logits, rows)
    drawn = sample_tokens(logits, settings)
    found: dict[int, Tensor] = {}
    if prob_rows:
        (at,) = _to_device([np.array(prob_rows, np.int32)], logits.device)
        found = dict(zip(prob_rows, sampling_probs(drawn, settings, at), strict=True))
    return _verify_drafts(drawn, settings, rows), found


def _verify_drafts(
    sampled: SamplerOutput, params: SamplingTensors, rows: Sequence[SamplingRow]
) -> Tensor:
    """The tokens, once drafts that were drawn are kept or replaced."""
    found = [
        (at, row.draft_token, row.draft_probs)
        for at, row in enumerate(rows)
        if row.draft_probs is not None
    ]
    if not found:
        return sampled.tokens
    of_rows, drafts, given = zip(*found, strict=True)
    tables = [q.to(sampled.logits.device) for q in given]
    widest = max(map(len, tables))  # draft models may differ in what they are padded to
    q = torch.stack([t if len(t) == widest else pad(t, (0, widest - len(t))) for t in tables])
    at, tokens = _to_device([np.array(each, np.int32) for each in (of_rows, drafts)], q.device)
    return rejection_sample(sampled, params, SampledDrafts(at, tokens, q))


def _sampling_tensors(logits: Tensor, rows: Sequence[SamplingRow]) -> SamplingTensors:
    wholes, floats, top_k = _to_device(_param_arrays(rows), logits.device)
    seeds, positions = wholes.unbind()
    temperature, top_p, min_p, repeat, presence, frequency = floats.unbind()
    changes, amounts = _to_device(_logit_edits(rows), logits.device)
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
    """int64 [2, rows], seeds and positions; float32 [6, rows], _FLOAT_PARAMS; int32 [1, rows],
    k."""
    seeds = [hash_seed(row.params.seed or 0) for row in rows]
    wholes = np.array([seeds, [len(row.history) for row in rows]], np.int64)
    exact = np.array([_FLOAT_PARAMS(row.params) for row in rows], np.float64).T
    floats = np.ascontiguousarray(exact, np.float32)
    # float32 may have made one of the smallest 0, which is greedy: not what was asked
    floats[0] = np.where(exact[0] == 0, 0, np.maximum(exact[0], _MIN_TEMPERATURE))
    top_k = [min(row.params.top_k or 0, _MAX_TOP_K) for row in rows]
    return [wholes, floats, np.array([top_k], np.int32)]


def _logit_edits(rows: Sequence[SamplingRow]) -> list[HostArray]:
    """int32 [2, edits], row and token of each logit to change; float32 [2, edits], by what."""
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
    """Tokens with how often each was seen, if that is penalized, and its bias."""
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


def uses_penalties(params: SamplingParams) -> bool:
    """Whether a sampler looks at the tokens before."""
    return bool(params.repeat_last_n) and (
        params.repeat_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty)
    )


def _to_device(blocks: Sequence[HostArray], device: torch.device) -> list[Tensor]:
    """The blocks on the device, by one copy that is not waited for."""
    sizes = [-(-block.nbytes // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT for block in blocks]
    starts = [sum(sizes[:i]) for i in range(len(blocks))]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = packed.numpy()
    for start, block in zip(starts, blocks, strict=True):
        target[start : start + block.nbytes] = block.reshape(-1).view(np.uint8)
    moved = packed.to(device, non_blocking=True)
    return [
        moved[start : start + block.nbytes].view(_TORCH_DTYPES[block.dtype.name]).view(block.shape)
        for start, block in zip(starts, blocks, strict=True)
    ]


_TORCH_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
