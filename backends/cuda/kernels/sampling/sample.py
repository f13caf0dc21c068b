"""Tokens drawn from the logits of all rows of a step, each row with its own settings.

The order is llama.cpp's: penalties, bias, top-k, top-p, min-p, temperature. A token is drawn by
Gumbel noise (Gumbel 1954; Maddison et al. 2014) that depends on seed, position and token alone.
Ties: what equals the last token that top-k or top-p keeps stays too; of equal scores the lowest
token wins. A token at -inf is never drawn, unless all are: then it is token 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from localgen.backends.cuda.kernels.device import has_kernels, wide
from localgen.backends.cuda.kernels.launch import Variant, launch
from localgen.backends.cuda.kernels.sampling import kernels
from localgen.backends.cuda.kernels.sampling.gumbel import gumbel

_EDITS_BLOCK = 128
_CHOOSE_WARPS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingTensors:
    """Settings of each row, float32 [rows] where nothing else is said, on the logits' device.

    temperature: 0 is greedy. top_k: int32, 0 is off. top_p, min_p: 1 and 0 are off.
    seed_mix: int64, noise.seed_mix of the seed. position: int64, of the token to draw.
    repeat, presence, frequency: penalties (Keskar et al. 2019; OpenAI).

    edit_rows, edit_tokens: int32 [edits], the logits to change, each once. edit_counts: float32
    [edits], how often the token was seen, for the penalties. edit_biases: float32 [edits], added.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed_mix: Tensor
    position: Tensor
    repeat: Tensor
    presence: Tensor
    frequency: Tensor
    edit_rows: Tensor
    edit_tokens: Tensor
    edit_counts: Tensor
    edit_biases: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """tokens: int64 [rows]. What they were drawn from: logits [rows, vocab], after penalties and
    biases, as far as they are not below least [rows]. Greedy rows have no least."""

    tokens: Tensor
    logits: Tensor
    least: Tensor


def sample(logits: Tensor, settings: SamplingTensors) -> Drawn:
    """A token for each row. logits: float [rows, vocab], left as they are."""
    return (sample_triton if has_kernels(logits) else sample_reference)(logits, settings)


def sample_reference(logits: Tensor, settings: SamplingTensors) -> Drawn:
    """The same in plain torch."""
    x = wide(logits)
    if len(settings.edit_rows):
        x = _edited(x, settings)
    greedy = settings.temperature == 0
    if bool(greedy.all()):
        return Drawn(x.argmax(-1), x, x.new_full((len(x),), -torch.inf))
    least = _threshold(x, settings)
    kept = x.masked_fill(x < least, -torch.inf)
    noise = gumbel(settings.seed_mix, settings.position, x.shape[-1])
    drawn = (kept / settings.temperature[:, None] + noise).argmax(-1)
    return Drawn(torch.where(greedy, x.argmax(-1), drawn), x, least[:, 0])


def _edited(x: Tensor, settings: SamplingTensors) -> Tensor:
    rows, tokens = settings.edit_rows.long(), settings.edit_tokens.long()
    found, by, counts = x[rows, tokens], settings.repeat[rows], settings.edit_counts
    seen = torch.where(found > 0, found / by, found * by)
    seen = seen - counts * settings.frequency[rows] - settings.presence[rows]
    x = x.clone()
    x[rows, tokens] = torch.where(counts > 0, seen, found) + settings.edit_biases
    return x


def _threshold(x: Tensor, settings: SamplingTensors) -> Tensor:
    """The least logit that is kept, [rows, 1]."""
    best = x.amax(-1, keepdim=True)
    lowest = best + settings.min_p[:, None].log()
    k, mass = settings.top_k.long()[:, None], settings.top_p[:, None].double()
    has_k, has_mass = (k > 0) & (k < x.shape[-1]), mass < 1
    if not bool((has_k | has_mass).any()):
        return lowest
    ordered = x.sort(-1, descending=True).values
    last = ordered.gather(-1, torch.where(has_k, k, 1) - 1)
    lowest = torch.maximum(lowest, torch.where(has_k, last, -torch.inf))
    # top-p (Holtzman et al. 2020) weighs what top-k has left
    weights = (ordered - ordered[:, :1]).nan_to_num(neginf=-torch.inf).double().exp()
    weights = weights.masked_fill(has_k & (ordered < last), 0)
    summed = weights.cumsum(-1)
    place = (summed < mass * summed[:, -1:]).sum(-1, keepdim=True).clamp(max=x.shape[-1] - 1)
    return torch.maximum(lowest, torch.where(has_mass, ordered.gather(-1, place), -torch.inf))


def sample_triton(logits: Tensor, settings: SamplingTensors) -> Drawn:
    """The same in two launches; penalties and biases take a copy and one launch more."""
    rows, vocab = logits.shape
    if edits := len(settings.edit_rows):
        logits = logits.to(torch.float32, copy=True)
        _edit(logits, settings, edits)
    assert logits.stride(1) == 1
    chunk_groups, num_warps = _chunk(rows)
    groups = triton.cdiv(vocab, kernels.GROUP)
    splits = triton.cdiv(groups, chunk_groups)

    def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    shared = (
        logits,
        logits.stride(0),
        vocab,
        settings.temperature,
        settings.top_k,
        settings.top_p,
        settings.min_p,
        settings.seed_mix,
        settings.position,
        room(rows, groups),
        room(rows, 3, splits),
        room(rows, splits, dtype=torch.int32),
        splits,
        groups,
    )
    launch(kernels.scan, (rows, splits))(*shared, chunk_groups=chunk_groups, num_warps=num_warps)
    chosen, least = room(rows, dtype=torch.int64), room(rows)
    launch(kernels.choose, (rows,))(
        *shared,
        room(rows, groups, dtype=torch.int32),
        chosen,
        least,
        splits_block=triton.next_power_of_2(splits),
        groups_block=triton.next_power_of_2(groups),
        num_warps=_CHOOSE_WARPS,
    )
    return Drawn(chosen, logits, least)


def _edit(logits: Tensor, settings: SamplingTensors, edits: int) -> None:
    launch(kernels.edit, (triton.cdiv(edits, _EDITS_BLOCK),))(
        logits,
        logits.stride(0),
        settings.edit_rows,
        settings.edit_tokens,
        settings.edit_counts,
        settings.edit_biases,
        settings.repeat,
        settings.presence,
        settings.frequency,
        edits,
        block=_EDITS_BLOCK,
        num_warps=4,
    )


def _chunk(rows: int) -> tuple[int, int]:
    """Groups and warps of a program of scan: for few rows, more programs."""
    return (16, 4) if rows <= 4 else (64, 8)


def variants() -> Iterator[Variant]:
    """Both chunk sizes, over the smallest and the largest vocabulary of usual models."""
    pointers = {
        **dict.fromkeys(("temperatures",), "*fp32"),
        "top_ks": "*i32",
        **dict.fromkeys(("top_ps", "min_ps"), "*fp32"),
        **dict.fromkeys(("mixes", "positions"), "*i64"),
        **dict.fromkeys(("group_best", "partials"), "*fp32"),
        "best_tokens": "*i32",
        **dict.fromkeys(("splits", "groups"), "i32"),
    }
    for kind in ("fp32", "bf16"):
        first = {"logits": f"*{kind}", "stride": "i32", "vocab": "i32", **pointers}
        for rows in (1, 64):
            chunk_groups, num_warps = _chunk(rows)
            yield Variant(
                name=f"scan-{rows}-{kind}",
                kernel=kernels.scan,
                signature={**first, "chunk_groups": "constexpr"},
                constants={"chunk_groups": chunk_groups},
                num_warps=num_warps,
            )
    first = {"logits": "*fp32", "stride": "i32", "vocab": "i32", **pointers}
    for rows, vocab in ((1, 32003), (1, 128256), (1, 151936), (64, 262208)):
        groups = triton.cdiv(vocab, kernels.GROUP)
        blocks = {
            "splits_block": triton.next_power_of_2(triton.cdiv(groups, _chunk(rows)[0])),
            "groups_block": triton.next_power_of_2(groups),
        }
        yield Variant(
            name=f"choose-{rows}-{vocab}",
            kernel=kernels.choose,
            signature={
                **first,
                "candidates": "*i32",
                "chosen": "*i64",
                "least": "*fp32",
                **dict.fromkeys(blocks, "constexpr"),
            },
            constants=blocks,
            num_warps=_CHOOSE_WARPS,
        )
    yield Variant(
        name="edit",
        kernel=kernels.edit,
        signature={
            "logits": "*fp32",
            "stride": "i32",
            **dict.fromkeys(("rows", "tokens"), "*i32"),
            **dict.fromkeys(("counts", "biases", "repeat", "presence", "frequency"), "*fp32"),
            "edits": "i32",
            "block": "constexpr",
        },
        constants={"block": _EDITS_BLOCK},
    )
