"""config.json of a Hugging Face folder, read as a ModelSpec to run, or as a ModelShape to plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localgen.backends.formats.architecture.families import (
    BY_MODEL_TYPE,
    FAMILIES,
    UNSUPPORTED,
    WITH_IMAGES,
    Family,
)
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
from localgen.backends.formats.architecture.rope import yarn_max_len
from localgen.backends.formats.hf.layers import (
    read_layers_without_rope,
    read_query_scaling,
    read_ropes,
    read_sliding_windows,
)
from localgen.backends.formats.hf.quantization_config import read_quantization_config
from localgen.backends.formats.hf.text_part import (
    is_text_part,
    read_text_config,
    stores_head,
    with_defaults,
)

_UNKNOWN_FAMILY = Family("", "", ())
_RECURRENT = -1


def read_hf_config(folder: Path) -> ModelSpec:
    """Return the model described by the config.json of a Hugging Face folder.

    Raises LoadFailed, naming the file and the field, if one is missing or invalid, or if the model
    is not supported.
    """
    whole = ConfigFields.from_file(folder / "config.json")
    text_only = is_text_part(whole.values)
    config = read_text_config(whole) if text_only else whole
    family = _family(whole, config)
    heads, hidden = config.positive_int("num_attention_heads"), config.positive_int("hidden_size")
    head_dim = config.positive_int(
        "head_dim", None if family.requires_head_dim else hidden // heads or None
    )
    rope, local_rope = read_ropes(config, family, head_dim)
    layers = config.positive_int("num_hidden_layers", max_value=MAX_LAYERS)
    windows = read_sliding_windows(config, family, layers)
    biases = family.bias_keys
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
        qkv_bias=_has_bias(config, biases.qkv, family.qkv_bias),
        out_bias=_has_bias(config, biases.out),
        mlp_bias=_has_bias(config, biases.mlp),
        activation=_activation(config, family),
        rope=rope,
        local_rope=local_rope,
        sliding_windows=windows,
        attn_scale=_attention_scale(config, family, head_dim),
        attn_softcap=_softcap(config, family, "attn_logit_softcapping", family.attn_softcap),
        logit_softcap=_logit_softcap(config, family, text_only),
        embed_scale=_embed_scale(config, family, hidden),
        tied_embeddings=_is_tied(config, family, folder if text_only else None),
        fused_projections=family.fused_projections,
        moe=_moe(config, family),
        quant=read_quantization_config(whole),
        layers_without_rope=read_layers_without_rope(config, family, windows),
        wide_qk_norm=family.wide_qk_norm,
        interleaved_rope=family.interleaved_rope,
        text_only=text_only,
        query_scaling=read_query_scaling(config, family),
        residual_scale=_multiplier(config, family, "residual_multiplier"),
        logit_divisor=_multiplier(config, family, "logits_scaling"),
    )
    _check_spec(config, spec)
    return spec


def _family(whole: ConfigFields, config: ConfigFields) -> Family:
    """The family of a config.json. config: of its text part, or the same."""
    name = (whole.strings("architectures") or ("none",))[0]
    if name not in FAMILIES and name not in WITH_IMAGES:
        known = ", ".join(family.removesuffix("ForCausalLM") for family in FAMILIES)
        parts = " and ".join(each.removesuffix("ForConditionalGeneration") for each in WITH_IMAGES)
        lacking = f" ({UNSUPPORTED[name]})" if name in UNSUPPORTED else ""
        raise whole.load_error(
            f"architecture {name} is not supported{lacking}, only {known} (each …ForCausalLM) and "
            f"the text of {parts} (…ForConditionalGeneration)"
        )
    kinds = WITH_IMAGES.get(name) or FAMILIES[name].model_types
    kind = config.string("model_type", kinds[0])
    if kind not in kinds:
        raise config.load_error(f"{config.prefix}model_type {kind} is not supported in {name}")
    return BY_MODEL_TYPE[kind] if name in WITH_IMAGES else FAMILIES[name]


def _is_tied(config: ConfigFields, family: Family, text_of: Path | None) -> bool:
    """Return True if the output head shares the weights of the embedding.

    text_of: folder of a model that also takes images; the tensors in it decide, because its
    config.json may lack the field.
    """
    stored = None if text_of is None else stores_head(text_of)
    return config.flag("tie_word_embeddings", family.tied) if stored is None else not stored


def _has_bias(config: ConfigFields, key: str, default: bool = False) -> bool:
    return config.flag(key, default) if key else default


def _attention_scale(config: ConfigFields, family: Family, head_dim: int) -> float:
    if family.multipliers:
        return _multiplier(config, family, "attention_multiplier")
    width = config.positive_float("query_pre_attn_scalar") if family.gemma else head_dim
    return float(width**-0.5)


def _multiplier(config: ConfigFields, family: Family, key: str) -> float:
    return config.positive_float(key, 1.0) if family.multipliers else 1.0


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


def _embed_scale(config: ConfigFields, family: Family, hidden: int) -> float:
    return hidden**0.5 if family.gemma else _multiplier(config, family, "embedding_multiplier")


def _logit_softcap(config: ConfigFields, family: Family, text_only: bool) -> float | None:
    if text_only:  # models with images do not apply it
        return None
    return _softcap(config, family, "final_logit_softcapping", family.logit_softcap)


def _softcap(config: ConfigFields, family: Family, key: str, default: float | None) -> float | None:
    if not family.gemma:
        return None
    if key not in config.values:
        return default
    return config.positive_float(key) if key in config else None  # null disables it


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
    text = _object(config, "text_config")
    text = with_defaults(text) if text else config
    layers, hidden, heads = (
        _count(text, key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    if not 0 < layers <= MAX_LAYERS or not hidden or not heads:
        return None
    experts = _count(text, "num_experts") or _count(text, "num_local_experts")
    used = _count(text, "num_experts_per_tok") if experts else 0
    wide = _count(text, "intermediate_size")
    quantization = _object(config, "quantization_config")
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
        has_int4_weights=4 in (_count(quantization, "bits"), _count(quantization, "w_bit")),
    )


def _context_length(config: Mapping[str, Any]) -> int:
    length = _count(config, "max_position_embeddings")
    scaling = _object(config, "rope_scaling") or _object(config, "rope_parameters")
    scaling = _object(scaling, "full_attention") or scaling
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
    """Window of each layer, None for full attention, _RECURRENT for a layer without KV cache."""
    family = BY_MODEL_TYPE.get(str(config.get("model_type")), _UNKNOWN_FAMILY)
    flag = bool(config.get("use_sliding_window"))
    window = _count(config, "sliding_window") or None
    if family.window_needs_flag and not flag:
        window = None
    elif family.default_window and "sliding_window" not in config:
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
