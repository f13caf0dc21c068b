"""ModelShape from GGUF metadata, with the KV cache as llama.cpp allocates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localgen.backends.formats.architecture.families import BY_GGUF_NAME
from localgen.backends.formats.architecture.model_shape import LayerCacheShape, ModelShape
from localgen.backends.formats.architecture.model_spec import MAX_LAYERS
from localgen.backends.formats.gguf.reader import TOKENS_KEY

# architectures with sliding windows: default window, and interval of layers with full attention
_SLIDING_WINDOWS = {
    family.gguf_name: (family.default_window, family.full_attention_every)
    for family in BY_GGUF_NAME.values()
    if family.full_attention_every
} | {
    "gemma3n": (0, 5),
    "gemma4": (0, 6),
    "gpt-oss": (0, 2),
    "cohere2": (0, 4),
    "llama4": (8192, 4),
}
# interval of layers with attention; the others are recurrent
_HYBRIDS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
# every layer has attention and a recurrent state
_PARALLEL_HYBRIDS = ("falcon-h1",)
_LAYERS_WITH_OWN_CACHE = {"gemma3n": 20}
_MAX_VALUE = 1 << 31


@dataclass(frozen=True, slots=True)
class _ArchitectureMetadata:
    """The metadata under the name of the architecture."""

    architecture: str
    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int = 0) -> int:
        """A number, or the largest of a per-layer list."""
        found = self.get(key)
        if isinstance(found, list):
            return max((_valid_int(each, default) for each in found), default=default)
        return _valid_int(found, default)

    def for_layer(self, key: str, layer: int, default: int = 0) -> int:
        """The value for a layer: a number for all layers, or an entry of a per-layer list."""
        found = self.get(key)
        if not isinstance(found, list):
            return self.integer(key, default)
        return _valid_int(found[layer], default) if layer < len(found) else default


def _valid_int(value: object, default: int) -> int:
    """Return a valid count, or the default: files may contain anything."""
    return value if isinstance(value, int) and 0 <= value < _MAX_VALUE else default


def _array_length(found: object) -> int:
    """Length of an array, which the header gives instead of a long array."""
    return len(found) if isinstance(found, list) else _valid_int(found, 0)


def shape_from_gguf(header: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape, or None if the metadata is insufficient or invalid."""
    keys = _ArchitectureMetadata(str(header.get("general.architecture")), header)
    layers, hidden = keys.integer("block_count"), keys.integer("embedding_length")
    heads = keys.integer("attention.head_count")
    if not 0 < layers <= MAX_LAYERS or not hidden:
        return None
    recurrent = [_is_recurrent(keys, layer, layers) for layer in range(layers)]
    experts_used = keys.integer("expert_used_count")
    wide = keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length"))
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        active_intermediate_size=max(
            keys.integer("feed_forward_length"), wide * max(1, experts_used)
        ),
        num_heads=heads,
        vocab_size=keys.integer("vocab_size", _array_length(header.get(TOKENS_KEY))),
        ctx_train=keys.integer("context_length"),
        layer_caches=tuple(
            _layer_cache(keys, layer, hidden // max(1, heads), heads)
            for layer in range(_num_cache_layers(keys, layers))
            if heads and (not recurrent[layer] or keys.architecture in _PARALLEL_HYBRIDS)
        ),
        state_bytes=_state_bytes(keys, hidden) * sum(recurrent),
        num_experts=keys.integer("expert_count"),
        num_active_experts=experts_used,
    )


def _num_cache_layers(keys: _ArchitectureMetadata, layers: int) -> int:
    """Number of layers with a KV cache, counted from the first; the others share one of these."""
    own = layers - keys.integer("nextn_predict_layers") - keys.integer("attention.shared_kv_layers")
    return max(0, min(own, _LAYERS_WITH_OWN_CACHE.get(keys.architecture, own)))


def _is_recurrent(keys: _ArchitectureMetadata, layer: int, layers: int) -> bool:
    """True if a layer has a recurrent state, with or without attention."""
    listed = keys.get("attention.recurrent_layers")
    if isinstance(listed, list) and layer < len(listed):
        return bool(listed[layer])
    if keys.architecture in _HYBRIDS:
        every = keys.integer("full_attention_interval", _HYBRIDS[keys.architecture])
        trained = layers - keys.integer("nextn_predict_layers")
        return layer < trained and (layer + 1) % max(1, every) != 0
    if keys.get("attention.head_count_kv") is None:
        return not keys.integer("attention.head_count")
    if keys.architecture in _PARALLEL_HYBRIDS:
        return True
    return keys.for_layer("attention.head_count_kv", layer) == 0


def _layer_cache(
    keys: _ArchitectureMetadata, layer: int, default_dim: int, heads: int
) -> LayerCacheShape:
    window = _sliding_window(keys, layer)
    local = "_swa" if window else ""
    key, value = (
        keys.integer(
            f"attention.{kind}_length{local}", keys.integer(f"attention.{kind}_length", default_dim)
        )
        for kind in ("key", "value")
    )
    if keys.get("attention.key_length_mla"):
        value = 0  # latent attention: values are computed from the cached keys
    return LayerCacheShape(
        keys.for_layer("attention.head_count_kv", layer, heads), key, value, window
    )


def _sliding_window(keys: _ArchitectureMetadata, layer: int) -> int | None:
    if keys.architecture not in _SLIDING_WINDOWS:
        return None
    default_window, every = _SLIDING_WINDOWS[keys.architecture]
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        slides = layer < len(pattern) and bool(pattern[layer])
    else:
        every = keys.integer("attention.sliding_window_pattern", every)
        slides = every == 0 or (layer + 1) % every != 0
    return keys.integer("attention.sliding_window", default_window) or None if slides else None


def _state_bytes(keys: _ArchitectureMetadata, hidden: int) -> int:
    """Bytes of a sequence's float32 state in one recurrent layer: Mamba, gated delta nets, short
    convolutions, RWKV."""
    wide, state = keys.integer("ssm.inner_size"), keys.integer("ssm.state_size")
    memory = max(0, keys.integer("ssm.conv_kernel") - 1)
    elements = memory * (wide + 2 * keys.integer("ssm.group_count") * state) + state * wide
    elements += hidden * max(0, keys.integer("shortconv.l_cache") - 1)
    head = keys.integer("wkv.head_size")
    return 4 * (elements + (hidden * (head + keys.integer("token_shift_count", 2)) if head else 0))
