"""ModelSpec from the metadata and the tensor names of a GGUF file."""

from __future__ import annotations

from localgen.backends.formats.architecture.families import BY_GGUF_NAME, Family
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.model_spec import (
    MAX_LAYERS,
    ModelSpec,
    MoeConfig,
    check_head_counts,
    check_num_experts,
)
from localgen.backends.formats.gguf.file import GgufFile
from localgen.backends.formats.gguf.rope import read_gguf_rope, read_local_rope


def read_gguf_architecture(file: GgufFile) -> str:
    """Return GGUF's name of the architecture. Raises LoadFailed if it is not supported."""
    general = file.section("general.")
    name = general.string("architecture")
    if name not in BY_GGUF_NAME:
        raise general.load_error(
            f"architecture {name!r} is not supported, only {', '.join(BY_GGUF_NAME)} "
            "(llama: Mistral and Mixtral too)"
        )
    return name


def read_gguf_spec(file: GgufFile) -> ModelSpec:
    """Return the model described by a GGUF file.

    Raises LoadFailed, naming the file and the key, if a value is missing or invalid, or if the
    model is not supported.
    """
    name = read_gguf_architecture(file)
    family, config = BY_GGUF_NAME[name], file.section(f"{name}.")
    heads, hidden = (
        config.positive_int("attention.head_count"),
        config.positive_int("embedding_length"),
    )
    head_dim = config.positive_int("attention.key_length", hidden // heads or None)
    layers = config.positive_int("block_count", max_value=MAX_LAYERS)
    rope = read_gguf_rope(file, config, head_dim=head_dim)
    moe = _moe(config, name)
    spec = ModelSpec(
        architecture="MixtralForCausalLM" if moe and name == "llama" else family.architecture,
        num_layers=layers,
        hidden_size=hidden,
        # some files of models with experts in all layers lack it
        intermediate_size=config.positive_int(
            "feed_forward_length", moe.intermediate_size if moe else None
        ),
        num_heads=heads,
        num_kv_heads=config.positive_int("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=file.shape("token_embd.weight")[0],
        max_len=rope.max_len(config.positive_int("context_length")),
        norm_eps=config.positive_float("attention.layer_norm_rms_epsilon"),
        norm_offset=family.gemma,
        sandwich_norms=family.gemma,
        qk_norm=family.qk_norm,
        qkv_bias="blk.0.attn_q.bias" in file or "blk.0.attn_qkv.bias" in file,
        out_bias="blk.0.attn_output.bias" in file,
        mlp_bias="blk.0.ffn_up.bias" in file,
        activation="gelu_tanh" if family.gemma else "silu",
        rope=rope,
        local_rope=read_local_rope(config, family, rope),
        sliding_windows=_sliding_windows(config, family, layers),
        attn_scale=(hidden // heads if layers == family.layers_scaled_by_hidden else head_dim)
        ** -0.5,
        attn_softcap=config.positive_float("attn_logit_softcapping", family.attn_softcap)
        if family.attn_softcap
        else None,
        logit_softcap=_logit_softcap(config, family),
        embed_scale=hidden**0.5 if family.gemma else 1.0,
        tied_embeddings="output.weight" not in file,
        fused_projections=family.fused_projections,
        moe=moe,
        quant=None,
    )
    _check_spec(config, spec)
    return spec


def _check_spec(config: ConfigFields, spec: ModelSpec) -> None:
    """Raise LoadFailed if values contradict each other or are not supported."""
    if config.positive_int("attention.value_length", spec.head_dim) != spec.head_dim:
        raise config.invalid_value("attention.value_length", f"{spec.head_dim}, the length of keys")
    check_head_counts(config, spec)
    check_num_experts(config, spec)
    if spec.moe is not None and spec.moe.top_k > spec.moe.num_experts:
        raise config.invalid_value(
            "expert_used_count", f"up to {spec.moe.num_experts}, the number of experts"
        )
    if not config.flag("attention.causal", True):
        raise config.load_error("bidirectional attention is not supported: this is an encoder")


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
    # true for all known checkpoints of both architectures
    return MoeConfig(
        num_experts=config.positive_int("expert_count"),
        top_k=top_k,
        intermediate_size=intermediate,
        normalize_topk=True,
    )


def _logit_softcap(config: ConfigFields, family: Family) -> float | None:
    key = "final_logit_softcapping"
    if family.logit_softcap:
        return config.positive_float(key, family.logit_softcap)
    return config.positive_float(key) if family.gemma and config.values.get(key) else None


def _sliding_windows(config: ConfigFields, family: Family, layers: int) -> tuple[int | None, ...]:
    key = "attention.sliding_window"
    given = config.values.get(key, family.default_window)
    if not family.gguf_windows or given == 0:
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
