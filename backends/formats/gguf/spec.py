"""What a model is, read from the metadata and the tensor names of a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.formats.architecture.fields import Fields
from localgen.backends.formats.architecture.model_spec import ModelSpec, Moe
from localgen.backends.formats.architecture.rope import Rope, YarnScaling
from localgen.backends.formats.gguf.file import GgufFile
from localgen.backends.formats.gguf.rope import read_gguf_rope

_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What the name of an architecture says.

    window: of the layers that have one, where the file does not say; 0: none. every: one layer
    in so many has no window; 0: all have one. big: layers of the size whose queries are scaled
    by hidden / heads instead of head_dim.
    """

    hf_name: str
    gemma: bool = False
    qk_norm: bool = False
    fused: bool = False
    windows: bool = False
    window: int = 0
    every: int = 0
    big: int = 0


_FAMILIES = {
    "llama": _Family(hf_name="LlamaForCausalLM"),
    "qwen2": _Family(hf_name="Qwen2ForCausalLM"),
    "qwen3": _Family(hf_name="Qwen3ForCausalLM", qk_norm=True),
    "qwen3moe": _Family(hf_name="Qwen3MoeForCausalLM", qk_norm=True),
    "gemma2": _Family(
        hf_name="Gemma2ForCausalLM", gemma=True, windows=True, window=4096, every=2, big=46
    ),
    "gemma3": _Family(
        hf_name="Gemma3ForCausalLM", gemma=True, qk_norm=True, windows=True, every=6, big=62
    ),
    "phi3": _Family(hf_name="Phi3ForCausalLM", fused=True, windows=True),
}


def architecture(file: GgufFile) -> str:
    """GGUF's name of the model's architecture. LoadFailed: it has none, or no supported one."""
    general = file.section("general.")
    name = general.text("architecture")
    if name not in _FAMILIES:
        raise general.refusal(
            f"architecture {name!r} is not supported, only {', '.join(_FAMILIES)} "
            "(llama: Mistral and Mixtral too)"
        )
    return name


def read_gguf_spec(file: GgufFile) -> ModelSpec:
    """The model of a GGUF file.

    LoadFailed: a value is missing or wrong, or the model is of a kind that cannot be run; the
    message names the file and the key.
    """
    name = architecture(file)
    family, config = _FAMILIES[name], file.section(f"{name}.")
    heads, hidden = config.count("attention.head_count"), config.count("embedding_length")
    head_dim = config.count("attention.key_length", hidden // heads or None)
    layers = config.count("block_count", most=_MOST_LAYERS)
    rope = read_gguf_rope(file, config, head_dim=head_dim)
    moe = _moe(config, name)
    spec = ModelSpec(
        architecture="MixtralForCausalLM" if moe and name == "llama" else family.hf_name,
        layers=layers,
        hidden=hidden,
        # where all layers have experts, some files do not say
        intermediate=config.count("feed_forward_length", moe.intermediate if moe else None),
        heads=heads,
        kv_heads=config.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab=file.shape("token_embd.weight")[0],
        max_len=_max_len(config, rope),
        norm_eps=config.number("attention.layer_norm_rms_epsilon"),
        norm_offset=family.gemma,
        sandwich_norms=family.gemma,
        qk_norm=family.qk_norm,
        qkv_bias="blk.0.attn_q.bias" in file or "blk.0.attn_qkv.bias" in file,
        out_bias="blk.0.attn_output.bias" in file,
        mlp_bias="blk.0.ffn_up.bias" in file,
        activation="gelu_tanh" if family.gemma else "silu",
        rope=rope,
        local_rope=_local_rope(config, name, rope),
        windows=_windows(config, family, layers),
        attn_scale=(hidden // heads if layers == family.big else head_dim) ** -0.5,
        attn_softcap=config.number("attn_logit_softcapping", 50.0) if name == "gemma2" else None,
        logit_softcap=_logit_softcap(config, name),
        embed_scale=hidden**0.5 if family.gemma else 1.0,
        tied="output.weight" not in file,
        fused=family.fused,
        moe=moe,
        quant=None,
    )
    _check(config, spec)
    return spec


def _check(config: Fields, spec: ModelSpec) -> None:
    """LoadFailed: values that are right each by itself, but not together or not for us."""
    if config.count("attention.value_length", spec.head_dim) != spec.head_dim:
        raise config.wrong("attention.value_length", f"{spec.head_dim}, the length of keys")
    if spec.heads % spec.kv_heads:
        raise config.refusal(
            f"{spec.heads} attention heads cannot share {spec.kv_heads} key-value heads evenly"
        )
    if spec.moe is not None and spec.moe.top_k > spec.moe.experts:
        raise config.wrong("expert_used_count", f"up to {spec.moe.experts}, the number of experts")
    if not config.flag("attention.causal", True):
        raise config.refusal("attention that looks ahead is not supported: this is an encoder")


def _moe(config: Fields, name: str) -> Moe | None:
    if name != "qwen3moe" and not config.values.get("expert_count"):
        return None
    if name not in ("llama", "qwen3moe"):
        raise config.refusal(f"{name} with experts is not supported")
    top_k = config.count("expert_used_count")
    if "expert_feed_forward_length" in config:
        intermediate = config.count("expert_feed_forward_length")
    else:
        intermediate = config.count("feed_forward_length") // (1 if name == "llama" else top_k)
    # every known checkpoint of these two has its shares made to sum to 1
    return Moe(
        experts=config.count("expert_count"),
        top_k=top_k,
        intermediate=intermediate,
        normalize=True,
    )


def _max_len(config: Fields, rope: Rope) -> int:
    length = config.count("context_length")
    if isinstance(rope.scaling, YarnScaling):
        # as in config.json, YaRN may be asked for without raising the length that it gives
        return max(length, int(rope.scaling.factor * rope.scaling.trained_len))
    return length


def _local_rope(config: Fields, name: str, rope: Rope) -> Rope | None:
    if name != "gemma3":
        return None
    return Rope(config.number("rope.freq_base_swa", 10000.0), rope.dim)


def _logit_softcap(config: Fields, name: str) -> float | None:
    key = "final_logit_softcapping"
    if name == "gemma2":
        return config.number(key, 30.0)
    return config.number(key) if name == "gemma3" and config.values.get(key) else None


def _windows(config: Fields, family: _Family, layers: int) -> tuple[int | None, ...]:
    key = "attention.sliding_window"
    given = config.values.get(key, family.window)
    if not family.windows or given == 0:
        return (None,) * layers
    window = config.count(key, family.window or None)
    key = f"{key}_pattern"
    pattern = config.values.get(key)
    if isinstance(pattern, list):
        if len(pattern) < layers or not all(slides in (0, 1) for slides in pattern):
            raise config.wrong(key, f"true or false for each of {layers} layers")
        return tuple(window if slides else None for slides in pattern[:layers])
    every = config.count(key) if pattern else family.every
    return tuple(window if not every or (i + 1) % every else None for i in range(layers))
