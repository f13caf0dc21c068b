"""`qkv_rope` with 4-bit weights: one launch with one row, four otherwise."""

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
from localgen.backends.cuda.kernels.dispatch import Kernel
from localgen.backends.cuda.kernels.gemm.int4 import choose_int4_kernel, int4_matmul
from localgen.backends.cuda.kernels.gemm.int4_format import TILE_INPUTS, float_type
from localgen.backends.cuda.kernels.gemm.int4_gemv import (
    accumulate_int4_row,
    choose_int4_gemv_tile,
    int4_gemv_constants,
    word_view,
)
from localgen.backends.cuda.kernels.gemm.qkv_rope import (
    paired_output_ids,
    rotate_and_store_pairs,
    rotates_whole_heads,
)
from localgen.backends.cuda.kernels.gemm.tile import GemmTile
from localgen.backends.cuda.kernels.kv_cache import LayerKV
from localgen.backends.cuda.kernels.launch import Launcher, Variant
from localgen.backends.cuda.kernels.norm import RMSNorm
from localgen.backends.cuda.kernels.rope import QKNorm, rope_and_store_kv

# most outputs of a tile
_MAX_OUTPUTS = 8


def int4_project_and_store_kv(
    x: Tensor,
    norm: RMSNorm,
    packed: Tensor,
    grid: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    qk_norm: QKNorm | None,
    layer_kv: LayerKV,
    slot_mapping: Tensor,
) -> Tensor:
    """Return the rotated queries of norm(x) @ weight.T + bias; write keys and values to the cache.

    The first arguments are those of `int4_matmul`, the others those of `rope_and_store_kv`.
    """
    whole = rotates_whole_heads(cos_sin, layer_kv, x.dtype) and not len(packed) % _MAX_OUTPUTS
    if whole and qk_norm is None and choose_int4_kernel(x, packed, grid) is Kernel.INT4_GEMV:
        return int4_project_and_store_kv_triton(
            x, norm, packed, grid, bias, positions, cos_sin, layer_kv, slot_mapping
        )
    qkv = int4_matmul(x, packed, grid, bias, norm=norm)
    return rope_and_store_kv(qkv, positions, cos_sin, qk_norm, layer_kv, slot_mapping)


def int4_project_and_store_kv_triton(
    x: Tensor,
    norm: RMSNorm,
    packed: Tensor,
    grid: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    layer_kv: LayerKV,
    slot_mapping: Tensor,
) -> Tensor:
    """Triton implementation of `int4_project_and_store_kv` for one row and a cache in x's dtype.

    The whole head is rotated, without QK norm.
    """
    outs, ins = packed.shape[0], 2 * packed.shape[1]
    cos, sin = cos_sin
    assert slot_mapping.is_contiguous()
    assert positions.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    group = ins // grid.shape[1]
    launcher, num_programs, heads = _launcher(
        *(outs, ins, group, layer_kv.keys.shape, x.dtype, grid.dtype)
    )
    queries = torch.empty((1, heads, layer_kv.keys.shape[3]), dtype=x.dtype, device=x.device)
    launcher(
        (num_programs,),
        word_view(x),
        word_view(norm.weight),
        packed.view(torch.int32),
        grid.view(torch.int32),
        bias,
        positions,
        cos,
        sin,
        slot_mapping,
        queries,
        layer_kv.keys,
        layer_kv.values,
        norm.eps,
        ins // TILE_INPUTS,
    )
    return queries


@cache
def _launcher(
    outs: int,
    ins: int,
    group: int,
    cache_shape: torch.Size,
    dtype: torch.dtype,
    grid_dtype: torch.dtype,
) -> tuple[Launcher, int, int]:
    """The launcher, the number of programs, and of query heads."""
    _, kv_heads, page_tokens, size = cache_shape
    heads = outs // size - 2 * kv_heads
    tile = choose_int4_gemv_tile(outs, group)
    launcher = Launcher(
        _int4_qkv_rope_kernel,
        **_head_constants(heads, kv_heads, size, page_tokens, tile),
        **int4_gemv_constants(tile, ins, group, float_type(dtype), float_type(grid_dtype)),
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
    )
    return launcher, outs // tile.outputs, heads


def _head_constants(
    heads: int, kv_heads: int, size: int, page_tokens: int, tile: GemmTile
) -> dict[str, Any]:
    assert tile.outputs <= _MAX_OUTPUTS
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": size,
        "page_tokens": page_tokens,
    }


# views of a packed buffer: their alignment varies and must not trigger a recompilation
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _int4_qkv_rope_kernel(
    x, norm, words, grid, bias, positions, cos, sin, slot_mapping, queries, keys, values, eps,
    tiles,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, page_tokens: tl.constexpr,
    input_type: tl.constexpr, grid_type: tl.constexpr, group_size: tl.constexpr,
    dots_per_group: tl.constexpr, outputs: tl.constexpr, step: tl.constexpr, even: tl.constexpr,
    pdl: tl.constexpr = False,
):  # fmt: skip
    wait_for_previous_kernel(pdl)
    block = tl.program_id(0)
    own = paired_output_ids(block, outputs, head_dim)
    total, squares = accumulate_int4_row(
        x, norm, words, grid, own, tiles, input_type, grid_type, group_size, dots_per_group, step,
        even,
    )  # fmt: skip
    summed = tl.sum(total, 1) * tl.rsqrt(tl.sum(squares) / (tiles * 128) + eps)
    rotate_and_store_pairs(
        summed, block, own, bias, positions, cos, sin, slot_mapping, queries, keys,
        values, heads, kv_heads, head_dim, page_tokens,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """Shapes of Llama 8B and 70B, and of Qwen 2.5 0.5B with biases and a remainder."""
    for ins, heads, kv_heads, size, group, kind, biased in (
        (4096, 32, 8, 128, 128, "*bf16", False),
        (4096, 32, 8, 128, 32, "*fp16", False),
        (8192, 64, 8, 128, 128, "*bf16", False),
        (896, 14, 2, 64, 64, "*bf16", True),
    ):
        outs = (heads + 2 * kv_heads) * size
        of = tl.float16 if kind == "*fp16" else tl.bfloat16
        tile = choose_int4_gemv_tile(outs, group)
        constants = {
            **_head_constants(heads, kv_heads, size, 16, tile),
            **int4_gemv_constants(tile, ins, group, of, tl.float16),
        }
        if not biased:
            constants["bias"] = None
        types = {
            **dict.fromkeys(("bias", "queries", "keys", "values"), kind),
            **dict.fromkeys(("x", "norm", "words", "grid", "positions"), "*i32"),
            **dict.fromkeys(("cos", "sin"), "*fp32"),
            "slot_mapping": "*i64",
            "eps": "fp32",
            "tiles": "i32",
            **dict.fromkeys(constants, "constexpr"),
        }
        yield Variant(
            name=f"int4-qkv-rope-{ins}-{heads}-{kv_heads}-{size}-{group}-{kind}",
            kernel=_int4_qkv_rope_kernel,
            signature={
                name: types[name] for name in _int4_qkv_rope_kernel.arg_names if name in types
            },
            constants=constants,
            num_warps=tile.num_warps,
            max_registers=tile.max_registers,
        )
