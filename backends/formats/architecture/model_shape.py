"""The figures of a model that its memory and its speed follow from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What a layer keeps of each token: so many heads, each a key and a value of so many elements.

    window: how many of the latest tokens it looks at; None: all. Both runners keep the others
    too, because another request may share them.
    """

    heads: int
    key: int
    value: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """inner: elements between the two halves of the MLP that a token computes, its experts'
    together. caches: of the layers that keep tokens. state_bytes: what layers without a cache keep
    of a sequence, however long. ctx_train: 0: not known."""

    layers: int
    hidden: int
    inner: int
    heads: int
    vocab: int
    ctx_train: int
    caches: tuple[LayerCache, ...]
    state_bytes: int = 0
    experts: int = 0
    experts_used: int = 0

    @property
    def attention_width(self) -> int:
        """Elements of the queries, keys and values of a token in its widest layer."""
        return max((self._width(cache) for cache in self.caches), default=0)

    def _width(self, cache: LayerCache) -> int:
        return self.heads * cache.key + cache.heads * (cache.key + cache.value)


# a type's bytes for an element; blocks of 32 have a scale, some a minimum, of two bytes each
ELEMENT_BYTES = {
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
# types with a scale for each head
_SCALE_BYTES = {"int8": 4.0, "fp8": 4.0}
LLAMACPP_TYPES = tuple(kind for kind in ELEMENT_BYTES if kind not in _SCALE_BYTES)
CUDA_TYPES = ("f32", "f16", "bf16", *_SCALE_BYTES)


def token_bytes(caches: Iterable[LayerCache], key_type: str, value_type: str) -> float:
    """Bytes that one token takes in the KV cache, over all layers."""
    return sum(_layer_bytes(cache, key_type, value_type) for cache in caches)


def read_bytes(caches: Iterable[LayerCache], key_type: str, value_type: str, ctx: int) -> float:
    """Bytes of the KV cache that the token after `ctx` others reads."""
    return sum(
        _layer_bytes(cache, key_type, value_type) * min(ctx, cache.window or ctx)
        for cache in caches
    )


def _layer_bytes(cache: LayerCache, key_type: str, value_type: str) -> float:
    return cache.heads * (_head_bytes(cache.key, key_type) + _head_bytes(cache.value, value_type))


def _head_bytes(elements: int, kind: str) -> float:
    # a layer may keep keys alone, from which values are computed
    return elements * ELEMENT_BYTES[kind] + _SCALE_BYTES.get(kind, 0) if elements else 0.0
