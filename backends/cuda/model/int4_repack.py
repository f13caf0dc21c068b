"""Repack int4 weights from the layouts of AutoAWQ, GPTQ and compressed-tensors to Int4Linear's."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.gemm.int4_format import pack_grid, pack_int4
from localgen.backends.cuda.model.linear import Int4Linear
from localgen.backends.formats.hf.quantization_config import AWQ_ORDER


def repack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, bias: Tensor | None) -> Int4Linear:
    """Repack AWQ weights.

    qweight: int32 [in, out / 8].
    qzeros: int32 [groups, out / 8].
    scales: [groups, out].
    """
    places = torch.tensor(AWQ_ORDER, device=qweight.device)
    digits = _unpack_nibbles(qweight)[..., places].flatten(1).T
    zeros = _unpack_nibbles(qzeros)[..., places].flatten(1).T
    return Int4Linear(pack_int4(digits), pack_grid(scales.T, zeros), bias)


def repack_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    *,
    order: Tensor | None,
    zero_offset: int,
) -> Int4Linear:
    """Repack GPTQ weights.

    qweight: int32 [in / 8, out].
    qzeros: int32 [groups, out / 8].
    scales: [groups, out].
    order: input order, see Int4Linear.
    zero_offset: added to a stored zero point, modulo 16.
    """
    digits = _unpack_nibbles(qweight).transpose(0, 1).flatten(1)
    digits = digits if order is None else digits[:, order]
    zeros = (_unpack_nibbles(qzeros).flatten(1).T + zero_offset) & 15
    return Int4Linear(pack_int4(digits), pack_grid(scales.T, zeros), bias, order)


def repack_packed(
    weight: Tensor, zero_points: Tensor | None, scales: Tensor, bias: Tensor | None
) -> Int4Linear:
    """Repack pack-quantized weights of compressed-tensors.

    weight: int32 [out, in / 8].
    zero_points: int32 [out / 8, groups]; None if all are 8.
    scales: [out, groups].
    """
    zeros = torch.full_like(scales, 8, dtype=torch.uint8)
    if zero_points is not None:
        zeros = _unpack_nibbles(zero_points.T).flatten(1).T
    return Int4Linear(pack_int4(_unpack_nibbles(weight).flatten(1)), pack_grid(scales, zeros), bias)


def act_order(g_idx: Tensor, groups: int) -> Tensor | None:
    """The input order that makes the groups contiguous; None if they already are.

    g_idx: [in], the group of each input. Raises ValueError if the groups are not of equal size.
    """
    size = len(g_idx) // groups
    order = g_idx.argsort(stable=True)
    side_by_side = torch.arange(len(g_idx), device=g_idx.device) // size
    if not torch.equal(g_idx[order].long(), side_by_side):
        raise ValueError(f"does not assign {size} inputs to each of {groups} groups")
    return None if torch.equal(g_idx.long(), side_by_side) else order


def _unpack_nibbles(words: Tensor) -> Tensor:
    """Unpack int32 [a, b] to uint8 [a, b, 8], lowest four bits first."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(2)
