"""ModelShape: the dimensions that determine memory use and speed; size of the KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localgen.backends.formats.architecture.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LayerCacheShape:
    """The KV cache of one layer, per token: a key and a value for each key-value head.

    key_dim, value_dim: elements per head. window: number of latest tokens attended to, or None for
    all. Both runners keep older tokens as well, since another request may share them.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """active_intermediate_size: MLP width computed per token, summed over its active experts.
    layer_caches: layers with a KV cache. state_bytes: size of the recurrent state of a sequence.
    ctx_train: trained context length, or 0 if unknown. has_int4_weights: of an AWQ or GPTQ
    checkpoint.
    """

    num_layers: int
    hidden_size: int
    active_intermediate_size: int
    num_heads: int
    vocab_size: int
    ctx_train: int
    layer_caches: tuple[LayerCacheShape, ...]
    state_bytes: int = 0
    num_experts: int = 0
    num_active_experts: int = 0
    has_int4_weights: bool = False

    @property
    def attention_width(self) -> int:
        """Elements of the queries, keys and values of a token, in the widest layer."""
        return max((self._width(cache) for cache in self.layer_caches), default=0)

    def _width(self, cache: LayerCacheShape) -> int:
        return self.num_heads * cache.key_dim + cache.num_kv_heads * (
            cache.key_dim + cache.value_dim
        )


def shape_from_spec(spec: ModelSpec) -> ModelShape:
    moe, quant = spec.moe, spec.quant
    return ModelShape(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        active_intermediate_size=moe.intermediate_size * moe.top_k
        if moe
        else spec.intermediate_size,
        num_heads=spec.num_heads,
        vocab_size=spec.vocab_size,
        ctx_train=spec.max_len,
        layer_caches=tuple(
            LayerCacheShape(spec.num_kv_heads, spec.head_dim, spec.head_dim, window)
            for window in spec.sliding_windows
        ),
        num_experts=moe.num_experts if moe else 0,
        num_active_experts=moe.top_k if moe else 0,
        has_int4_weights=quant is not None and quant.bits == 4,
    )


# bytes per element; blocks of 32 have a scale, and some a minimum, of two bytes each
CACHE_ELEMENT_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
    "int8": 1.0,
    "fp8": 1.0,
}
# types with one scale per head
_SCALE_BYTES = {"int8": 4.0, "fp8": 4.0}
LLAMACPP_CACHE_TYPES = tuple(kind for kind in CACHE_ELEMENT_BYTES if kind not in _SCALE_BYTES)
CUDA_CACHE_TYPES = ("f32", "f16", "bf16", *_SCALE_BYTES)


def kv_cache_bytes_per_token(
    caches: Iterable[LayerCacheShape], key_type: str, value_type: str
) -> float:
    """Bytes of one token in the KV cache, over all layers."""
    return sum(_layer_bytes(cache, key_type, value_type) for cache in caches)


def kv_cache_read_bytes(
    caches: Iterable[LayerCacheShape], key_type: str, value_type: str, ctx: int
) -> float:
    """Bytes of the KV cache read to compute the token after a context of `ctx` tokens."""
    return sum(
        _layer_bytes(cache, key_type, value_type) * min(ctx, cache.window or ctx)
        for cache in caches
    )


def _layer_bytes(cache: LayerCacheShape, key_type: str, value_type: str) -> float:
    return cache.num_kv_heads * (
        _head_bytes(cache.key_dim, key_type) + _head_bytes(cache.value_dim, value_type)
    )


def _head_bytes(elements: int, kind: str) -> float:
    # with latent attention a layer keeps only keys and computes values from them
    return elements * CACHE_ELEMENT_BYTES[kind] + _SCALE_BYTES.get(kind, 0) if elements else 0.0
