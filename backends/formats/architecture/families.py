"""Facts of an architecture that config.json and GGUF files imply by its name."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from localgen.backends.formats.architecture.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class BiasKeys:
    """Keys of config.json that enable biases, empty without such a key.

    qkv: of q, k and v. out: of the projection after attention. mlp: of the MLP.
    """

    qkv: str = ""
    out: str = ""
    mlp: str = ""


_NO_BIASES = BiasKeys()
_ATTENTION = BiasKeys("attention_bias", "attention_bias")
_ALL = BiasKeys("attention_bias", "attention_bias", "mlp_bias")


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of one architecture.

    architecture: class name in Hugging Face. gguf_name: architecture in GGUF files; "": neither
    GGUF files nor quantization are supported. model_types: in config.json. gemma: norms multiply by
    1 + weight, norms after attention and MLP, scaled embeddings, GELU.
    qk_norm, wide_qk_norm, interleaved_rope, fused_projections: as in ModelSpec.
    qkv_bias: default of bias_keys.qkv. tied: default of tie_word_embeddings.
    windows: layers with a sliding window; "upper": from max_window_layers on; "alternating": all
    but every full_attention_every-th; "listed": by layer_types only. pattern_in_config:
    sliding_window_pattern replaces full_attention_every. default_window: for files that
    give none, or 0 for no default. window_needs_flag: the window of a config.json applies only with
    use_sliding_window. gguf_windows: GGUF files of this architecture have windows.
    without_rope: layers without positions; "listed": by no_rope_layers; "full": those with full
    attention in a model with windows.
    attn_softcap, logit_softcap, local_rope_theta: defaults for files that give none.
    unscaled_local_rope: layers with a window have RoPE without scaling.
    partial_rotary: default of partial_rotary_factor.
    multipliers: config.json has factors of embeddings, attention, residuals and logits.
    query_scaling: config.json has llama_4_scaling_beta.
    layers_scaled_by_hidden: the model with this many layers scales attention by hidden / heads
    instead of head_dim.
    requires_head_dim: config.json must have head_dim.
    """

    architecture: str
    gguf_name: str
    model_types: tuple[str, ...]
    _: KW_ONLY
    gemma: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    qkv_bias: bool = False
    bias_keys: BiasKeys = _NO_BIASES
    tied: bool = False
    fused_projections: bool = False
    interleaved_rope: bool = False
    windows: Literal["none", "all", "upper", "alternating", "listed"] = "none"
    full_attention_every: int = 0
    pattern_in_config: bool = False
    default_window: int = 0
    window_needs_flag: bool = False
    gguf_windows: bool = False
    without_rope: Literal["none", "listed", "full"] = "none"
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    local_rope_theta: float | None = None
    unscaled_local_rope: bool = False
    partial_rotary: float = 1.0
    multipliers: bool = False
    query_scaling: bool = False
    layers_scaled_by_hidden: int = 0
    requires_head_dim: bool = False


_FAMILIES = (
    Family("LlamaForCausalLM", "llama", ("llama",), bias_keys=_ALL),
    # the first Mistral has a window that its file does not give; later files have null
    Family("MistralForCausalLM", "llama", ("mistral",), windows="all", default_window=4096),
    Family("MixtralForCausalLM", "llama", ("mixtral",), windows="all"),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        ("qwen2",),
        qkv_bias=True,
        windows="upper",
        window_needs_flag=True,
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        ("qwen3",),
        qk_norm=True,
        windows="upper",
        window_needs_flag=True,
        bias_keys=_ATTENTION,
        requires_head_dim=True,
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3moe",
        ("qwen3_moe",),
        qk_norm=True,
        windows="all",
        window_needs_flag=True,
        bias_keys=_ATTENTION,
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        ("gemma2",),
        gemma=True,
        tied=True,
        windows="alternating",
        full_attention_every=2,
        default_window=4096,
        gguf_windows=True,
        attn_softcap=50.0,
        logit_softcap=30.0,
        layers_scaled_by_hidden=46,
        bias_keys=_ATTENTION,
        requires_head_dim=True,
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3",
        ("gemma3", "gemma3_text"),
        gemma=True,
        tied=True,
        qk_norm=True,
        windows="alternating",
        full_attention_every=6,
        pattern_in_config=True,
        gguf_windows=True,
        local_rope_theta=10000.0,
        layers_scaled_by_hidden=62,
        bias_keys=_ATTENTION,
        requires_head_dim=True,
    ),
    Family(
        "Phi3ForCausalLM",
        "phi3",
        ("phi3",),
        fused_projections=True,
        windows="all",
        gguf_windows=True,
    ),
    Family(
        "SmolLM3ForCausalLM",
        "",
        ("smollm3",),
        tied=True,
        windows="listed",
        window_needs_flag=True,
        without_rope="listed",
        bias_keys=_ALL,
    ),
    Family(
        "Olmo2ForCausalLM", "", ("olmo2",), qk_norm=True, wide_qk_norm=True, bias_keys=_ATTENTION
    ),
    Family("GraniteForCausalLM", "", ("granite",), bias_keys=_ALL, multipliers=True),
    Family(
        "Glm4ForCausalLM",
        "",
        ("glm4",),
        qkv_bias=True,
        bias_keys=BiasKeys(qkv="attention_bias"),
        interleaved_rope=True,
        partial_rotary=0.5,
        requires_head_dim=True,
    ),
    Family(
        "Ministral3ForCausalLM",
        "",
        ("ministral3",),
        windows="all",
        query_scaling=True,
        requires_head_dim=True,
    ),
    Family(
        "SeedOssForCausalLM",
        "",
        ("seed_oss",),
        qkv_bias=True,
        bias_keys=BiasKeys("attention_bias", "attention_out_bias", "mlp_bias"),
        requires_head_dim=True,
    ),
    Family(
        "Ernie4_5ForCausalLM",
        "",
        ("ernie4_5",),
        tied=True,
        bias_keys=BiasKeys("use_bias", "use_bias", "use_bias"),
        interleaved_rope=True,
        requires_head_dim=True,
    ),
    Family(
        "Exaone4ForCausalLM",
        "",
        ("exaone4",),
        qk_norm=True,
        windows="alternating",
        full_attention_every=4,
        pattern_in_config=True,
        default_window=4096,
        without_rope="full",
    ),
    Family(
        "Olmo3ForCausalLM",
        "",
        ("olmo3",),
        qk_norm=True,
        wide_qk_norm=True,
        windows="alternating",
        full_attention_every=4,
        default_window=4096,
        unscaled_local_rope=True,
        bias_keys=_ATTENTION,
    ),
)
# models that also take images, whose text part is supported: model types of that part
WITH_IMAGES = {
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
    "Mistral3ForConditionalGeneration": ("mistral", "ministral3"),
}
# models of the catalog that are not supported, and what the engine lacks
UNSUPPORTED = {
    "Gemma4ForConditionalGeneration": "layers with heads of different sizes",
    "Gemma4UnifiedForConditionalGeneration": "layers with heads of different sizes",
    "GptOssForCausalLM": "attention sinks and experts in MXFP4",
    "Qwen3_5ForConditionalGeneration": "layers with a recurrent state",
    "Qwen3_5MoeForConditionalGeneration": "layers with a recurrent state",
}
FAMILIES = {family.architecture: family for family in _FAMILIES}
BY_MODEL_TYPE = {kind: family for family in _FAMILIES for kind in family.model_types}
# GGUF files of Mistral and Mixtral are llama too
BY_GGUF_NAME = {
    family.gguf_name: family
    for family in _FAMILIES
    if family.gguf_name and family.architecture not in ("MistralForCausalLM", "MixtralForCausalLM")
}


def conversion_obstacle(spec: ModelSpec) -> str | None:
    """Return why localgen cannot quantize the model or convert it to GGUF; None if it can."""
    if spec.text_only:
        return "a model that also takes images"
    return None if FAMILIES[spec.architecture].gguf_name else spec.architecture
