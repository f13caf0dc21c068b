"""Rotary positions (Su et al. 2021), norms of q and k, and the write into the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, cat

from localgen.backends.cuda.kernels.kv import LayerKV, shrink
from localgen.backends.cuda.kernels.norm import rms_norm


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
    page * page tokens + offset; -1: neither key nor value is stored.
    """
    return rope_and_store_reference(qkv, positions, rotation, norms, cache, slots)


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
        q, _ = rms_norm(q, norms.q, norms.eps, offset=norms.offset, residual=None)
        k, _ = rms_norm(k, norms.k, norms.eps, offset=norms.offset, residual=None)
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
    small, by = shrink(x.float(), pages.dtype)
    pages[page, :, offset] = small
    scales[page, :, offset] = by


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's layout: element i turns with element i + rotated / 2."""
    half = cos.shape[-1]
    exact = x.float()
    first, second, rest = exact[..., :half], exact[..., half : 2 * half], exact[..., 2 * half :]
    turned = cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    return turned.to(x.dtype)
