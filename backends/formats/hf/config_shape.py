"""A model's shape from a config.json, as our own engine makes a cache of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localgen.backends.formats.architecture.model_shape import LayerCacheShape, ModelShape

_MAX_LAYERS = 10_000
# of which one layer in so many has no window, where the file lists none
_SLIDING_WINDOW_PATTERN = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6}
# whose files name a window that they do not use unless they say so
_WINDOW_OFF_BY_DEFAULT = ("qwen2", "qwen3", "qwen3_moe")


def shape_from_hf_config(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a config.json tells of; None: it says too little."""
    # models that see images keep the figures of their text part one level down
    text = config.get("text_config") or config
    layers, hidden, heads = (
        _count(text, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    if not 0 < layers <= _MAX_LAYERS or not hidden or not heads:
        return None
    experts = _count(text, "num_experts") or _count(text, "num_local_experts")
    used = _count(text, "num_experts_per_tok") if experts else 0
    wide = _count(text, "intermediate_size")
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        active_intermediate_size=(_count(text, "moe_intermediate_size") or wide) * used
        if experts
        else wide,
        num_heads=heads,
        vocab_size=_count(text, "vocab_size"),
        ctx_train=_context_length(text),
        layer_caches=tuple(
            _layer_cache(text, window, hidden, heads)
            for window in _layer_windows(text, layers)
            if window is not _RECURRENT
        ),
        num_experts=experts,
        num_active_experts=used,
    )


_RECURRENT = -1


def _context_length(config: Mapping[str, Any]) -> int:
    length = _count(config, "max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type")) != "yarn":
        return length
    # Qwen's files ask for YaRN without raising the length that it gives
    trained = scaling.get("original_max_position_embeddings") or length
    return max(length, int(scaling.get("factor", 1) * trained))


def _layer_cache(
    config: Mapping[str, Any], window: int | None, hidden: int, heads: int
) -> LayerCacheShape:
    latent = _count(config, "kv_lora_rank")
    if latent:  # latent attention: one key for all heads, from which values are computed
        return LayerCacheShape(1, latent + _count(config, "qk_rope_head_dim"), 0, window)
    head = _count(config, "head_dim") or hidden // heads
    return LayerCacheShape(_count(config, "num_key_value_heads") or heads, head, head, window)


def _layer_windows(config: Mapping[str, Any], layers: int) -> list[int | None]:
    """For each layer the latest tokens that it sees, None for all; _RECURRENT: it keeps none."""
    window = _sliding_window(config)
    listed = config.get("layer_types")
    if isinstance(listed, list) and len(listed) == layers:
        kinds = {"sliding_attention": window, "linear_attention": _RECURRENT}
        return [kinds.get(kind) for kind in listed]
    every = _SLIDING_WINDOW_PATTERN.get(str(config.get("model_type")), 0)
    every = _count(config, "sliding_window_pattern") or every
    first = _count(config, "max_window_layers") if config.get("use_sliding_window") else 0
    return [
        window if layer >= first and (not every or (layer + 1) % every) else None
        for layer in range(layers)
    ]


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    if config.get("model_type") in _WINDOW_OFF_BY_DEFAULT and not config.get("use_sliding_window"):
        return None
    if config.get("model_type") == "mistral" and "sliding_window" not in config:
        return 4096  # the first Mistral's, null in later files
    return _count(config, "sliding_window") or None


def _count(config: Mapping[str, Any], key: str) -> int:
    found = config.get(key)
    return found if isinstance(found, int) and 0 < found < 1 << 31 else 0
