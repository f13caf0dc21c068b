"""What requests ask of sampling, as tensors beside the logits: a copy a step, a second for edits.

What the settings mean, and in what order, is in kernels/sampling.py: llama.cpp's order, so that the
same settings mean the same on both backends. Same seed, same text, whatever else is in the batch.
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

from localgen.backends.cuda.kernels.sampling.gumbel import seed_mix
from localgen.backends.cuda.kernels.sampling.rejection import Drafts, probabilities, verify
from localgen.backends.cuda.kernels.sampling.sample import Drawn, SamplingTensors, sample
from localgen.backends.types import SamplingParams

# settings that this sampler does not have; asking for them is an error
UNSUPPORTED = frozenset(
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
_LEAST_TEMPERATURE = 1e-6
_MOST_TOP_K = 2**31 - 1
# the float columns, as SamplingParams calls them
_SETTINGS = attrgetter(
    "temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"
)
# every block of a packed copy begins at a multiple of so many bytes
_ALIGNED = 16

Block = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A position to sample. history: all tokens before it. barred: tokens that may not be drawn.

    draft: what was proposed here, if it was drawn; q: from which probabilities, float32 [any
    vocabulary]. None: nothing, or a point, which need not be known.
    """

    params: SamplingParams
    history: Sequence[int]
    barred: frozenset[int] = frozenset()
    draft: int = 0
    q: Tensor | None = None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0


def choose(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """A token for each row, int64 [rows]. logits: float32 [rows, vocab], left as they are."""
    return choose_and_show(logits, rows, [])[0]


def choose_and_show(
    logits: Tensor, rows: Sequence[Row], shown: Sequence[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """As choose, and what the tokens of the rows `shown` were drawn from, float32 [vocab] each.

    Neither these nor rows with a draft are greedy.
    """
    settings = _tensors(logits, rows)
    drawn = sample(logits, settings)
    found: dict[int, Tensor] = {}
    if shown:
        (at,) = _there([np.array(shown, np.int32)], logits.device)
        found = dict(zip(shown, probabilities(drawn, settings, at), strict=True))
    return _verified(drawn, settings, rows), found


def _verified(drawn: Drawn, settings: SamplingTensors, rows: Sequence[Row]) -> Tensor:
    """The tokens, once drafts that were drawn are kept or replaced."""
    found = [(at, row.draft, row.q) for at, row in enumerate(rows) if row.q is not None]
    if not found:
        return drawn.tokens
    of_rows, drafts, given = zip(*found, strict=True)
    tables = [q.to(drawn.logits.device) for q in given]
    widest = max(map(len, tables))  # draft models may differ in what they are padded to
    q = torch.stack([t if len(t) == widest else pad(t, (0, widest - len(t))) for t in tables])
    at, tokens = _there([np.array(each, np.int32) for each in (of_rows, drafts)], q.device)
    return verify(drawn, settings, Drafts(at, tokens, q))


def _tensors(logits: Tensor, rows: Sequence[Row]) -> SamplingTensors:
    wholes, floats, top_k = _there(_settings(rows), logits.device)
    seeds, positions = wholes.unbind()
    temperature, top_p, min_p, repeat, presence, frequency = floats.unbind()
    changes, amounts = _there(_edits(rows), logits.device)
    edit_rows, edit_tokens = changes.unbind()
    edit_counts, edit_biases = amounts.unbind()
    return SamplingTensors(
        temperature=temperature,
        top_k=top_k[0],
        top_p=top_p,
        min_p=min_p,
        seed_mix=seeds,
        position=positions,
        repeat=repeat,
        presence=presence,
        frequency=frequency,
        edit_rows=edit_rows,
        edit_tokens=edit_tokens,
        edit_counts=edit_counts,
        edit_biases=edit_biases,
    )


def _settings(rows: Sequence[Row]) -> list[Block]:
    """int64 [2, rows], seeds and positions; float32 [6, rows], _SETTINGS; int32 [1, rows], k."""
    seeds = [seed_mix(row.params.seed or 0) for row in rows]
    wholes = np.array([seeds, [len(row.history) for row in rows]], np.int64)
    exact = np.array([_SETTINGS(row.params) for row in rows], np.float64).T
    floats = np.ascontiguousarray(exact, np.float32)
    # float32 may have made one of the smallest 0, which is greedy: not what was asked
    floats[0] = np.where(exact[0] == 0, 0, np.maximum(exact[0], _LEAST_TEMPERATURE))
    top_k = [min(row.params.top_k or 0, _MOST_TOP_K) for row in rows]
    return [wholes, floats, np.array([top_k], np.int32)]


def _edits(rows: Sequence[Row]) -> list[Block]:
    """int32 [2, edits], row and token of each logit to change; float32 [2, edits], by what."""
    found = [
        (index, *change)
        for index, row in enumerate(rows)
        if row.params.logit_bias or row.barred or _penalizes(row.params)
        for change in _changed(row)
    ]
    columns = zip(*found, strict=True) if found else ((),) * 4
    of_rows, tokens, counts, biases = columns
    return [np.array([of_rows, tokens], np.int32), np.array([counts, biases], np.float32)]


def _changed(row: Row) -> list[tuple[int, int, float]]:
    """Tokens with how often each was seen, if that is penalized, and its bias."""
    params: Any = row.params
    seen: Counter[int] = Counter()
    if _penalizes(params):
        last_n = params.repeat_last_n
        seen.update(row.history if last_n < 0 else row.history[-last_n:])
    biases = params.logit_bias
    if row.barred:
        biases = biases | dict.fromkeys(row.barred, -math.inf)
    if not biases:
        return [(token, count, 0.0) for token, count in seen.items()]
    return [(token, seen[token], biases.get(token, 0.0)) for token in seen.keys() | biases.keys()]


def _penalizes(params: Any) -> bool:
    return bool(params.repeat_last_n) and (
        params.repeat_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty)
    )


def _there(blocks: Sequence[Block], device: torch.device) -> list[Tensor]:
    """The blocks on the device, by one copy that is not waited for."""
    sizes = [-(-block.nbytes // _ALIGNED) * _ALIGNED for block in blocks]
    starts = [sum(sizes[:i]) for i in range(len(blocks))]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = packed.numpy()
    for start, block in zip(starts, blocks, strict=True):
        target[start : start + block.nbytes] = block.reshape(-1).view(np.uint8)
    moved = packed.to(device, non_blocking=True)
    return [
        moved[start : start + block.nbytes].view(_TYPES[block.dtype.name]).view(block.shape)
        for start, block in zip(starts, blocks, strict=True)
    ]


_TYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}
