"""RoPE (Su et al. 2021), QK norm and the write to the KV cache, in one kernel."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, cat

from localgen.backends.cuda.kernels.dependent_launch import wait_for_previous_kernel
from localgen.backends.cuda.kernels.device import upcast
from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel
from localgen.backends.cuda.kernels.kv_cache import QUANTIZED_MAX, LayerKV, quantize_kv
from localgen.backends.cuda.kernels.launch import Launcher, Variant, ceil_div, next_power_of_2
from localgen.backends.cuda.kernels.norm import rms_norm_reference


@dataclass(frozen=True, slots=True, eq=False)
class QKNorm:
    """RMSNorm of each q and k head before the rotation (Qwen3, Gemma 3).

    q_weight, k_weight: [head size]. offset: multiply by 1 + weight.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: bool


def rope_and_store_kv(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    qk_norm: QKNorm | None,
    layer_kv: LayerKV,
    slot_mapping: Tensor,
) -> Tensor:
    """Return the rotated queries, [rows, heads, head size]; write keys and values to the cache.

    qkv: [rows, (heads + 2 * kv heads) * head size]. positions: int32 [rows]. cos_sin: cos and sin,
    each float32 [positions, rotary dim / 2]; the rest of a head is not rotated. slot_mapping: int64
    [rows], page * page tokens + offset, or -1 to store neither key nor value. A float8_e4m3fn cache
    needs compute capability 8.9.
    """
    has_kernel = choose_kernel("rope", qkv) is Kernel.ROPE_AND_STORE_KV
    chosen = rope_and_store_kv_triton if has_kernel else rope_and_store_kv_reference
    return chosen(qkv, positions, cos_sin, qk_norm, layer_kv, slot_mapping)


def rope_and_store_kv_reference(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    qk_norm: QKNorm | None,
    layer_kv: LayerKV,
    slot_mapping: Tensor,
) -> Tensor:
    """PyTorch reference of `rope_and_store_kv`."""
    _, kv_heads, _, size = layer_kv.keys.shape
    heads = qkv.shape[1] // size - 2 * kv_heads
    parts = qkv.view(len(qkv), -1, size)
    q, k, v = parts[:, :heads], parts[:, heads:-kv_heads], parts[:, -kv_heads:]
    if qk_norm is not None:
        q, _ = rms_norm_reference(
            q, qk_norm.q_weight, qk_norm.eps, offset=qk_norm.offset, residual=None
        )
        k, _ = rms_norm_reference(
            k, qk_norm.k_weight, qk_norm.eps, offset=qk_norm.offset, residual=None
        )
    cos, sin = (table[positions.long(), None] for table in cos_sin)
    stored = slot_mapping >= 0
    _store_kv(
        layer_kv.keys, layer_kv.key_scales, _apply_rope(k, cos, sin)[stored], slot_mapping[stored]
    )
    _store_kv(layer_kv.values, layer_kv.value_scales, v[stored], slot_mapping[stored])
    return _apply_rope(q, cos, sin)


def _store_kv(pages: Tensor, scales: Tensor | None, x: Tensor, slot_mapping: Tensor) -> None:
    page, offset = slot_mapping // pages.shape[2], slot_mapping % pages.shape[2]
    if scales is None:
        pages[page, :, offset] = x.to(pages.dtype)
        return
    small, by = quantize_kv(upcast(x), pages.dtype)
    pages[page, :, offset] = small
    scales[page, :, offset] = by.to(scales.dtype)


def _apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate in Hugging Face's layout: element i pairs with element i + rotary dim / 2."""
    half = cos.shape[-1]
    exact = upcast(x)
    first, second, rest = exact[..., :half], exact[..., half : 2 * half], exact[..., 2 * half :]
    turned = cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    return turned.to(x.dtype)


def rope_and_store_kv_triton(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    qk_norm: QKNorm | None,
    layer_kv: LayerKV,
    slot_mapping: Tensor,
) -> Tensor:
    """Triton implementation of `rope_and_store_kv`: one program per row and block of heads."""
    _, kv_heads, page_tokens, size = layer_kv.keys.shape
    rows, heads = len(qkv), qkv.shape[1] // size - 2 * kv_heads
    cos, sin = cos_sin
    assert slot_mapping.is_contiguous()
    assert positions.is_contiguous()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    queries = torch.empty((rows, heads, size), dtype=qkv.dtype, device=qkv.device)
    # placeholder pointers for absent tensors: the kernel does not read them
    scales = cos if layer_kv.key_scales is None else layer_kv.key_scales
    heads_block, num_warps = _heads_and_warps(rows, size)
    norm_kind = None if qk_norm is None else qk_norm.offset
    launcher = _launcher(
        *(heads, kv_heads, size, cos.shape[1], page_tokens),
        *(layer_kv.keys.dtype, norm_kind, heads_block, num_warps),
    )
    launcher(
        (rows, ceil_div(heads + 2 * kv_heads, heads_block)),
        qkv.contiguous(),
        positions,
        cos,
        sin,
        cos if qk_norm is None else qk_norm.q_weight,
        cos if qk_norm is None else qk_norm.k_weight,
        slot_mapping,
        queries,
        layer_kv.keys,
        layer_kv.values,
        scales,
        scales if layer_kv.value_scales is None else layer_kv.value_scales,
        0.0 if qk_norm is None else qk_norm.eps,
    )
    return queries


@cache
def _launcher(
    heads: int,
    kv_heads: int,
    size: int,
    half_rotary_dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    norm_offset: bool | None,
    heads_block: int,
    num_warps: int,
) -> Launcher:
    """dtype: of the cache. norm_offset: offset of the QK norm, or None if there is none."""
    return Launcher(
        _rope_and_store_kv_kernel,
        heads=heads,
        num_warps=num_warps,
        heads_block=heads_block,
        **_rope_constants(size, half_rotary_dim, kv_heads, page_tokens, dtype, norm_offset),
    )


def _heads_and_warps(rows: int, size: int) -> tuple[int, int]:
    """Return the heads and warps of a program.

    Few rows: one warp per head, for latency. Many rows: 16-byte loads per thread.
    """
    if rows <= 64:
        return 4, 4
    heads = 16
    return heads, max(heads * next_power_of_2(size) // 512, 1)


def _rope_constants(
    head_dim: int,
    half_rotary_dim: int,
    kv_heads: int,
    page_tokens: int,
    dtype: torch.dtype,
    norm_offset: bool | None,
) -> dict[str, Any]:
    rest = head_dim - 2 * half_rotary_dim
    return {
        "kv_heads": kv_heads,
        "page_tokens": page_tokens,
        "head_dim": head_dim,
        "half_rotary_dim": half_rotary_dim,
        "half_block": next_power_of_2(half_rotary_dim),
        "rest_block": next_power_of_2(rest) if rest else 0,
        "has_qk_norm": norm_offset is not None,
        "offset": bool(norm_offset),
        "quantized_max": QUANTIZED_MAX.get(dtype, 0.0),
        "is_int": dtype is torch.int8,
    }


# views of a packed buffer: their alignment varies and must not trigger a recompilation
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _rope_and_store_kv_kernel(
    qkv, positions, cos, sin, q_weight, k_weight, slot_mapping, queries, keys, values, key_scales,
    value_scales, eps,
    heads: tl.constexpr, kv_heads: tl.constexpr, page_tokens: tl.constexpr, head_dim: tl.constexpr,
    half_rotary_dim: tl.constexpr, half_block: tl.constexpr, rest_block: tl.constexpr,
    has_qk_norm: tl.constexpr, offset: tl.constexpr, quantized_max: tl.constexpr,
    is_int: tl.constexpr, heads_block: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    """A head is loaded in three parts: the two rotated halves and the unrotated rest."""
    wait_for_previous_kernel(pdl)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads_block + tl.arange(0, heads_block)[:, None]
    at = tl.arange(0, half_block)[None, :]
    is_q = head < heads
    is_k = (head >= heads) & (head < heads + kv_heads)
    is_v = head >= heads + kv_heads
    here = head < heads + 2 * kv_heads
    inside = here & (at < half_rotary_dim)
    source = qkv + row * ((heads + 2 * kv_heads) * head_dim) + head * head_dim
    kind = qkv.dtype.element_ty
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half_rotary_dim + at, mask=inside, other=0.0).to(tl.float32)
    if rest_block:
        rest_at = 2 * half_rotary_dim + tl.arange(0, rest_block)[None, :]
        rest_inside = here & (rest_at < head_dim)
        rest = tl.load(source + rest_at, mask=rest_inside, other=0.0).to(tl.float32)

    if has_qk_norm:
        squares = tl.sum(first * first + second * second, 1, keep_dims=True)
        if rest_block:
            squares += tl.sum(rest * rest, 1, keep_dims=True)
        by = tl.rsqrt(squares / head_dim + eps)
        first = _apply_qk_norm(
            first, by, q_weight, k_weight, at, at < half_rotary_dim, is_q, is_v, offset, kind
        )
        second = _apply_qk_norm(
            second,
            by,
            q_weight,
            k_weight,
            half_rotary_dim + at,
            at < half_rotary_dim,
            is_q,
            is_v,
            offset,
            kind,
        )
        if rest_block:
            rest = _apply_qk_norm(
                rest, by, q_weight, k_weight, rest_at, rest_at < head_dim, is_q, is_v, offset, kind
            )

    turn = tl.load(positions + row).to(tl.int64) * half_rotary_dim + at
    c = tl.load(cos + turn, mask=at < half_rotary_dim, other=0.0)
    s = tl.load(sin + turn, mask=at < half_rotary_dim, other=0.0)
    turned = first * c - second * s
    # values are not rotated; everything is rounded to the dtype of qkv, even before quantization
    second = tl.where(is_v, second, second * c + first * s).to(kind)
    first = tl.where(is_v, first, turned).to(kind)

    target = queries + (row * heads + head) * head_dim
    tl.store(target + at, first, mask=inside & is_q)
    tl.store(target + half_rotary_dim + at, second, mask=inside & is_q)
    if rest_block:
        tl.store(target + rest_at, rest.to(kind), mask=rest_inside & is_q)

    slot = tl.load(slot_mapping + row)
    # rows with slot -1 store nothing
    stored = (head >= heads) & (head < tl.where(slot >= 0, heads + 2 * kv_heads, 0))
    kv = tl.where(is_v, head - heads - kv_heads, head - heads)
    place = (slot // page_tokens * kv_heads + kv) * page_tokens + slot % page_tokens
    if quantized_max > 0:
        most = tl.maximum(
            tl.max(tl.abs(first.to(tl.float32)), 1, keep_dims=True),
            tl.max(tl.abs(second.to(tl.float32)), 1, keep_dims=True),
        )
        if rest_block:
            most = tl.maximum(most, tl.max(tl.abs(rest), 1, keep_dims=True))
        scale = tl.div_rn(tl.maximum(most, 1e-8), tl.full(most.shape, quantized_max, tl.float32))
        tl.store(key_scales + place, scale, mask=stored & is_k)
        tl.store(value_scales + place, scale, mask=stored & is_v)
    else:
        scale = first
    target = place * head_dim + at
    first = _quantize_kv(first, scale, keys.dtype.element_ty, quantized_max, is_int)
    second = _quantize_kv(second, scale, keys.dtype.element_ty, quantized_max, is_int)
    tl.store(keys + target, first, mask=inside & stored & is_k)
    tl.store(values + target, first, mask=inside & stored & is_v)
    tl.store(keys + target + half_rotary_dim, second, mask=inside & stored & is_k)
    tl.store(values + target + half_rotary_dim, second, mask=inside & stored & is_v)
    if rest_block:
        rest = _quantize_kv(rest.to(kind), scale, keys.dtype.element_ty, quantized_max, is_int)
        tl.store(keys + place * head_dim + rest_at, rest, mask=rest_inside & stored & is_k)
        tl.store(values + place * head_dim + rest_at, rest, mask=rest_inside & stored & is_v)


@triton.jit
def _apply_qk_norm(
    x, inv_rms, q_weight, k_weight, at, inside, is_q, is_v, offset: tl.constexpr, kind: tl.constexpr
):
    """Normalize and round one part of the q and k heads; v heads are returned unchanged."""
    weight = tl.where(
        is_q,
        tl.load(q_weight + at, mask=inside, other=0.0).to(tl.float32),
        tl.load(k_weight + at, mask=inside, other=0.0).to(tl.float32),
    )
    if offset:
        weight += 1.0
    return tl.where(is_v, x, (x * inv_rms * weight).to(kind).to(tl.float32))


@triton.jit
def _quantize_kv(x, scale, kind: tl.constexpr, quantized_max: tl.constexpr, is_int: tl.constexpr):
    """Convert one part of the heads to the cache dtype; scaled if quantized_max > 0."""
    if quantized_max > 0:
        scaled = tl.div_rn(x.to(tl.float32), tl.broadcast_to(scale, x.shape))
        if is_int:
            # adding and subtracting 1.5 * 2**23 rounds half to even, as torch does
            scaled = (scaled + 12582912.0) - 12582912.0
            scaled = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
        return scaled.to(kind)
    else:
        return x.to(kind)


_TRITON_POINTER_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def variants() -> Iterator[Variant]:
    """Each cache dtype in decode; head sizes, partial rotation and QK norm in prefill."""
    for rows, heads, kv_heads, size, rotated, dtype, normed in (
        (1, 32, 8, 128, 128, torch.bfloat16, False),
        (1, 32, 8, 128, 128, torch.int8, False),
        (1, 32, 8, 128, 128, torch.float8_e4m3fn, False),
        (1, 32, 4, 128, 128, torch.int8, True),
        (512, 32, 8, 128, 128, torch.bfloat16, True),
        (512, 32, 8, 64, 64, torch.float8_e4m3fn, True),
        (512, 32, 32, 96, 96, torch.int8, False),
        (512, 24, 8, 128, 96, torch.int8, True),
        (512, 8, 4, 256, 256, torch.int8, True),
        (1, 8, 4, 256, 256, torch.bfloat16, True),
    ):
        heads_block, num_warps = _heads_and_warps(rows, size)
        constants = {
            "heads": heads,
            **_rope_constants(size, rotated // 2, kv_heads, 16, dtype, False if normed else None),
            "heads_block": heads_block,
        }
        pages = _TRITON_POINTER_TYPES[dtype]
        yield Variant(
            name=f"rope-{rows}-{heads}-{kv_heads}-{size}-{rotated}-{pages[1:]}"
            + ("-normed" if normed else ""),
            kernel=_rope_and_store_kv_kernel,
            signature={
                "qkv": "*bf16",
                "positions": "*i32",
                "cos": "*fp32",
                "sin": "*fp32",
                "q_weight": "*bf16" if normed else "*fp32",
                "k_weight": "*bf16" if normed else "*fp32",
                "slot_mapping": "*i64",
                "queries": "*bf16",
                "keys": pages,
                "values": pages,
                "key_scales": "*fp32",
                "value_scales": "*fp32",
                "eps": "fp32",
                **dict.fromkeys(constants, "constexpr"),
            },
            constants=constants,
            num_warps=num_warps,
            min_arch=89 if dtype is torch.float8_e4m3fn else 80,
        )
