"""config.json of a Hugging Face folder, read as a ModelSpec."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localgen.backends.formats.architecture.fields import Fields
from localgen.backends.formats.architecture.model_spec import Activation, ModelSpec, Moe
from localgen.backends.formats.architecture.rope import Rope, YarnScaling, read_rope, rope_of
from localgen.backends.formats.hf.quantization_config import read_quant

_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What the name of an architecture says. windows: which layers have one by default.

    upper: those from max_window_layers on; alternating: all but each n-th.
    """

    windows: Literal["none", "all", "upper", "alternating"] = "none"
    gemma: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_bias: bool = False  # whether config.json may ask for biases in attention
    mlp_bias: bool = False  # whether it may in the MLP
    head_dim: bool = False  # whether it must have head_dim
    fused: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family(attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": _Family(windows="all"),
    "Qwen2ForCausalLM": _Family(windows="upper", qkv_bias=True),
    "Qwen3ForCausalLM": _Family(windows="upper", qk_norm=True, attention_bias=True, head_dim=True),
    "Gemma2ForCausalLM": _Family(
        windows="alternating", gemma=True, attention_bias=True, head_dim=True
    ),
    "Gemma3ForCausalLM": _Family(
        windows="alternating", gemma=True, qk_norm=True, attention_bias=True, head_dim=True
    ),
    "Phi3ForCausalLM": _Family(windows="all", fused=True),
    "MixtralForCausalLM": _Family(windows="all"),
    "Qwen3MoeForCausalLM": _Family(windows="all", qk_norm=True, attention_bias=True),
}


def read_config(folder: Path) -> ModelSpec:
    """The model that the config.json of a Hugging Face folder describes.

    LoadFailed: the file or a field is missing or wrong, or the model is of a kind that cannot
    be run; the message names the file and the field.
    """
    config = Fields.of_file(folder / "config.json")
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    head_dim = config.count("head_dim", None if family.head_dim else hidden // heads or None)
    rope, local_rope = _ropes(config, architecture, head_dim)
    layers = config.count("num_hidden_layers", most=_MOST_LAYERS)
    attention_bias = family.attention_bias and config.flag("attention_bias", False)
    spec = ModelSpec(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        intermediate=config.count("intermediate_size"),
        heads=heads,
        kv_heads=config.count("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab=config.count("vocab_size"),
        max_len=_max_len(config, rope),
        norm_eps=config.number("rms_norm_eps"),
        norm_offset=family.gemma,
        sandwich_norms=family.gemma,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family.mlp_bias and config.flag("mlp_bias", False),
        activation=_activation(config, family),
        rope=rope,
        local_rope=local_rope,
        windows=_windows(config, architecture, layers),
        attn_scale=(config.number("query_pre_attn_scalar") if family.gemma else head_dim) ** -0.5,
        attn_softcap=_softcap(config, architecture, "attn_logit_softcapping"),
        logit_softcap=_softcap(config, architecture, "final_logit_softcapping"),
        embed_scale=hidden**0.5 if family.gemma else 1.0,
        tied=config.flag("tie_word_embeddings", family.gemma),
        fused=family.fused,
        moe=_moe(config, architecture),
        quant=read_quant(config),
    )
    _check(config, spec)
    return spec


def _architecture(config: Fields) -> str:
    name = (config.texts("architectures") or ("none",))[0]
    if name not in _FAMILIES:
        known = ", ".join(family.removesuffix("ForCausalLM") for family in _FAMILIES)
        raise config.refusal(
            f"architecture {name} is not supported, only {known} (each …ForCausalLM)"
        )
    return name


def _check(config: Fields, spec: ModelSpec) -> None:
    """LoadFailed: values that are right each by itself, but not together."""
    if spec.heads % spec.kv_heads:
        raise config.refusal(
            f"{spec.heads} attention heads cannot share {spec.kv_heads} key-value heads evenly"
        )
    if spec.moe is not None and spec.moe.top_k > spec.moe.experts:
        raise config.refusal(
            f"num_experts_per_tok is {spec.moe.top_k}, there are {spec.moe.experts} experts"
        )
    # EmbeddingGemma: an encoder under the decoder's name
    if config.flag("use_bidirectional_attention", False):
        raise config.refusal("use_bidirectional_attention is not supported: this is an encoder")


def _activation(config: Fields, family: _Family) -> Activation:
    # Gemma 2 files have hidden_act too, and it is the other one that counts
    key = "hidden_activation" if family.gemma else "hidden_act"
    name = config.text(key, "gelu_pytorch_tanh" if family.gemma else "silu")
    match name:
        case "silu":
            return "silu"
        case "gelu_pytorch_tanh":
            return "gelu_tanh"
    raise config.wrong(key, "silu or gelu_pytorch_tanh")


def _softcap(config: Fields, architecture: str, key: str) -> float | None:
    if not _FAMILIES[architecture].gemma:
        return None
    # null is none; not to say anything is Gemma 2's own
    if architecture == "Gemma2ForCausalLM" and key not in config.values:
        return {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}[key]
    return config.number(key) if key in config else None


def _ropes(config: Fields, architecture: str, head_dim: int) -> tuple[Rope, Rope | None]:
    """For layers that see everything, and for those with a window if theirs differs."""
    if architecture != "Gemma3ForCausalLM":
        # the first Llama files have no rope_theta
        theta = 10000.0 if architecture == "LlamaForCausalLM" else None
        return read_rope(config, head_dim=head_dim, theta=theta), None
    both = config.section("rope_parameters")
    if both is not None and "full_attention" in both:
        full, sliding = both.section("full_attention"), both.section("sliding_attention")
        if sliding is None:
            raise config.refusal("rope_parameters has full_attention but no sliding_attention")
        local = rope_of(config, sliding, head_dim=head_dim)
        return rope_of(config, full, head_dim=head_dim), local
    local = Rope(config.number("rope_local_base_freq", 10000.0), head_dim)
    return read_rope(config, head_dim=head_dim), local


def _max_len(config: Fields, rope: Rope) -> int:
    length = config.count("max_position_embeddings")
    if isinstance(rope.scaling, YarnScaling):
        # Qwen's files ask for YaRN without raising the length that it gives
        return max(length, int(rope.scaling.factor * rope.scaling.trained_len))
    return length


def _windows(config: Fields, architecture: str, layers: int) -> tuple[int | None, ...]:
    window, kinds = _window(config, architecture), _layer_kinds(config, architecture, layers)
    if window is None:
        return (None,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(config: Fields, architecture: str) -> int | None:
    if architecture.startswith("Qwen") and not config.flag("use_sliding_window", False):
        return None
    if _FAMILIES[architecture].gemma:
        return config.count("sliding_window")
    if architecture == "MistralForCausalLM" and "sliding_window" not in config.values:
        return 4096  # the first Mistral's, null in later files
    if _FAMILIES[architecture].windows == "none" or "sliding_window" not in config:
        return None
    return config.count("sliding_window")


def _layer_kinds(config: Fields, architecture: str, layers: int) -> tuple[str, ...]:
    """sliding_attention or full_attention for each layer, as if there was a window."""
    rule = _FAMILIES[architecture].windows
    if rule in ("upper", "alternating") and "layer_types" in config:
        return _listed_kinds(config, layers)
    match rule:
        case "none":
            sliding = [False] * layers
        case "all":
            sliding = [True] * layers
        case "upper":
            first = config.values.get("max_window_layers", 28)
            if isinstance(first, bool) or not isinstance(first, int) or first < 0:
                raise config.wrong("max_window_layers", "a number of layers")
            sliding = [index >= first for index in range(layers)]
        case "alternating":
            every = 2
            if architecture == "Gemma3ForCausalLM":
                key = "sliding_window_pattern"
                every = config.count(key if key in config else f"_{key}", 6)
            sliding = [bool((index + 1) % every) for index in range(layers)]
    return tuple("sliding_attention" if slides else "full_attention" for slides in sliding)


def _listed_kinds(config: Fields, layers: int) -> tuple[str, ...]:
    kinds = config.texts("layer_types")
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise config.refusal(f"layer_types has {min(unknown)}, which is not supported")
    if len(kinds) != layers:
        raise config.refusal(f"layer_types has {len(kinds)} values, num_hidden_layers is {layers}")
    return kinds


def _moe(config: Fields, architecture: str) -> Moe | None:
    match architecture:
        case "MixtralForCausalLM":
            return Moe(
                experts=config.count("num_local_experts"),
                top_k=config.count("num_experts_per_tok"),
                intermediate=config.count("intermediate_size"),
                normalize=True,
            )
        case "Qwen3MoeForCausalLM":
            if config.values.get("mlp_only_layers") or config.count("decoder_sparse_step", 1) != 1:
                raise config.refusal("layers without experts between those with are not supported")
            key = "num_experts" if "num_experts" in config else "num_local_experts"
            return Moe(
                experts=config.count(key),
                top_k=config.count("num_experts_per_tok"),
                intermediate=config.count("moe_intermediate_size"),
                normalize=config.flag("norm_topk_prob", False),
            )
    return None
