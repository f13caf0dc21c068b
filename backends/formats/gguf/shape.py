"""A model's shape from the metadata of its GGUF file, as llama.cpp makes a cache of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localgen.backends.formats.architecture.model_shape import LayerCache, ModelShape
from localgen.backends.formats.gguf.header import VOCABULARY

# architectures of which some layers have a window: its tokens where the file does not say, and
# which one in so many layers has none
_WINDOWS = {
    "gemma2": (4096, 2),
    "gemma3": (0, 6),
    "gemma3n": (0, 5),
    "gemma4": (0, 6),
    "gpt-oss": (0, 2),
    "cohere2": (0, 4),
    "llama4": (8192, 4),
}
# of which one in so many layers attends, and the others keep a state
_HYBRIDS = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
# every layer does both
_BOTH = ("falcon-h1",)
_FIRST_LAYERS = {"gemma3n": 20}
_MOST_LAYERS, _MOST = 10_000, 1 << 31


@dataclass(frozen=True, slots=True)
class _Keys:
    """Metadata of the model's own architecture."""

    architecture: str
    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int = 0) -> int:
        """A number, or the largest of a list with one for each layer."""
        found = self.get(key)
        if isinstance(found, list):
            return max((_whole(each, default) for each in found), default=default)
        return _whole(found, default)

    def of_layer(self, key: str, layer: int, default: int = 0) -> int:
        """What holds for a layer of a number, or of a list with one for each."""
        found = self.get(key)
        if not isinstance(found, list):
            return self.count(key, default)
        return _whole(found[layer], default) if layer < len(found) else default


def _whole(value: object, default: int) -> int:
    """A number that can count something; files may say anything."""
    return value if isinstance(value, int) and 0 <= value < _MOST else default


def _length(found: object) -> int:
    """Of an array, of which only that may be known."""
    return len(found) if isinstance(found, list) else _whole(found, 0)


def gguf_shape(header: Mapping[str, Any]) -> ModelShape | None:
    """The shape that metadata tells of; None: they say too little, or nothing that can be."""
    keys = _Keys(str(header.get("general.architecture")), header)
    layers, hidden = keys.count("block_count"), keys.count("embedding_length")
    heads = keys.count("attention.head_count")
    if not 0 < layers <= _MOST_LAYERS or not hidden:
        return None
    recurrent = [_is_recurrent(keys, layer, layers) for layer in range(layers)]
    experts_used = keys.count("expert_used_count")
    wide = keys.count("expert_feed_forward_length", keys.count("feed_forward_length"))
    return ModelShape(
        layers=layers,
        hidden=hidden,
        inner=max(keys.count("feed_forward_length"), wide * max(1, experts_used)),
        heads=heads,
        vocab=keys.count("vocab_size", _length(header.get(VOCABULARY))),
        ctx_train=keys.count("context_length"),
        caches=tuple(
            _cache(keys, layer, hidden // max(1, heads), heads)
            for layer in range(_with_cache(keys, layers))
            if heads and (not recurrent[layer] or keys.architecture in _BOTH)
        ),
        state_bytes=_state_bytes(keys, hidden) * sum(recurrent),
        experts=keys.count("expert_count"),
        experts_used=experts_used,
    )


def _with_cache(keys: _Keys, layers: int) -> int:
    """How many layers from the first keep tokens of their own; the others share theirs."""
    own = layers - keys.count("nextn_predict_layers") - keys.count("attention.shared_kv_layers")
    return max(0, min(own, _FIRST_LAYERS.get(keys.architecture, own)))


def _is_recurrent(keys: _Keys, layer: int, layers: int) -> bool:
    """Whether a layer keeps a state (too)."""
    listed = keys.get("attention.recurrent_layers")
    if isinstance(listed, list) and layer < len(listed):
        return bool(listed[layer])
    if keys.architecture in _HYBRIDS:
        every = keys.count("full_attention_interval", _HYBRIDS[keys.architecture])
        trained = layers - keys.count("nextn_predict_layers")
        return layer < trained and (layer + 1) % max(1, every) != 0
    if keys.get("attention.head_count_kv") is None:
        return not keys.count("attention.head_count")
    if keys.architecture in _BOTH:
        return True
    return keys.of_layer("attention.head_count_kv", layer) == 0


def _cache(keys: _Keys, layer: int, usual: int, heads: int) -> LayerCache:
    window = _window(keys, layer)
    local = "_swa" if window else ""
    key, value = (
        keys.count(f"attention.{kind}_length{local}", keys.count(f"attention.{kind}_length", usual))
        for kind in ("key", "value")
    )
    if keys.get("attention.key_length_mla"):
        value = 0  # latent attention: values are computed from what the keys keep
    return LayerCache(keys.of_layer("attention.head_count_kv", layer, heads), key, value, window)


def _window(keys: _Keys, layer: int) -> int | None:
    if keys.architecture not in _WINDOWS:
        return None
    usual, every = _WINDOWS[keys.architecture]
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        slides = layer < len(pattern) and bool(pattern[layer])
    else:
        every = keys.count("attention.sliding_window_pattern", every)
        slides = every == 0 or (layer + 1) % every != 0
    return keys.count("attention.sliding_window", usual) or None if slides else None


def _state_bytes(keys: _Keys, hidden: int) -> int:
    """Bytes of a sequence's state in one recurrent layer, float32: Mamba and gated delta nets,
    short convolutions, RWKV."""
    wide, state = keys.count("ssm.inner_size"), keys.count("ssm.state_size")
    memory = max(0, keys.count("ssm.conv_kernel") - 1)
    elements = memory * (wide + 2 * keys.count("ssm.group_count") * state) + state * wide
    elements += hidden * max(0, keys.count("shortconv.l_cache") - 1)
    head = keys.count("wkv.head_size")
    return 4 * (elements + (hidden * (head + keys.count("token_shift_count", 2)) if head else 0))
