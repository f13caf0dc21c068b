"""Rotary positions (Su et al. 2021), norms of q and k, and the write into the KV cache."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, cat

from localgen.backends.cuda.kernels.device import has_kernels, wide
from localgen.backends.cuda.kernels.kv_cache import LARGEST, LayerKV, shrink
from localgen.backends.cuda.kernels.launch import Variant, launch
from localgen.backends.cuda.kernels.norm import rms_norm_reference


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """RMSNorm of each head of q and k before the rotation (Qwen3, Gemma 3).

    q, k: [size]. offset: multiply by 1 + weight.
    """

    q: Tensor
    k: Tensor
    eps: float
    offset: bool


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    rotation: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
    cache: LayerKV,
    slots: Tensor,
) -> Tensor:
    """Rotated queries, [rows, heads, size]; keys and values go to their slots.

    qkv: [rows, (heads + 2 * kv heads) * size]. positions: int32 [rows]. rotation: cos and sin,
    float32 [positions, rotated / 2]; the rest of a head is left as it is. slots: int64 [rows],
    page * page tokens + offset; -1: neither key nor value is stored. A cache in float8_e4m3fn
    needs compute capability 8.9.
    """
    chosen = rope_and_store_triton if has_kernels(qkv) else rope_and_store_reference
    return chosen(qkv, positions, rotation, norms, cache, slots)


def rope_and_store_reference(
    qkv: Tensor,
    positions: Tensor,
    rotation: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
    cache: LayerKV,
    slots: Tensor,
) -> Tensor:
    """The same in plain torch."""
    _, kv_heads, _, size = cache.keys.shape
    heads = qkv.shape[1] // size - 2 * kv_heads
    parts = qkv.view(len(qkv), -1, size)
    q, k, v = parts[:, :heads], parts[:, heads:-kv_heads], parts[:, -kv_heads:]
    if norms is not None:
        q, _ = rms_norm_reference(q, norms.q, norms.eps, offset=norms.offset, residual=None)
        k, _ = rms_norm_reference(k, norms.k, norms.eps, offset=norms.offset, residual=None)
    cos, sin = (table[positions.long(), None] for table in rotation)
    stored = slots >= 0
    _store(cache.keys, cache.key_scales, _rotated(k, cos, sin)[stored], slots[stored])
    _store(cache.values, cache.value_scales, v[stored], slots[stored])
    return _rotated(q, cos, sin)


def _store(pages: Tensor, scales: Tensor | None, x: Tensor, slots: Tensor) -> None:
    page, offset = slots // pages.shape[2], slots % pages.shape[2]
    if scales is None:
        pages[page, :, offset] = x.to(pages.dtype)
        return
    small, by = shrink(wide(x), pages.dtype)
    pages[page, :, offset] = small
    scales[page, :, offset] = by.to(scales.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's layout: element i turns with element i + rotated / 2."""
    half = cos.shape[-1]
    exact = wide(x)
    first, second, rest = exact[..., :half], exact[..., half : 2 * half], exact[..., 2 * half :]
    turned = cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    return turned.to(x.dtype)


def rope_and_store_triton(
    qkv: Tensor,
    positions: Tensor,
    rotation: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
    cache: LayerKV,
    slots: Tensor,
) -> Tensor:
    """The same in one launch, a program for a few heads of each row."""
    _, kv_heads, page_tokens, size = cache.keys.shape
    rows, heads = len(qkv), qkv.shape[1] // size - 2 * kv_heads
    assert all(part.is_contiguous() for part in (*cache.tensors, *rotation, slots, positions))
    queries = torch.empty((rows, heads, size), dtype=qkv.dtype, device=qkv.device)
    cos, sin = rotation
    # where there is no such tensor, any pointer does: it is not read
    scales = cos if cache.key_scales is None else cache.key_scales
    heads_block, num_warps = _shape(rows, size)
    launch(_rope_and_store, (rows, triton.cdiv(heads + 2 * kv_heads, heads_block)))(
        qkv.contiguous(),
        positions,
        cos,
        sin,
        cos if norms is None else norms.q,
        cos if norms is None else norms.k,
        slots,
        queries,
        cache.keys,
        cache.values,
        scales,
        scales if cache.value_scales is None else cache.value_scales,
        0.0 if norms is None else norms.eps,
        heads=heads,
        num_warps=num_warps,
        heads_block=heads_block,
        **_constants(size, cos.shape[1], kv_heads, page_tokens, cache.keys.dtype, norms),
    )
    return queries


def _shape(rows: int, size: int) -> tuple[int, int]:
    """Heads and warps of a program.

    Few rows: a warp a head, for the shortest time. Many: a load of 16 bytes a thread.
    """
    if rows <= 64:
        return 4, 4
    heads = 16
    return heads, max(heads * triton.next_power_of_2(size) // 512, 1)


def _constants(
    size: int,
    half: int,
    kv_heads: int,
    page_tokens: int,
    dtype: torch.dtype,
    norms: HeadNorms | None,
) -> dict[str, int | float | bool]:
    rest = size - 2 * half
    return {
        "kv_heads": kv_heads,
        "page_tokens": page_tokens,
        "size": size,
        "half": half,
        "half_block": triton.next_power_of_2(half),
        "rest_block": triton.next_power_of_2(rest) if rest else 0,
        "normed": norms is not None,
        "offset": norms is not None and norms.offset,
        "largest": LARGEST.get(dtype, 0.0),
        "is_int": dtype is torch.int8,
    }


# both are parts of a packed copy: where they begin must not decide what is compiled
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rope_and_store(
    qkv,
    positions,
    cos,
    sin,
    q_weight,
    k_weight,
    slots,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    page_tokens: tl.constexpr,
    size: tl.constexpr,
    half: tl.constexpr,
    half_block: tl.constexpr,
    rest_block: tl.constexpr,
    normed: tl.constexpr,
    offset: tl.constexpr,
    largest: tl.constexpr,
    is_int: tl.constexpr,
    heads_block: tl.constexpr,
):
    """A head lies in three parts: two that turn with each other, each half long, and the rest."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads_block + tl.arange(0, heads_block)[:, None]
    at = tl.arange(0, half_block)[None, :]
    is_q = head < heads
    is_k = (head >= heads) & (head < heads + kv_heads)
    is_v = head >= heads + kv_heads
    here = head < heads + 2 * kv_heads
    inside = here & (at < half)
    source = qkv + row * ((heads + 2 * kv_heads) * size) + head * size
    kind = qkv.dtype.element_ty
    first = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half + at, mask=inside, other=0.0).to(tl.float32)
    if rest_block:
        rest_at = 2 * half + tl.arange(0, rest_block)[None, :]
        rest_inside = here & (rest_at < size)
        rest = tl.load(source + rest_at, mask=rest_inside, other=0.0).to(tl.float32)

    if normed:
        squares = tl.sum(first * first + second * second, 1, keep_dims=True)
        if rest_block:
            squares += tl.sum(rest * rest, 1, keep_dims=True)
        by = tl.rsqrt(squares / size + eps)
        first = _weighed(first, by, q_weight, k_weight, at, at < half, is_q, is_v, offset, kind)
        second = _weighed(
            second, by, q_weight, k_weight, half + at, at < half, is_q, is_v, offset, kind
        )
        if rest_block:
            rest = _weighed(
                rest, by, q_weight, k_weight, rest_at, rest_at < size, is_q, is_v, offset, kind
            )

    turn = tl.load(positions + row).to(tl.int64) * half + at
    c = tl.load(cos + turn, mask=at < half, other=0.0)
    s = tl.load(sin + turn, mask=at < half, other=0.0)
    turned = first * c - second * s
    # values do not turn; what is stored is rounded as the queries are
    second = tl.where(is_v, second, second * c + first * s).to(kind)
    first = tl.where(is_v, first, turned).to(kind)

    target = queries + (row * heads + head) * size
    tl.store(target + at, first, mask=inside & is_q)
    tl.store(target + half + at, second, mask=inside & is_q)
    if rest_block:
        tl.store(target + rest_at, rest.to(kind), mask=rest_inside & is_q)

    slot = tl.load(slots + row)
    # a row without a slot stores no head
    stored = (head >= heads) & (head < tl.where(slot >= 0, heads + 2 * kv_heads, 0))
    kv = tl.where(is_v, head - heads - kv_heads, head - heads)
    place = (slot // page_tokens * kv_heads + kv) * page_tokens + slot % page_tokens
    if largest > 0:
        most = tl.maximum(
            tl.max(tl.abs(first.to(tl.float32)), 1, keep_dims=True),
            tl.max(tl.abs(second.to(tl.float32)), 1, keep_dims=True),
        )
        if rest_block:
            most = tl.maximum(most, tl.max(tl.abs(rest), 1, keep_dims=True))
        scale = tl.div_rn(tl.maximum(most, 1e-8), tl.full(most.shape, largest, tl.float32))
        tl.store(key_scales + place, scale, mask=stored & is_k)
        tl.store(value_scales + place, scale, mask=stored & is_v)
    else:
        scale = first
    target = place * size + at
    first = _small(first, scale, keys.dtype.element_ty, largest, is_int)
    second = _small(second, scale, keys.dtype.element_ty, largest, is_int)
    tl.store(keys + target, first, mask=inside & stored & is_k)
    tl.store(values + target, first, mask=inside & stored & is_v)
    tl.store(keys + target + half, second, mask=inside & stored & is_k)
    tl.store(values + target + half, second, mask=inside & stored & is_v)
    if rest_block:
        rest = _small(rest.to(kind), scale, keys.dtype.element_ty, largest, is_int)
        tl.store(keys + place * size + rest_at, rest, mask=rest_inside & stored & is_k)
        tl.store(values + place * size + rest_at, rest, mask=rest_inside & stored & is_v)


@triton.jit
def _weighed(
    x, by, q_weight, k_weight, at, inside, is_q, is_v, offset: tl.constexpr, kind: tl.constexpr
):
    """A part of the heads, normed if of q or k and rounded."""
    weight = tl.where(
        is_q,
        tl.load(q_weight + at, mask=inside, other=0.0).to(tl.float32),
        tl.load(k_weight + at, mask=inside, other=0.0).to(tl.float32),
    )
    if offset:
        weight += 1.0
    return tl.where(is_v, x, (x * by * weight).to(kind).to(tl.float32))


@triton.jit
def _small(x, scale, kind: tl.constexpr, largest: tl.constexpr, is_int: tl.constexpr):
    """A part of the heads as the pages hold it, scaled if there is a largest magnitude."""
    if largest > 0:
        scaled = tl.div_rn(x.to(tl.float32), tl.broadcast_to(scale, x.shape))
        if is_int:
            # adding 1.5 * 2**23 leaves whole numbers, halves rounded to even as torch does
            scaled = (scaled + 12582912.0) - 12582912.0
            scaled = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
        return scaled.to(kind)
    else:
        return x.to(kind)


_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def variants() -> Iterator[Variant]:
    """Each kind of cache at decode; head sizes, partial rotation and norms at prefill."""
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
        weight = torch.empty(0)
        norms = HeadNorms(weight, weight, 1e-6, False) if normed else None
        heads_block, num_warps = _shape(rows, size)
        constants = {
            "heads": heads,
            **_constants(size, rotated // 2, kv_heads, 16, dtype, norms),
            "heads_block": heads_block,
        }
        pages = _TYPES[dtype]
        yield Variant(
            name=f"rope-{rows}-{heads}-{kv_heads}-{size}-{rotated}-{pages[1:]}"
            + ("-normed" if normed else ""),
            kernel=_rope_and_store,
            signature={
                "qkv": "*bf16",
                "positions": "*i32",
                "cos": "*fp32",
                "sin": "*fp32",
                "q_weight": "*bf16" if normed else "*fp32",
                "k_weight": "*bf16" if normed else "*fp32",
                "slots": "*i64",
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
