"""A model's shape from a config.json, as our own engine makes a cache of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localgen.backends.formats.architecture.model_shape import LayerCache, ModelShape

_MOST_LAYERS = 10_000
# of which one layer in so many has no window, where the file lists none
_ALTERNATING = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6}
# whose files name a window that they do not use unless they say so
_UNUSED_WINDOWS = ("qwen2", "qwen3", "qwen3_moe")


def config_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a config.json tells of; None: it says too little."""
    # models that see images keep the figures of their text part one level down
    text = config.get("text_config") or config
    layers, hidden, heads = (
        _count(text, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    if not 0 < layers <= _MOST_LAYERS or not hidden or not heads:
        return None
    experts = _count(text, "num_experts") or _count(text, "num_local_experts")
    used = _count(text, "num_experts_per_tok") if experts else 0
    wide = _count(text, "intermediate_size")
    return ModelShape(
        layers=layers,
        hidden=hidden,
        inner=(_count(text, "moe_intermediate_size") or wide) * used if experts else wide,
        heads=heads,
        vocab=_count(text, "vocab_size"),
        ctx_train=_trained(text),
        caches=tuple(
            _cache(text, window, hidden, heads)
            for window in _windows(text, layers)
            if window is not _STATE
        ),
        experts=experts,
        experts_used=used,
    )


_STATE = -1


def _trained(text: Mapping[str, Any]) -> int:
    length = _count(text, "max_position_embeddings")
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return length
    # Qwen's files ask for YaRN without raising the length that it gives
    trained = scaling.get("original_max_position_embeddings") or length
    return max(length, int(scaling.get("factor", 1) * trained))


def _cache(text: Mapping[str, Any], window: int | None, hidden: int, heads: int) -> LayerCache:
    latent = _count(text, "kv_lora_rank")
    if latent:  # latent attention: one key for all heads, from which values are computed
        return LayerCache(1, latent + _count(text, "qk_rope_head_dim"), 0, window)
    head = _count(text, "head_dim") or hidden // heads
    return LayerCache(_count(text, "num_key_value_heads") or heads, head, head, window)


def _windows(text: Mapping[str, Any], layers: int) -> list[int | None]:
    """For each layer the latest tokens that it sees, None for all; _STATE: it keeps none."""
    window = _window(text)
    listed = text.get("layer_types")
    if isinstance(listed, list) and len(listed) == layers:
        kinds = {"sliding_attention": window, "linear_attention": _STATE}
        return [kinds.get(kind) for kind in listed]
    every = _ALTERNATING.get(str(text.get("model_type")), 0)
    every = _count(text, "sliding_window_pattern") or every
    first = _count(text, "max_window_layers") if text.get("use_sliding_window") else 0
    return [
        window if layer >= first and (not every or (layer + 1) % every) else None
        for layer in range(layers)
    ]


def _window(text: Mapping[str, Any]) -> int | None:
    if text.get("model_type") in _UNUSED_WINDOWS and not text.get("use_sliding_window"):
        return None
    if text.get("model_type") == "mistral" and "sliding_window" not in text:
        return 4096  # the first Mistral's, null in later files
    return _count(text, "sliding_window") or None


def _count(text: Mapping[str, Any], key: str) -> int:
    found = text.get(key)
    return found if isinstance(found, int) and 0 < found < 1 << 31 else 0
