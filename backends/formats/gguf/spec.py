"""What a model is, read from the metadata and the tensor names of a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.model_spec import ModelSpec, MoeConfig
from localgen.backends.formats.architecture.rope import Rope, YarnScaling
from localgen.backends.formats.gguf.file import GgufFile
from localgen.backends.formats.gguf.rope import read_gguf_rope

_MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _GgufFamily:
    """What the name of an architecture says.

    default_window: of the layers that have one, where the file does not say; 0: none.
    full_attention_every: one layer in so many has no window; 0: all have one.
    layers_scaled_by_hidden: layers of the size whose queries are scaled by hidden / heads instead
    of head_dim.
    """

    hf_name: str
    gemma: bool = False
    qk_norm: bool = False
    fused_projections: bool = False
    has_windows: bool = False
    default_window: int = 0
    full_attention_every: int = 0
    layers_scaled_by_hidden: int = 0


_FAMILIES = {
    "llama": _GgufFamily(hf_name="LlamaForCausalLM"),
    "qwen2": _GgufFamily(hf_name="Qwen2ForCausalLM"),
    "qwen3": _GgufFamily(hf_name="Qwen3ForCausalLM", qk_norm=True),
    "qwen3moe": _GgufFamily(hf_name="Qwen3MoeForCausalLM", qk_norm=True),
    "gemma2": _GgufFamily(
        hf_name="Gemma2ForCausalLM",
        gemma=True,
        has_windows=True,
        default_window=4096,
        full_attention_every=2,
        layers_scaled_by_hidden=46,
    ),
    "gemma3": _GgufFamily(
        hf_name="Gemma3ForCausalLM",
        gemma=True,
        qk_norm=True,
        has_windows=True,
        full_attention_every=6,
        layers_scaled_by_hidden=62,
    ),
    "phi3": _GgufFamily(hf_name="Phi3ForCausalLM", fused_projections=True, has_windows=True),
}


def read_gguf_architecture(file: GgufFile) -> str:
    """GGUF's name of the model's architecture. LoadFailed: it has none, or no supported one."""
    general = file.section("general.")
    name = general.string("architecture")
    if name not in _FAMILIES:
        raise general.load_error(
            f"architecture {name!r} is not supported, only {', '.join(_FAMILIES)} "
            "(llama: Mistral and Mixtral too)"
        )
    return name


def read_gguf_spec(file: GgufFile) -> ModelSpec:
    """The model of a GGUF file.

    LoadFailed: a value is missing or wrong, or the model is of a kind that cannot be run; the
    message names the file and the key.
    """
    name = read_gguf_architecture(file)
    family, config = _FAMILIES[name], file.section(f"{name}.")
    heads, hidden = (
        config.positive_int("attention.head_count"),
        config.positive_int("embedding_length"),
    )
    head_dim = config.positive_int("attention.key_length", hidden // heads or None)
    layers = config.positive_int("block_count", max_value=_MAX_LAYERS)
    rope = read_gguf_rope(file, config, head_dim=head_dim)
    moe = _moe(config, name)
    spec = ModelSpec(
        architecture="MixtralForCausalLM" if moe and name == "llama" else family.hf_name,
        num_layers=layers,
        hidden_size=hidden,
        # where all layers have experts, some files do not say
        intermediate_size=config.positive_int(
            "feed_forward_length", moe.intermediate_size if moe else None
        ),
        num_heads=heads,
        num_kv_heads=config.positive_int("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=file.shape("token_embd.weight")[0],
        max_len=_max_len(config, rope),
        norm_eps=config.positive_float("attention.layer_norm_rms_epsilon"),
        norm_offset=family.gemma,
        sandwich_norms=family.gemma,
        qk_norm=family.qk_norm,
        qkv_bias="blk.0.attn_q.bias" in file or "blk.0.attn_qkv.bias" in file,
        out_bias="blk.0.attn_output.bias" in file,
        mlp_bias="blk.0.ffn_up.bias" in file,
        activation="gelu_tanh" if family.gemma else "silu",
        rope=rope,
        local_rope=_local_rope(config, name, rope),
        sliding_windows=_sliding_windows(config, family, layers),
        attn_scale=(hidden // heads if layers == family.layers_scaled_by_hidden else head_dim)
        ** -0.5,
        attn_softcap=config.positive_float("attn_logit_softcapping", 50.0)
        if name == "gemma2"
        else None,
        logit_softcap=_logit_softcap(config, name),
        embed_scale=hidden**0.5 if family.gemma else 1.0,
        tied_embeddings="output.weight" not in file,
        fused_projections=family.fused_projections,
        moe=moe,
        quant=None,
    )
    _check_spec(config, spec)
    return spec


def _check_spec(config: ConfigFields, spec: ModelSpec) -> None:
    """LoadFailed: values that are right each by itself, but not together or not for us."""
    if config.positive_int("attention.value_length", spec.head_dim) != spec.head_dim:
        raise config.invalid_value("attention.value_length", f"{spec.head_dim}, the length of keys")
    if spec.num_heads % spec.num_kv_heads:
        raise config.load_error(
            f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads "
            "evenly"
        )
    if spec.moe is not None and spec.moe.top_k > spec.moe.num_experts:
        raise config.invalid_value(
            "expert_used_count", f"up to {spec.moe.num_experts}, the number of experts"
        )
    if not config.flag("attention.causal", True):
        raise config.load_error("attention that looks ahead is not supported: this is an encoder")


def _moe(config: ConfigFields, name: str) -> MoeConfig | None:
    if name != "qwen3moe" and not config.values.get("expert_count"):
        return None
    if name not in ("llama", "qwen3moe"):
        raise config.load_error(f"{name} with experts is not supported")
    top_k = config.positive_int("expert_used_count")
    if "expert_feed_forward_length" in config:
        intermediate = config.positive_int("expert_feed_forward_length")
    else:
        intermediate = config.positive_int("feed_forward_length") // (
            1 if name == "llama" else top_k
        )
    # every known checkpoint of these two has its shares made to sum to 1
    return MoeConfig(
        num_experts=config.positive_int("expert_count"),
        top_k=top_k,
        intermediate_size=intermediate,
        normalize_topk=True,
    )


def _max_len(config: ConfigFields, rope: Rope) -> int:
    length = config.positive_int("context_length")
    if isinstance(rope.scaling, YarnScaling):
        # as in config.json, YaRN may be asked for without raising the length that it gives
        return max(length, int(rope.scaling.factor * rope.scaling.trained_len))
    return length


def _local_rope(config: ConfigFields, name: str, rope: Rope) -> Rope | None:
    if name != "gemma3":
        return None
    return Rope(config.positive_float("rope.freq_base_swa", 10000.0), rope.dim)


def _logit_softcap(config: ConfigFields, name: str) -> float | None:
    key = "final_logit_softcapping"
    if name == "gemma2":
        return config.positive_float(key, 30.0)
    return config.positive_float(key) if name == "gemma3" and config.values.get(key) else None


def _sliding_windows(
    config: ConfigFields, family: _GgufFamily, layers: int
) -> tuple[int | None, ...]:
    key = "attention.sliding_window"
    given = config.values.get(key, family.default_window)
    if not family.has_windows or given == 0:
        return (None,) * layers
    window = config.positive_int(key, family.default_window or None)
    key = f"{key}_pattern"
    pattern = config.values.get(key)
    if isinstance(pattern, list):
        if len(pattern) < layers or not all(slides in (0, 1) for slides in pattern):
            raise config.invalid_value(key, f"true or false for each of {layers} layers")
        return tuple(window if slides else None for slides in pattern[:layers])
    every = config.positive_int(key) if pattern else family.full_attention_every
    return tuple(window if not every or (i + 1) % every else None for i in range(layers))
