"""Format of 4-bit weights, quantized in groups of inputs: (code - zero) * scale.

If the number of inputs is a multiple of TILE_INPUTS, codes are stored in tiles of 128 inputs, 16
32-bit words each. Nibble s of the low half of word i is input 32 s + 2 i of the tile, nibble s of
the high half the input after it. One mask therefore leaves two adjacent inputs where tensor cores
need them, each in the low bits of a 16-bit float whose exponent is set by an `or`: 128 + code in
bfloat16, 1024 + code in float16. A program streams whole words of an output row, without shuffling
codes. The scale and the zero of a group are two 16-bit floats in one 32-bit word, the smallest
asynchronous copy.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.launch import Variant, ceil_div, launch

# inputs per tile; the kernels need a group size that is a multiple of PART_INPUTS
TILE_INPUTS, PART_INPUTS = 128, 32


def is_tiled(ins: int) -> bool:
    """True if codes are stored in tiles.

    Otherwise each byte holds two adjacent inputs, the even one in the low nibble.
    """
    return ins % TILE_INPUTS == 0


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes, uint8 [outs, ins] of 0 to 15, to uint8 [outs, ins / 2]."""
    outs, ins = codes.shape
    if is_tiled(ins):
        # [.., nibble, word, half] -> [.., word, half, nibble]: a half word is two bytes
        codes = codes.view(outs, -1, 4, 16, 2).permute(0, 1, 3, 4, 2).reshape(outs, ins)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the codes that `pack_int4` packed, uint8 [outs, ins]."""
    outs, ins = packed.shape[0], 2 * packed.shape[1]
    digits = torch.stack((packed & 15, packed >> 4), dim=-1)
    if is_tiled(ins):
        digits = digits.view(outs, -1, 16, 2, 4).permute(0, 1, 4, 2, 3)
    return digits.reshape(outs, ins)


def pack_grid(scales: Tensor, zeros: Tensor) -> Tensor:
    """Return the grid: scale and zero of each group next to each other, [outs, groups, 2].

    scales: float [outs, groups]; those of float32 are rounded to float16. zeros: integers of 0 to
    15, which 16-bit floats represent exactly.
    """
    scales = scales.half() if scales.dtype is torch.float32 else scales
    return torch.stack((scales, zeros.to(scales.dtype)), dim=-1)


def dequantize_int4(packed: Tensor, grid: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight, [outs, ins] in dtype."""
    digits = unpack_int4(packed).view(*grid.shape[:2], -1)
    wide = grid.to(torch.float64 if dtype is torch.float64 else torch.float32)
    # code - zero is exact, so this rounds once in float32 and once to dtype
    values = (digits.to(wide.dtype) - wide[..., 1:]) * wide[..., :1]
    return values.to(dtype).flatten(1)


def dequantize_int4_triton(packed: Tensor, grid: Tensor, dtype: torch.dtype) -> Tensor:
    """Triton implementation of `dequantize_int4`, one launch."""
    outs, ins = packed.shape[0], 2 * packed.shape[1]
    out = torch.empty((outs, ins), dtype=dtype, device=packed.device)
    launch(_dequantize_int4_kernel, (ceil_div(outs, 8), ceil_div(ins, 8 * TILE_INPUTS)))(
        packed.view(torch.int32),
        grid.view(torch.int32),
        out,
        ins // TILE_INPUTS,
        outs,
        ins // grid.shape[1],
        grid_type=float_type(grid.dtype),
    )
    return out


def parts_per_group(group: int) -> int:
    """Return how many consecutive parts of a tile share a group: 1, 2 or 4."""
    return 4 if group % TILE_INPUTS == 0 else 2 if group % (2 * PART_INPUTS) == 0 else 1


def has_small_groups(group: int) -> bool:
    """True if each part of a tile has a scale of its own, which takes registers."""
    return parts_per_group(group) == 1


def float_type(dtype: torch.dtype) -> Any:
    """Return the Triton type of the 16-bit floats that codes are put into."""
    return tl.bfloat16 if dtype is torch.bfloat16 else tl.float16


@triton.jit
def split_float_pairs(both, to: tl.constexpr):
    """Split words of two 16-bit floats: int32 [.., words] -> two of [.., words] in dtype `to`."""
    low = both.to(tl.int16).to(to, bitcast=True)
    return low, (both >> 16).to(tl.int16).to(to, bitcast=True)


@triton.jit
def _dequantize_int4_kernel(words, grid, out, tiles, outs, group_size, grid_type: tl.constexpr):
    """Each program dequantizes 8 tiles of 8 outputs."""
    own = (tl.program_id(0) * 8 + tl.arange(0, 8))[:, None, None]
    tile = (tl.program_id(1) * 8 + tl.arange(0, 8))[None, :, None]
    inside = (own < outs) & (tile < tiles)
    first = own.to(tl.int64) * tiles + tile
    w = tl.load(words + first * 16 + tl.arange(0, 16)[None, None, :], mask=inside, other=0)
    for part in tl.static_range(4):
        at = own.to(tl.int64) * (tiles * 128 // group_size) + (tile * 128 + part * 32) // group_size
        scale, zero = split_float_pairs(tl.load(grid + at, mask=inside, other=0), grid_type)
        scale, zero = scale.to(tl.float32), zero.to(tl.float32)
        low = ((w >> (4 * part)) & 15).to(tl.float32)
        high = ((w >> (16 + 4 * part)) & 15).to(tl.float32)
        pairs = tl.reshape(tl.join((low - zero) * scale, (high - zero) * scale), [8, 8, 32])
        to = first * 128 + part * 32 + tl.arange(0, 32)[None, None, :]
        tl.store(out + to, pairs.to(out.dtype.element_ty), mask=inside)


def variants() -> Iterator[Variant]:
    """Dequantization, for both types of scales."""
    pointers = {"words": "*i32", "grid": "*i32", "out": "*bf16"}
    numbers = dict.fromkeys(("tiles", "outs", "group_size"), "i32")
    for kind in (tl.float16, tl.bfloat16):
        yield Variant(
            name=f"int4-dequantize-{kind}",
            kernel=_dequantize_int4_kernel,
            signature=pointers | numbers | {"grid_type": "constexpr"},
            constants={"grid_type": kind},
        )
