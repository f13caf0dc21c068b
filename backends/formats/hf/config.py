"""config.json of a Hugging Face folder, read as a ModelSpec to run, or as a ModelShape to plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localgen.backends.formats.architecture.families import BY_MODEL_TYPE, FAMILIES, Family
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.model_shape import LayerCacheShape, ModelShape
from localgen.backends.formats.architecture.model_spec import (
    MAX_LAYERS,
    Activation,
    ModelSpec,
    MoeConfig,
    check_head_counts,
    check_num_experts,
)
from localgen.backends.formats.architecture.rope import Rope, parse_rope, read_rope, yarn_max_len
from localgen.backends.formats.hf.quantization_config import read_quantization_config

_UNKNOWN_FAMILY = Family("", "", ())
_RECURRENT = -1


def read_hf_config(folder: Path) -> ModelSpec:
    """Return the model described by the config.json of a Hugging Face folder.

    Raises LoadFailed, naming the file and the field, if one is missing or invalid, or if the model
    is not supported.
    """
    config = ConfigFields.from_file(folder / "config.json")
    family = _family(config)
    heads, hidden = config.positive_int("num_attention_heads"), config.positive_int("hidden_size")
    head_dim = config.positive_int(
        "head_dim", None if family.requires_head_dim else hidden // heads or None
    )
    rope, local_rope = _ropes(config, family, head_dim)
    layers = config.positive_int("num_hidden_layers", max_value=MAX_LAYERS)
    attention_bias = family.allows_attention_bias and config.flag("attention_bias", False)
    spec = ModelSpec(
        architecture=family.architecture,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=config.positive_int("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.positive_int("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=config.positive_int("vocab_size"),
        max_len=rope.max_len(config.positive_int("max_position_embeddings")),
        norm_eps=config.positive_float("rms_norm_eps"),
        norm_offset=family.gemma,
        sandwich_norms=family.gemma,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family.allows_mlp_bias and config.flag("mlp_bias", False),
        activation=_activation(config, family),
        rope=rope,
        local_rope=local_rope,
        sliding_windows=_sliding_windows(config, family, layers),
        attn_scale=(config.positive_float("query_pre_attn_scalar") if family.gemma else head_dim)
        ** -0.5,
        attn_softcap=_softcap(config, family, "attn_logit_softcapping", family.attn_softcap),
        logit_softcap=_softcap(config, family, "final_logit_softcapping", family.logit_softcap),
        embed_scale=hidden**0.5 if family.gemma else 1.0,
        tied_embeddings=config.flag("tie_word_embeddings", family.gemma),
        fused_projections=family.fused_projections,
        moe=_moe(config, family),
        quant=read_quantization_config(config),
    )
    _check_spec(config, spec)
    return spec


def _family(config: ConfigFields) -> Family:
    name = (config.strings("architectures") or ("none",))[0]
    if name not in FAMILIES:
        known = ", ".join(family.removesuffix("ForCausalLM") for family in FAMILIES)
        raise config.load_error(
            f"architecture {name} is not supported, only {known} (each …ForCausalLM)"
        )
    return FAMILIES[name]


def _check_spec(config: ConfigFields, spec: ModelSpec) -> None:
    check_head_counts(config, spec)
    check_num_experts(config, spec)
    if spec.moe is not None and spec.moe.top_k > spec.moe.num_experts:
        raise config.load_error(
            f"num_experts_per_tok is {spec.moe.top_k}, there are {spec.moe.num_experts} experts"
        )
    # EmbeddingGemma: an encoder with the architecture name of the decoder
    if config.flag("use_bidirectional_attention", False):
        raise config.load_error("use_bidirectional_attention is not supported: this is an encoder")


def _activation(config: ConfigFields, family: Family) -> Activation:
    # Gemma 2 files have hidden_act as well, but use hidden_activation
    key = "hidden_activation" if family.gemma else "hidden_act"
    name = config.string(key, "gelu_pytorch_tanh" if family.gemma else "silu")
    match name:
        case "silu":
            return "silu"
        case "gelu_pytorch_tanh":
            return "gelu_tanh"
    raise config.invalid_value(key, "silu or gelu_pytorch_tanh")


def _softcap(config: ConfigFields, family: Family, key: str, default: float | None) -> float | None:
    if not family.gemma:
        return None
    if key not in config.values:
        return default
    return config.positive_float(key) if key in config else None  # null disables it


def _ropes(config: ConfigFields, family: Family, head_dim: int) -> tuple[Rope, Rope | None]:
    """RoPE of layers with full attention, and of those with a window if it differs."""
    if family.local_rope_theta is None:
        # the first Llama files have no rope_theta
        theta = 10000.0 if family.architecture == "LlamaForCausalLM" else None
        return read_rope(config, head_dim=head_dim, theta=theta), None
    both = config.section("rope_parameters")
    if both is not None and "full_attention" in both:
        full, sliding = both.section("full_attention"), both.section("sliding_attention")
        if sliding is None:
            raise config.load_error("rope_parameters has full_attention but no sliding_attention")
        local = parse_rope(config, sliding, head_dim=head_dim)
        return parse_rope(config, full, head_dim=head_dim), local
    theta = config.positive_float("rope_local_base_freq", family.local_rope_theta)
    return read_rope(config, head_dim=head_dim), Rope(theta, head_dim)


def _sliding_windows(config: ConfigFields, family: Family, layers: int) -> tuple[int | None, ...]:
    window, sliding = _sliding_window(config, family), _sliding_layers(config, family, layers)
    return tuple(window if slides else None for slides in sliding)


def _sliding_window(config: ConfigFields, family: Family) -> int | None:
    key = "sliding_window"
    if family.window_needs_flag and not config.flag("use_sliding_window", False):
        return None
    if family.gemma:
        return config.positive_int(key)
    if family.default_window and key not in config.values:
        return family.default_window
    return config.positive_int(key) if family.windows != "none" and key in config else None


def _sliding_layers(config: ConfigFields, family: Family, layers: int) -> list[bool]:
    """For each layer, whether the window applies to it, if there is one."""
    if family.windows in ("upper", "alternating") and "layer_types" in config:
        return _configured_sliding_layers(config, layers)
    match family.windows:
        case "upper":
            first = config.values.get("max_window_layers", 28)
            if isinstance(first, bool) or not isinstance(first, int) or first < 0:
                raise config.invalid_value("max_window_layers", "a number of layers")
            return [index >= first for index in range(layers)]
        case "alternating":
            every, key = family.full_attention_every, "sliding_window_pattern"
            if family.architecture == "Gemma3ForCausalLM":
                every = config.positive_int(key if key in config else f"_{key}", every)
            return [bool((index + 1) % every) for index in range(layers)]
    return [family.windows == "all"] * layers


def _configured_sliding_layers(config: ConfigFields, layers: int) -> list[bool]:
    kinds = config.strings("layer_types")
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise config.load_error(f"layer_types has {min(unknown)}, which is not supported")
    if len(kinds) != layers:
        raise config.load_error(
            f"layer_types has {len(kinds)} values, num_hidden_layers is {layers}"
        )
    return [kind == "sliding_attention" for kind in kinds]


def _moe(config: ConfigFields, family: Family) -> MoeConfig | None:
    match family.architecture:
        case "MixtralForCausalLM":
            return MoeConfig(
                num_experts=config.positive_int("num_local_experts"),
                top_k=config.positive_int("num_experts_per_tok"),
                intermediate_size=config.positive_int("intermediate_size"),
                normalize_topk=True,
            )
        case "Qwen3MoeForCausalLM":
            if (
                config.values.get("mlp_only_layers")
                or config.positive_int("decoder_sparse_step", 1) != 1
            ):
                raise config.load_error("layers without experts are not supported")
            key = "num_experts" if "num_experts" in config else "num_local_experts"
            return MoeConfig(
                num_experts=config.positive_int(key),
                top_k=config.positive_int("num_experts_per_tok"),
                intermediate_size=config.positive_int("moe_intermediate_size"),
                normalize_topk=config.flag("norm_topk_prob", False),
            )
    return None


def shape_from_hf_config(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of any model, supported or not; None if its config.json says too little.

    Fields that are missing or invalid count as 0, except those without which there is no shape.
    """
    # multimodal models keep the fields of their text model one level down
    text = _object(config, "text_config") or config
    layers, hidden, heads = (
        _count(text, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    if not 0 < layers <= MAX_LAYERS or not hidden or not heads:
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


def _context_length(config: Mapping[str, Any]) -> int:
    length = _count(config, "max_position_embeddings")
    scaling = _object(config, "rope_scaling") or _object(config, "rope_parameters")
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor", 1)
    if kind != "yarn" or not isinstance(factor, int | float) or not 0 < factor < 1e9:
        return length
    trained = _count(scaling, "original_max_position_embeddings") or length
    return yarn_max_len(length, factor, trained)


def _layer_cache(
    config: Mapping[str, Any], window: int | None, hidden: int, heads: int
) -> LayerCacheShape:
    latent = _count(config, "kv_lora_rank")
    if latent:  # latent attention: one key for all heads, from which values are computed
        return LayerCacheShape(1, latent + _count(config, "qk_rope_head_dim"), 0, window)
    head_dim = _count(config, "head_dim") or hidden // heads
    kv_heads = _count(config, "num_key_value_heads") or heads
    return LayerCacheShape(kv_heads, head_dim, head_dim, window)


def _layer_windows(config: Mapping[str, Any], layers: int) -> list[int | None]:
    """Window of each layer; None: full attention; _RECURRENT: the layer has no KV cache."""
    family = BY_MODEL_TYPE.get(str(config.get("model_type")), _UNKNOWN_FAMILY)
    flag = bool(config.get("use_sliding_window"))
    window = _count(config, "sliding_window") or None
    if family.window_needs_flag and not flag:
        window = None
    elif family.windows == "all" and "sliding_window" not in config:
        window = family.default_window or None
    listed = config.get("layer_types")
    if isinstance(listed, list) and len(listed) == layers:
        kinds = {"sliding_attention": window, "linear_attention": _RECURRENT}
        return [kinds.get(str(kind)) for kind in listed]
    every = _count(config, "sliding_window_pattern") or family.full_attention_every
    first = _count(config, "max_window_layers") if flag else 0
    return [
        window if layer >= first and (not every or (layer + 1) % every) else None
        for layer in range(layers)
    ]


def _count(config: Mapping[str, Any], key: str) -> int:
    found = config.get(key)
    return found if isinstance(found, int) and 0 < found < 1 << 31 else 0


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}
