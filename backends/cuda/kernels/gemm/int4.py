"""Matrix products with 4-bit weights, quantized in groups of inputs: (code - zero) * scale.

If the number of inputs is a multiple of TILE_INPUTS, weights are stored in tiles of 128 inputs, 16
32-bit words each. Nibble s of the low half of word i is input 32 s + 2 i of the tile, nibble s of
the high half the input after it. One mask therefore leaves two adjacent inputs where tensor cores
need them, each in the low bits of a 16-bit float whose exponent is set by an `or`: 128 + code in
bfloat16, 1024 + code in float16. That offset is subtracted at the end of a group, using a product
with ones; scales multiply sums of integers, in float32. A program streams whole words of an output
row, without shuffling codes.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from localgen.backends.cuda.kernels.device import ARCHS, can_use_triton, compute_capability
from localgen.backends.cuda.kernels.gemm.dense import linear, supports_triton_gemm
from localgen.backends.cuda.kernels.gemm.tile import GemmTile, dot_dtype, store_transposed
from localgen.backends.cuda.kernels.launch import Variant, ceil_div, launch

# inputs per tile; the kernels need a group size that is a multiple of PART_INPUTS
TILE_INPUTS, PART_INPUTS = 128, 32
# with more rows, the weight is dequantized once per call and cuBLAS multiplies
MAX_INT4_GEMM_ROWS = 64


def int4_matmul(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return x @ weight.T + bias, [rows, outs] in x's dtype, accumulated in float32.

    x: [rows, ins], inputs in the order of the packed weight. packed: uint8 [outs, ins / 2] from
    `pack_int4`. scales: float [outs, groups]. zeros: uint8 [outs, groups], 0 to 15. bias: [outs].
    """
    if not (
        can_use_triton(x) and is_tiled(2 * packed.shape[1]) and _has_whole_parts(packed, scales)
    ):
        return int4_matmul_reference(x, packed, scales, zeros, bias)
    if x.shape[0] <= MAX_INT4_GEMM_ROWS and supports_triton_gemm(x, packed):
        return int4_matmul_triton(x, packed, scales, zeros, bias)
    return functional.linear(x, dequantize_int4_triton(packed, scales, zeros, x.dtype), bias)


def is_tiled(ins: int) -> bool:
    """True if codes are stored in tiles.

    Otherwise each byte holds two adjacent inputs, the even one in the low nibble.
    """
    return ins % TILE_INPUTS == 0


def _has_whole_parts(packed: Tensor, scales: Tensor) -> bool:
    return 2 * packed.shape[1] // scales.shape[1] % PART_INPUTS == 0


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


def dequantize_int4(packed: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight, [outs, ins] in dtype."""
    digits = unpack_int4(packed).view(*scales.shape, -1)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    # code - zero is exact, so this rounds once in float32 and once to dtype
    values = (digits.to(wide) - zeros[..., None].to(wide)) * scales[..., None].to(wide)
    return values.to(dtype).flatten(1)


def int4_matmul_reference(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None = None
) -> Tensor:
    """PyTorch reference of `int4_matmul`; the dequantized weight is rounded to x's dtype."""
    return linear(x, dequantize_int4(packed, scales, zeros, x.dtype), bias)


def choose_int4_tile(rows: int, outs: int, group_size: int, arch: int) -> GemmTile:
    """Return the tile of a program; each warp processes TILE_INPUTS inputs at once.

    Above 32 rows, programs share weights through L2. stages - 2 or stages - 1 tiles of 8 KB of
    codes are in flight: at 4096 outputs, 256 programs, 31 to 46 KB per SM of an H200; at 28672
    outputs, 896 programs, 4 per SM, twice that. Including the rows this takes 72 KB or (32 rows)
    80 KB of shared memory; the smallest supported GPU has 99 KB.
    """
    if rows <= 8:
        return (
            GemmTile(16, TILE_INPUTS, 8, 8, 4)
            if outs <= 8192
            else GemmTile(32, TILE_INPUTS, 8, 4, 4)
        )
    if rows <= 16:
        return GemmTile(32, TILE_INPUTS, 16, 4, 4)
    # on sm_100, Triton 3.6 limits registers to fit a third program and spills, although shared
    # memory has no room for a third program
    spills = arch // 10 == 10 and group_size % TILE_INPUTS == 0
    return GemmTile(32, TILE_INPUTS, 32, 4, 3, 255 if spills else None)


def int4_matmul_triton(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Triton implementation of `int4_matmul` for up to about 64 rows, one launch."""
    rows, (outs, ins) = x.shape[0], (packed.shape[0], 2 * packed.shape[1])
    group = ins // scales.shape[1]
    tile = choose_int4_tile(rows, outs, group, compute_capability(x.device))
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    grid = (ceil_div(rows, tile.rows), ceil_div(outs, tile.outputs))
    launch(_int4_gemm_kernel, grid)(
        x.contiguous(),
        packed.view(torch.int32),
        scales,
        zeros,
        bias,
        out,
        rows,
        ins // TILE_INPUTS,
        outs,
        group,
        float_type=_float_type(x.dtype),
        dot_dtype=dot_dtype(x),
        dots_per_group=_dots_per_group(group),
        outputs=tile.outputs,
        padded_rows=tile.rows,
        warps=tile.num_warps,
        stages=tile.num_stages,
        even=ins % (TILE_INPUTS * tile.num_warps) == 0,
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
    )
    return out


def dequantize_int4_triton(
    packed: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype
) -> Tensor:
    """Triton implementation of `dequantize_int4`, one launch."""
    outs, ins = packed.shape[0], 2 * packed.shape[1]
    out = torch.empty((outs, ins), dtype=dtype, device=packed.device)
    launch(_dequantize_int4_kernel, (ceil_div(outs, 8), ceil_div(ins, 8 * TILE_INPUTS)))(
        packed.view(torch.int32),
        scales,
        zeros,
        out,
        ins // TILE_INPUTS,
        outs,
        ins // scales.shape[1],
    )
    return out


def _dots_per_group(group: int) -> int:
    """Return how many consecutive parts of a tile share a group: 1, 2 or 4."""
    return 4 if group % TILE_INPUTS == 0 else 2 if group % (2 * PART_INPUTS) == 0 else 1


def _float_type(dtype: torch.dtype) -> Any:
    return tl.bfloat16 if dtype is torch.bfloat16 else tl.float16


@triton.jit
def split_float_pairs(both, to: tl.constexpr):
    """Split words of two 16-bit floats: int32 [.., words] -> [.., 2 * words] in dtype `to`."""
    low = both.to(tl.int16).to(to, bitcast=True)
    high = (both >> 16).to(tl.int16).to(to, bitcast=True)
    return tl.reshape(tl.join(low, high), [both.shape[0], both.shape[1], 2 * both.shape[2]])


@triton.jit(do_not_specialize=["rows"])
def _int4_gemm_kernel(
    x,
    words,
    scales,
    zeros,
    bias,
    out,
    rows,
    tiles,
    outs,
    group_size,
    float_type: tl.constexpr,
    dot_dtype: tl.constexpr,
    dots_per_group: tl.constexpr,
    outputs: tl.constexpr,
    padded_rows: tl.constexpr,
    warps: tl.constexpr,
    stages: tl.constexpr,
    even: tl.constexpr,
):
    """Warp w computes tiles w, w + warps, ...: [warps, outputs, 32] @ [warps, 32, padded rows]."""
    exponent: tl.constexpr = 0x4300 if float_type == tl.bfloat16 else 0x6400
    one: tl.constexpr = 0x3F80 if float_type == tl.bfloat16 else 0x3C00
    surplus: tl.constexpr = 128.0 if float_type == tl.bfloat16 else 1024.0
    ins = tiles * 128
    groups = ins // group_size
    block = tl.program_id(1)
    row = tl.program_id(0) * padded_rows + tl.arange(0, padded_rows)
    own = tl.minimum(block * outputs + tl.arange(0, outputs), outs - 1)
    warp = tl.arange(0, warps)
    w_at = (
        words
        + own.to(tl.int64)[None, :, None] * (tiles * 16)
        + (warp[:, None, None] * 16 + tl.arange(0, 16)[None, None, :])
    )
    x_at = (
        x
        + row.to(tl.int64)[None, None, :] * ins
        + (warp[:, None, None] * 128 + tl.arange(0, 32)[None, :, None])
    )
    g_at = own.to(tl.int64)[None, :] * groups
    given = (row < rows)[None, None, :]
    # zeros derived from loaded words: a constant would get a different register layout
    none = (tl.load(words + tl.arange(0, 16)) & 0xFFFF) >> 16
    some = tl.broadcast_to((none | (one << 16 | one))[None, None, :], [warps, outputs, 16])
    ones = split_float_pairs(some, float_type).to(dot_dtype)
    total = tl.zeros([warps, outputs, padded_rows], tl.float32)
    for tile in tl.range(0, tiles, warps, num_stages=stages):
        mine = tile + warp
        here = given
        if even:
            w = tl.load(w_at + tile * 16, eviction_policy="evict_first")
        else:
            there = (mine < tiles)[:, None, None]
            w = tl.load(w_at + tile * 16, mask=there, other=0, eviction_policy="evict_first")
            here = given & there
            mine = tl.minimum(mine, tiles - 1)
        for part in tl.static_range(0, 4, dots_per_group):
            at = g_at + ((mine * 128 + part * 32) // group_size)[:, None]
            scale = tl.load(scales + at)[:, :, None].to(tl.float32)
            zero = tl.load(zeros + at)[:, :, None].to(tl.float32)
            summed = tl.zeros([warps, outputs, padded_rows], tl.float32)
            inputs = tl.zeros([warps, outputs, padded_rows], tl.float32)
            for i in tl.static_range(dots_per_group):
                a = tl.load(x_at + tile * 128 + (part + i) * 32, mask=here, other=0.0).to(dot_dtype)
                digits = ((w >> (4 * (part + i))) & 0x000F000F) | (exponent << 16 | exponent)
                floats = split_float_pairs(digits, float_type).to(dot_dtype)
                summed = tl.dot(floats, a, summed, input_precision="ieee")
                inputs = tl.dot(ones, a, inputs, input_precision="ieee")
            total += scale * (summed - (zero + surplus) * inputs)
    result = tl.sum(total, 0)
    to = block * outputs + tl.arange(0, outputs)
    if bias is not None:
        result += tl.load(bias + to, mask=to < outs, other=0.0).to(tl.float32)[:, None]
    store_transposed(result, out, row, rows, to, outs)


@triton.jit
def _dequantize_int4_kernel(words, scales, zeros, out, tiles, outs, group_size):
    """Each program dequantizes 8 tiles of 8 outputs."""
    own = (tl.program_id(0) * 8 + tl.arange(0, 8))[:, None, None]
    tile = (tl.program_id(1) * 8 + tl.arange(0, 8))[None, :, None]
    inside = (own < outs) & (tile < tiles)
    first = own.to(tl.int64) * tiles + tile
    w = tl.load(words + first * 16 + tl.arange(0, 16)[None, None, :], mask=inside, other=0)
    for part in tl.static_range(4):
        at = own.to(tl.int64) * (tiles * 128 // group_size) + (tile * 128 + part * 32) // group_size
        scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
        low = ((w >> (4 * part)) & 15).to(tl.float32)
        high = ((w >> (16 + 4 * part)) & 15).to(tl.float32)
        pairs = tl.reshape(tl.join((low - zero) * scale, (high - zero) * scale), [8, 8, 32])
        to = first * 128 + part * 32 + tl.arange(0, 32)[None, None, :]
        tl.store(out + to, pairs.to(out.dtype.element_ty), mask=inside)


def variants() -> Iterator[Variant]:
    """Shapes of an 8B model by rows and group size; some with a remainder, one in float16."""
    for rows, ins, outs, group, kind in (
        (1, 4096, 4096, 128, "*bf16"),
        (1, 4096, 28672, 128, "*bf16"),
        (1, 4096, 6144, 64, "*bf16"),
        (8, 896, 9728, 32, "*bf16"),
        (8, 14336, 4096, 128, "*fp16"),
        (16, 4096, 4096, 128, "*bf16"),
        (64, 4096, 4096, 128, "*bf16"),
        (64, 896, 4864, 32, "*bf16"),
    ):
        tiles = {arch: choose_int4_tile(rows, outs, group, arch) for arch in ARCHS}
        for tile in dict.fromkeys(tiles.values()):
            archs = frozenset(arch for arch in ARCHS if tiles[arch] == tile)
            yield _int4_gemm_variant(tile, rows, ins, outs, group, kind, archs)
    pointers = {"words": "*i32", "scales": "*fp16", "zeros": "*u8", "out": "*bf16"}
    numbers = dict.fromkeys(("tiles", "outs", "group_size"), "i32")
    yield Variant(
        name="int4-dequantize", kernel=_dequantize_int4_kernel, signature=pointers | numbers
    )


def _int4_gemm_variant(
    tile: GemmTile,
    rows: int,
    ins: int,
    outs: int,
    group_size: int,
    input_type: str,
    archs: frozenset[int],
) -> Variant:
    """Return the variant that int4_matmul_triton launches. input_type: Triton pointer type of x."""
    of = tl.float16 if input_type == "*fp16" else tl.bfloat16
    constants: dict[str, Any] = {
        "float_type": of,
        "dot_dtype": of,
        "dots_per_group": _dots_per_group(group_size),
        "outputs": tile.outputs,
        "padded_rows": tile.rows,
        "warps": tile.num_warps,
        "stages": tile.num_stages,
        "even": ins % (TILE_INPUTS * tile.num_warps) == 0,
    }
    pointers = {"x": input_type, "words": "*i32", "scales": "*fp16", "zeros": "*u8"}
    numbers = dict.fromkeys(("rows", "tiles", "outs", "group_size"), "i32")
    return Variant(
        name=f"int4-{rows}-{ins}-{outs}-{group_size}-{input_type}",
        kernel=_int4_gemm_kernel,
        signature=pointers
        | {"bias": input_type, "out": input_type}
        | numbers
        | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        num_warps=tile.num_warps,
        max_registers=tile.max_registers,
        archs=archs,
    )
