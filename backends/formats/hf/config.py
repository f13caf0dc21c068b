"""config.json of a Hugging Face folder, read as a ModelSpec."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.model_spec import Activation, ModelSpec, MoeConfig
from localgen.backends.formats.architecture.rope import Rope, YarnScaling, parse_rope, read_rope
from localgen.backends.formats.hf.quantization_config import read_quantization_config

_MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _HfFamily:
    """What the name of an architecture says. window_layers: which layers have one by default.

    upper: those from max_window_layers on; alternating: all but each n-th.
    """

    window_layers: Literal["none", "all", "upper", "alternating"] = "none"
    gemma: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    allows_attention_bias: bool = False  # whether config.json may ask for biases in attention
    allows_mlp_bias: bool = False  # whether it may in the MLP
    requires_head_dim: bool = False  # whether it must have head_dim
    fused_projections: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _HfFamily(allows_attention_bias=True, allows_mlp_bias=True),
    "MistralForCausalLM": _HfFamily(window_layers="all"),
    "Qwen2ForCausalLM": _HfFamily(window_layers="upper", qkv_bias=True),
    "Qwen3ForCausalLM": _HfFamily(
        window_layers="upper", qk_norm=True, allows_attention_bias=True, requires_head_dim=True
    ),
    "Gemma2ForCausalLM": _HfFamily(
        window_layers="alternating", gemma=True, allows_attention_bias=True, requires_head_dim=True
    ),
    "Gemma3ForCausalLM": _HfFamily(
        window_layers="alternating",
        gemma=True,
        qk_norm=True,
        allows_attention_bias=True,
        requires_head_dim=True,
    ),
    "Phi3ForCausalLM": _HfFamily(window_layers="all", fused_projections=True),
    "MixtralForCausalLM": _HfFamily(window_layers="all"),
    "Qwen3MoeForCausalLM": _HfFamily(window_layers="all", qk_norm=True, allows_attention_bias=True),
}


def read_hf_config(folder: Path) -> ModelSpec:
    """The model that the config.json of a Hugging Face folder describes.

    LoadFailed: the file or a field is missing or wrong, or the model is of a kind that cannot
    be run; the message names the file and the field.
    """
    config = ConfigFields.from_file(folder / "config.json")
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    heads, hidden = config.positive_int("num_attention_heads"), config.positive_int("hidden_size")
    head_dim = config.positive_int(
        "head_dim", None if family.requires_head_dim else hidden // heads or None
    )
    rope, local_rope = _ropes(config, architecture, head_dim)
    layers = config.positive_int("num_hidden_layers", max_value=_MAX_LAYERS)
    attention_bias = family.allows_attention_bias and config.flag("attention_bias", False)
    spec = ModelSpec(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=config.positive_int("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.positive_int("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=config.positive_int("vocab_size"),
        max_len=_max_len(config, rope),
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
        sliding_windows=_sliding_windows(config, architecture, layers),
        attn_scale=(config.positive_float("query_pre_attn_scalar") if family.gemma else head_dim)
        ** -0.5,
        attn_softcap=_softcap(config, architecture, "attn_logit_softcapping"),
        logit_softcap=_softcap(config, architecture, "final_logit_softcapping"),
        embed_scale=hidden**0.5 if family.gemma else 1.0,
        tied_embeddings=config.flag("tie_word_embeddings", family.gemma),
        fused_projections=family.fused_projections,
        moe=_moe(config, architecture),
        quant=read_quantization_config(config),
    )
    _check_spec(config, spec)
    return spec


def _architecture(config: ConfigFields) -> str:
    name = (config.strings("architectures") or ("none",))[0]
    if name not in _FAMILIES:
        known = ", ".join(family.removesuffix("ForCausalLM") for family in _FAMILIES)
        raise config.load_error(
            f"architecture {name} is not supported, only {known} (each …ForCausalLM)"
        )
    return name


def _check_spec(config: ConfigFields, spec: ModelSpec) -> None:
    """LoadFailed: values that are right each by itself, but not together."""
    if spec.num_heads % spec.num_kv_heads:
        raise config.load_error(
            f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads "
            "evenly"
        )
    if spec.moe is not None and spec.moe.top_k > spec.moe.num_experts:
        raise config.load_error(
            f"num_experts_per_tok is {spec.moe.top_k}, there are {spec.moe.num_experts} experts"
        )
    # EmbeddingGemma: an encoder under the decoder's name
    if config.flag("use_bidirectional_attention", False):
        raise config.load_error("use_bidirectional_attention is not supported: this is an encoder")


def _activation(config: ConfigFields, family: _HfFamily) -> Activation:
    # Gemma 2 files have hidden_act too, and it is the other one that counts
    key = "hidden_activation" if family.gemma else "hidden_act"
    name = config.string(key, "gelu_pytorch_tanh" if family.gemma else "silu")
    match name:
        case "silu":
            return "silu"
        case "gelu_pytorch_tanh":
            return "gelu_tanh"
    raise config.invalid_value(key, "silu or gelu_pytorch_tanh")


def _softcap(config: ConfigFields, architecture: str, key: str) -> float | None:
    if not _FAMILIES[architecture].gemma:
        return None
    # null is none; not to say anything is Gemma 2's own
    if architecture == "Gemma2ForCausalLM" and key not in config.values:
        return {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}[key]
    return config.positive_float(key) if key in config else None


def _ropes(config: ConfigFields, architecture: str, head_dim: int) -> tuple[Rope, Rope | None]:
    """For layers that see everything, and for those with a window if theirs differs."""
    if architecture != "Gemma3ForCausalLM":
        # the first Llama files have no rope_theta
        theta = 10000.0 if architecture == "LlamaForCausalLM" else None
        return read_rope(config, head_dim=head_dim, theta=theta), None
    both = config.section("rope_parameters")
    if both is not None and "full_attention" in both:
        full, sliding = both.section("full_attention"), both.section("sliding_attention")
        if sliding is None:
            raise config.load_error("rope_parameters has full_attention but no sliding_attention")
        local = parse_rope(config, sliding, head_dim=head_dim)
        return parse_rope(config, full, head_dim=head_dim), local
    local = Rope(config.positive_float("rope_local_base_freq", 10000.0), head_dim)
    return read_rope(config, head_dim=head_dim), local


def _max_len(config: ConfigFields, rope: Rope) -> int:
    length = config.positive_int("max_position_embeddings")
    if isinstance(rope.scaling, YarnScaling):
        # Qwen's files ask for YaRN without raising the length that it gives
        return max(length, int(rope.scaling.factor * rope.scaling.trained_len))
    return length


def _sliding_windows(
    config: ConfigFields, architecture: str, layers: int
) -> tuple[int | None, ...]:
    window, kinds = (
        _sliding_window(config, architecture),
        _layer_types(config, architecture, layers),
    )
    if window is None:
        return (None,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _sliding_window(config: ConfigFields, architecture: str) -> int | None:
    if architecture.startswith("Qwen") and not config.flag("use_sliding_window", False):
        return None
    if _FAMILIES[architecture].gemma:
        return config.positive_int("sliding_window")
    if architecture == "MistralForCausalLM" and "sliding_window" not in config.values:
        return 4096  # the first Mistral's, null in later files
    if _FAMILIES[architecture].window_layers == "none" or "sliding_window" not in config:
        return None
    return config.positive_int("sliding_window")


def _layer_types(config: ConfigFields, architecture: str, layers: int) -> tuple[str, ...]:
    """sliding_attention or full_attention for each layer, as if there was a window."""
    rule = _FAMILIES[architecture].window_layers
    if rule in ("upper", "alternating") and "layer_types" in config:
        return _configured_layer_types(config, layers)
    match rule:
        case "none":
            sliding = [False] * layers
        case "all":
            sliding = [True] * layers
        case "upper":
            first = config.values.get("max_window_layers", 28)
            if isinstance(first, bool) or not isinstance(first, int) or first < 0:
                raise config.invalid_value("max_window_layers", "a number of layers")
            sliding = [index >= first for index in range(layers)]
        case "alternating":
            every = 2
            if architecture == "Gemma3ForCausalLM":
                key = "sliding_window_pattern"
                every = config.positive_int(key if key in config else f"_{key}", 6)
            sliding = [bool((index + 1) % every) for index in range(layers)]
    return tuple("sliding_attention" if slides else "full_attention" for slides in sliding)


def _configured_layer_types(config: ConfigFields, layers: int) -> tuple[str, ...]:
    kinds = config.strings("layer_types")
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise config.load_error(f"layer_types has {min(unknown)}, which is not supported")
    if len(kinds) != layers:
        raise config.load_error(
            f"layer_types has {len(kinds)} values, num_hidden_layers is {layers}"
        )
    return kinds


def _moe(config: ConfigFields, architecture: str) -> MoeConfig | None:
    match architecture:
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
                raise config.load_error(
                    "layers without experts between those with are not supported"
                )
            key = "num_experts" if "num_experts" in config else "num_local_experts"
            return MoeConfig(
                num_experts=config.positive_int(key),
                top_k=config.positive_int("num_experts_per_tok"),
                intermediate_size=config.positive_int("moe_intermediate_size"),
                normalize_topk=config.flag("norm_topk_prob", False),
            )
    return None
