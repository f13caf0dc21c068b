"""Matrix products of a few rows with a dense weight: each weight is read once.

On tensor cores with the weight as the M operand, so that the rows are padded to 8 instead of 16.
The warps of a program split the inputs (split-K) and are summed in a fixed order at the end: no
workspace, no second launch, bitwise deterministic.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, operator"

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from localgen.backends.cuda.kernels.dependent_launch import wait_for_previous_kernel
from localgen.backends.cuda.kernels.gemm.tile import (
    INPUT_MULTIPLE,
    ActivationKind,
    GemmTile,
    cast_for_dot,
    dot_dtype,
    gemm_epilogue,
    weight_row_ids,
)
from localgen.backends.cuda.kernels.launch import Launcher, Variant, ceil_div


def choose_skinny_gemm_tile(rows: int, outs: int, item_bytes: int) -> GemmTile:
    """Return the tile; above 32 rows, programs share weights through L2.

    FP8: the fastest of those tried on an H100. bf16: stages - 2 or stages - 1 tiles are in flight:
    at 4096 outputs, 256 programs of 2 x 16 KB, 62 KB per SM; at 28672 outputs, 896 programs, 4 per
    SM, twice that. Together with the rows, all fit in 99 KB of shared memory.
    """
    padded = 8 if rows <= 8 else 16 if rows <= 16 else 32
    if item_bytes == 1:
        return GemmTile(16, 128, padded, 2 if padded == 32 else 4, 4 if padded == 8 else 3)
    wide = padded > 8 or outs > 8192
    return GemmTile(32, 64, padded, 4, 4) if wide else GemmTile(16, 64, padded, 8, 4)


def skinny_gemm_triton(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: ActivationKind | None = None,
) -> Tensor:
    """Triton implementation of `matmul` and `gated_matmul` for up to about 32 rows.

    weight: in x's dtype or float8_e4m3fn. scale: float32 [outs], one per output of the weight, or
    None.
    """
    rows, (outs, ins) = x.shape[0], weight.shape
    launcher, grid = _skinny_gemm_launcher(
        rows, ins, outs, weight.element_size(), dot_dtype(x), activation
    )
    outs = outs if activation is None else outs // 2
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    launcher(
        grid,
        x.contiguous(),
        weight,
        scale,
        bias,
        None if residual is None else residual.contiguous(),
        out,
        rows,
        ins // INPUT_MULTIPLE,
        outs,
    )
    return out


@cache
def _skinny_gemm_launcher(
    rows: int,
    ins: int,
    outs: int,
    item_bytes: int,
    dtype: Any,
    activation: ActivationKind | None,
) -> tuple[Launcher, tuple[int, ...]]:
    """The launcher and the grid. dtype: of tl.dot."""
    tile = choose_skinny_gemm_tile(rows, outs, item_bytes)
    launcher = Launcher(
        _skinny_gemm_kernel,
        dot_dtype=dtype,
        activation=activation,
        outputs=tile.outputs,
        inputs=tile.inputs,
        padded_rows=tile.rows,
        warps=tile.num_warps,
        stages=tile.num_stages,
        even=ins % (tile.inputs * tile.num_warps) == 0,
        num_warps=tile.num_warps,
    )
    # programs that read the same weights are adjacent, so that they hit L2
    return launcher, (ceil_div(rows, tile.rows), ceil_div(outs, tile.outputs))


@triton.jit(do_not_specialize=["rows"])
def _skinny_gemm_kernel(
    x,
    weight,
    scale,
    bias,
    residual,
    out,
    rows,
    ins_16,
    outs,
    dot_dtype: tl.constexpr,
    activation: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    padded_rows: tl.constexpr,
    warps: tl.constexpr,
    stages: tl.constexpr,
    even: tl.constexpr,
    pdl: tl.constexpr = False,
):
    """One dot per warp: [warps, outputs, inputs] @ [warps, inputs, padded rows]."""
    wait_for_previous_kernel(pdl)
    ins = ins_16 * 16
    block = tl.program_id(1)
    row = tl.program_id(0) * padded_rows + tl.arange(0, padded_rows)
    own = weight_row_ids(block, outs, outputs, activation is not None)
    first = tl.arange(0, warps)[:, None, None] * inputs
    w_k = first + tl.arange(0, inputs)[None, None, :]
    x_k = first + tl.arange(0, inputs)[None, :, None]
    w_at = weight + own.to(tl.int64)[None, :, None] * ins + w_k
    x_at = x + row.to(tl.int64)[None, None, :] * ins + x_k
    given = (row < rows)[None, None, :]
    total = tl.zeros([warps, outputs, padded_rows], tl.float32)
    for k in tl.range(0, ins, warps * inputs, num_stages=stages):
        if even:
            w = tl.load(w_at + k, eviction_policy="evict_first")
            a = tl.load(x_at + k, mask=given, other=0.0)
        else:
            w = tl.load(w_at + k, mask=w_k < ins - k, other=0.0, eviction_policy="evict_first")
            a = tl.load(x_at + k, mask=given & (x_k < ins - k), other=0.0)
        total = tl.dot(cast_for_dot(w, dot_dtype), a.to(dot_dtype), total, input_precision="ieee")
    gemm_epilogue(
        tl.sum(total, 0), scale, bias, residual, out, block, own, row, rows, outs, activation
    )


def variants() -> Iterator[Variant]:
    """Shapes of an 8B model, and one with a remainder."""
    yield skinny_gemm_variant(8, 4096, 6144, "*bf16", None)
    yield skinny_gemm_variant(8, 4096, 28672, "*bf16", "silu")
    yield skinny_gemm_variant(8, 896, 4864, "*bf16", "gelu_tanh")
    yield skinny_gemm_variant(2, 4096, 4096, "*fp16", None)


def skinny_gemm_variant(
    rows: int, ins: int, outs: int, weight_type: str, activation: ActivationKind | None
) -> Variant:
    """Return the variant that skinny_gemm_triton launches. weight_type: Triton pointer type."""
    small = weight_type == "*fp8e4nv"
    tile = choose_skinny_gemm_tile(rows, outs, 1 if small else 2)
    pointer = "*bf16" if small else weight_type
    constants: dict[str, Any] = {
        "dot_dtype": tl.float16 if pointer == "*fp16" else tl.bfloat16,
        "activation": activation,
        "outputs": tile.outputs,
        "inputs": tile.inputs,
        "padded_rows": tile.rows,
        "warps": tile.num_warps,
        "stages": tile.num_stages,
        "even": ins % (tile.inputs * tile.num_warps) == 0,
    }
    if not small:
        constants["scale"] = None
    signature = {
        "x": pointer,
        "weight": weight_type,
        "scale": "*fp32" if small else "constexpr",
        **dict.fromkeys(("bias", "residual", "out"), pointer),
        **dict.fromkeys(("rows", "ins_16", "outs"), "i32"),
    }
    return Variant(
        name=f"skinny-gemm-{weight_type}-{rows}-{ins}-{outs}-{activation}",
        kernel=_skinny_gemm_kernel,
        signature=signature | {name: "constexpr" for name in constants if name not in signature},
        constants=constants,
        num_warps=tile.num_warps,
        min_arch=89 if small else 80,
    )
