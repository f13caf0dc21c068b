"""The qkv projection with the norm before it, and RoPE and the write to the KV cache after it.

With one row, a GEMV whose programs own pairs of outputs that RoPE rotates together: one launch
instead of three, those of the norm, of a GEMV and of the kernel in `rope`.
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

from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel
from localgen.backends.cuda.kernels.gemm.dense import matmul, supports_triton_gemm
from localgen.backends.cuda.kernels.gemm.gemv import (
    NORMED_REGISTERS,
    accumulate_gemv,
    choose_gemv_tile,
)
from localgen.backends.cuda.kernels.gemm.tile import INPUT_MULTIPLE
from localgen.backends.cuda.kernels.kv_cache import LayerKV
from localgen.backends.cuda.kernels.launch import Launcher, Variant
from localgen.backends.cuda.kernels.norm import RMSNorm
from localgen.backends.cuda.kernels.rope import QKNorm, rope_and_store_kv


def project_and_store_kv(
    x: Tensor,
    norm: RMSNorm,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    qk_norm: QKNorm | None,
    layer_kv: LayerKV,
    slot_mapping: Tensor,
) -> Tensor:
    """Return the rotated queries of norm(x) @ weight.T + bias; write keys and values to the cache.

    The first arguments are those of `matmul`, the others those of `rope_and_store_kv`.
    """
    kernel = choose_kernel("dense", x, fits=supports_triton_gemm(x, weight))
    if (
        kernel is Kernel.GEMV
        and qk_norm is None
        and rotates_whole_heads(cos_sin, layer_kv, x.dtype)
    ):
        return project_and_store_kv_triton(
            x, norm, weight, bias, positions, cos_sin, layer_kv, slot_mapping
        )
    qkv = matmul(x, weight, bias, norm=norm)
    return rope_and_store_kv(qkv, positions, cos_sin, qk_norm, layer_kv, slot_mapping)


def rotates_whole_heads(
    cos_sin: tuple[Tensor, Tensor], layer_kv: LayerKV, dtype: torch.dtype
) -> bool:
    """True if all of a head is rotated, and stored as it is; and consists of whole programs."""
    size = layer_kv.keys.shape[3]
    return 2 * cos_sin[0].shape[1] == size and size % 4 == 0 and layer_kv.keys.dtype is dtype


def project_and_store_kv_triton(
    x: Tensor,
    norm: RMSNorm,
    weight: Tensor,
    bias: Tensor | None,
    positions: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    layer_kv: LayerKV,
    slot_mapping: Tensor,
) -> Tensor:
    """Triton implementation of `project_and_store_kv` for one row and a cache in x's dtype.

    The whole head is rotated, without QK norm.
    """
    _, kv_heads, page_tokens, size = layer_kv.keys.shape
    outs, ins = weight.shape
    heads = outs // size - 2 * kv_heads
    cos, sin = cos_sin
    assert slot_mapping.is_contiguous()
    assert positions.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    queries = torch.empty((1, heads, size), dtype=x.dtype, device=x.device)
    launcher, grid = _launcher(ins, heads, kv_heads, size, page_tokens)
    launcher(
        grid,
        x.contiguous(),
        norm.weight,
        weight,
        bias,
        positions,
        cos,
        sin,
        slot_mapping,
        queries,
        layer_kv.keys,
        layer_kv.values,
        norm.eps,
        ins // INPUT_MULTIPLE,
    )
    return queries


@cache
def _launcher(
    ins: int, heads: int, kv_heads: int, size: int, page_tokens: int
) -> tuple[Launcher, tuple[int, ...]]:
    """The launcher and the grid."""
    constants, num_warps = _constants(ins, heads, kv_heads, size, page_tokens)
    launcher = Launcher(
        _qkv_rope_kernel, **constants, num_warps=num_warps, maxnreg=NORMED_REGISTERS
    )
    return launcher, ((heads + 2 * kv_heads) * size // constants["outputs"],)


def _constants(
    ins: int, heads: int, kv_heads: int, size: int, page_tokens: int
) -> tuple[dict[str, Any], int]:
    """Return the constexpr arguments and the number of warps."""
    tile = choose_gemv_tile(ins, (heads + 2 * kv_heads) * size)
    step = tile.inputs * tile.num_warps
    constants = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": size,
        "page_tokens": page_tokens,
        "outputs": tile.outputs,
        "step": step,
        "even": ins % step == 0,
    }
    return constants, tile.num_warps


@triton.jit
def paired_output_ids(block, outputs: tl.constexpr, head_dim: tl.constexpr):
    """Return a program's outputs: pairs of element i of a head and element i + head_dim / 2."""
    half: tl.constexpr = head_dim // 2
    at = tl.arange(0, outputs)
    pair = block * (outputs // 2) + at // 2
    return pair // half * head_dim + pair % half + at % 2 * half


@triton.jit
def rotate_and_store_pairs(
    qkv, block, own, bias, positions, cos, sin, slot_mapping, queries, keys, values,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, page_tokens: tl.constexpr,
):  # fmt: skip
    """Add the bias to qkv, float32 [outputs], rotate and store it. own: `paired_output_ids`."""
    outputs: tl.constexpr = own.shape[0]
    half: tl.constexpr = head_dim // 2
    kind = queries.dtype.element_ty
    if bias is not None:
        qkv += tl.load(bias + own).to(tl.float32)
    # rounded as by a projection of its own
    first, second = tl.split(tl.reshape(qkv.to(kind).to(tl.float32), [outputs // 2, 2]))

    pair = block * (outputs // 2) + tl.arange(0, outputs // 2)
    head, element = pair // half, pair % half
    turn = tl.load(positions).to(tl.int64) * half + element
    c, s = tl.load(cos + turn), tl.load(sin + turn)
    is_q, is_v = head < heads, head >= heads + kv_heads
    turned = first * c - second * s
    second = tl.where(is_v, second, second * c + first * s).to(kind)
    first = tl.where(is_v, first, turned).to(kind)
    target = head * head_dim + element
    tl.store(queries + target, first, mask=is_q)
    tl.store(queries + target + half, second, mask=is_q)

    slot = tl.load(slot_mapping)
    # a row with slot -1 stores nothing
    end = tl.where(slot >= 0, heads + 2 * kv_heads, 0)
    is_k = (head >= heads) & (head < tl.minimum(end, heads + kv_heads))
    is_v = is_v & (head < end)
    kv = tl.where(is_v, head - heads - kv_heads, head - heads)
    place = (slot // page_tokens * kv_heads + kv) * page_tokens + slot % page_tokens
    target = place * head_dim + element
    tl.store(keys + target, first, mask=is_k)
    tl.store(keys + target + half, second, mask=is_k)
    tl.store(values + target, first, mask=is_v)
    tl.store(values + target + half, second, mask=is_v)


# views of a packed buffer: their alignment varies and must not trigger a recompilation
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _qkv_rope_kernel(
    x, norm, weight, bias, positions, cos, sin, slot_mapping, queries, keys, values, eps, ins_16,
    heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, page_tokens: tl.constexpr,
    outputs: tl.constexpr, step: tl.constexpr, even: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    block, ins = tl.program_id(0), ins_16 * 16
    own = paired_output_ids(block, outputs, head_dim)
    total, squares = accumulate_gemv(x, norm, weight, own, ins, step, even, pdl)
    qkv = tl.sum(total, 1) * tl.rsqrt(tl.sum(squares) / ins + eps)
    rotate_and_store_pairs(
        qkv, block, own, bias, positions, cos, sin, slot_mapping, queries, keys, values,
        heads, kv_heads, head_dim, page_tokens,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """Shapes of Llama 8B and 1B, and of Qwen 2.5 0.5B with biases and a remainder."""
    for ins, heads, kv_heads, size, biased in (
        (4096, 32, 8, 128, False),
        (2048, 32, 8, 64, False),
        (896, 14, 2, 64, True),
    ):
        constants, num_warps = _constants(ins, heads, kv_heads, size, 16)
        if not biased:
            constants["bias"] = None
        pointers = dict.fromkeys(("x", "norm", "weight", "bias"), "*bf16")
        yield Variant(
            name=f"qkv-rope-{ins}-{heads}-{kv_heads}-{size}" + ("-biased" if biased else ""),
            kernel=_qkv_rope_kernel,
            signature=pointers
            | {"positions": "*i32", "cos": "*fp32", "sin": "*fp32", "slot_mapping": "*i64"}
            | dict.fromkeys(("queries", "keys", "values"), "*bf16")
            | {"eps": "fp32", "ins_16": "i32"}
            | dict.fromkeys(constants, "constexpr"),
            constants=constants,
            num_warps=num_warps,
            max_registers=NORMED_REGISTERS,
        )
