"""Sampling where the logits are: all rows of a step at once, in torch.

The order is llama.cpp's (penalties, bias, top-k, top-p, min-p, temperature), so that the same
settings mean the same on both backends. A token is drawn by Gumbel noise (Gumbel 1954; Maddison
et al. 2014), and the noise is a function of the seed, the position and the token alone: same seed,
same text, whatever else is in the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localgen.backends.types import PositionLogprobs, SamplingParams, TokenLogprob

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
# odd constants of splitmix64 (Steele et al. 2014), as signed 64-bit integers
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


@dataclass(frozen=True, slots=True)
class Row:
    """A position to sample. history: all tokens before it."""

    params: SamplingParams
    history: Sequence[int]

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0


def choose(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """A token for each row, int64 [rows]. logits: float32 [rows, vocab], left as they are."""
    changed = [row for row in rows if row.params.logit_bias or _penalizes(row.params)]
    if changed:
        logits = logits.clone()
        for index, row in enumerate(rows):
            _bias(logits[index], row)
    if all(row.is_greedy for row in rows):
        return logits.argmax(-1)

    def column(get: Callable[[Any], float], kind: torch.dtype = torch.float32) -> Tensor:
        values = [get(row.params) for row in rows]
        return torch.tensor(values, dtype=kind, device=logits.device)[:, None]

    vocab = logits.shape[-1]
    kept = _top_k(logits, column(lambda p: p.top_k or vocab, torch.int64).clamp(max=vocab))
    kept = _top_p(kept, column(lambda p: p.top_p))
    kept = _min_p(kept, column(lambda p: p.min_p))
    kept = kept / column(lambda p: max(p.temperature, _LEAST_TEMPERATURE))
    drawn = (kept + _gumbel(rows, vocab, logits.device)).argmax(-1)
    greedy = torch.tensor([row.is_greedy for row in rows], device=logits.device)
    return torch.where(greedy, logits.argmax(-1), drawn)


def _penalizes(params: Any) -> bool:
    return bool(params.repeat_last_n) and (
        params.repeat_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty)
    )


def _bias(logits: Tensor, row: Row) -> None:
    """Penalties of what was seen (Keskar et al. 2019, OpenAI), then the biases; in place."""
    params: Any = row.params
    if _penalizes(params):
        last_n = params.repeat_last_n
        seen = Counter(row.history if last_n < 0 else row.history[-last_n:])
        ids = torch.tensor(list(seen), device=logits.device)
        counts = torch.tensor(list(seen.values()), dtype=logits.dtype, device=logits.device)
        found, penalty = logits[ids], params.repeat_penalty
        found = torch.where(found > 0, found / penalty, found * penalty)
        logits[ids] = found - counts * params.frequency_penalty - params.presence_penalty
    for token, bias in params.logit_bias.items():
        logits[token] += bias


def _top_k(logits: Tensor, k: Tensor) -> Tensor:
    """The k best; equals of the last one stay too."""
    most = int(k.max())
    if int(k.min()) == logits.shape[-1]:
        return logits
    last = logits.topk(most).values.gather(-1, k - 1)
    return logits.masked_fill(logits < last, -torch.inf)


def _top_p(logits: Tensor, mass: Tensor) -> Tensor:
    """The fewest most probable tokens that hold this mass (Holtzman et al. 2020)."""
    if bool((mass >= 1).all()):
        return logits
    best, order = logits.softmax(-1).sort(descending=True, stable=True)
    before = best.cumsum(-1) - best
    # the best one always stays
    dropped = (before >= mass) & (mass < 1)
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


def _min_p(logits: Tensor, share: Tensor) -> Tensor:
    """What has this share of the best one's probability (Nguyen et al. 2024)."""
    floor = logits.amax(-1, keepdim=True) + share.log()
    return logits.masked_fill(logits < floor, -torch.inf)


def _gumbel(rows: Sequence[Row], vocab: int, device: torch.device) -> Tensor:
    """Noise for each row and token, float32 [rows, vocab], from seed, position and token."""
    starts = [_mix(_mix(row.params.seed or 0) + len(row.history)) for row in rows]
    start = torch.tensor(starts, dtype=torch.int64, device=device)[:, None]
    x = start + torch.arange(1, vocab + 1, device=device) * _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    bits = _shifted(x ^ _shifted(x, 31), 32)
    # near 0 a float32 is finest, and that is where the largest noise comes from
    uniform = ((bits.to(torch.float32) + 0.5) / 2**32).clamp(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-uniform))


def _shifted(x: Tensor, by: int) -> Tensor:
    """A logical shift to the right; torch's own keeps the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix(x: int) -> int:
    """splitmix64 of a Python integer, as a signed 64-bit integer."""
    mask = (1 << 64) - 1
    x = (x + _GOLDEN) & mask
    x = ((x ^ (x >> 30)) * (_MIX_1 & mask)) & mask
    x = ((x ^ (x >> 27)) * (_MIX_2 & mask)) & mask
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


def logprobs(
    logits: Tensor, chosen: int, count: int, text: Callable[[int], str]
) -> PositionLogprobs:
    """Log probabilities under the model itself, before any sampler. logits: float32 [vocab]."""
    values = logits.double().log_softmax(-1)
    best = values.topk(min(count, len(values))).indices.tolist()

    def entry(token: int) -> TokenLogprob:
        return TokenLogprob(token, text(token), float(values[token]))

    return PositionLogprobs(entry(chosen), tuple(entry(token) for token in best))
