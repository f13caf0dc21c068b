"""Facts of an architecture that config.json and GGUF files imply by its name."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of one architecture.

    architecture: class name in Hugging Face. gguf_name: architecture in GGUF files. model_types: in
    config.json. gemma: norms multiply by 1 + weight, norms after attention and MLP, scaled
    embeddings, GELU. qk_norm, qkv_bias, fused_projections: as in ModelSpec.
    windows: layers with a sliding window; "upper": from max_window_layers on; "alternating": all
    but every full_attention_every-th. default_window: for files that give none; 0: no default.
    window_needs_flag: the window of a config.json applies only with use_sliding_window.
    gguf_windows: GGUF files of this architecture have windows.
    attn_softcap, logit_softcap, local_rope_theta: defaults for files that give none.
    layers_scaled_by_hidden: the model with this many layers scales attention by hidden / heads
    instead of head_dim.
    allows_attention_bias, allows_mlp_bias: config.json may enable them. requires_head_dim:
    config.json must have head_dim.
    """

    architecture: str
    gguf_name: str
    model_types: tuple[str, ...]
    _: KW_ONLY
    gemma: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    fused_projections: bool = False
    windows: Literal["none", "all", "upper", "alternating"] = "none"
    full_attention_every: int = 0
    default_window: int = 0
    window_needs_flag: bool = False
    gguf_windows: bool = False
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    local_rope_theta: float | None = None
    layers_scaled_by_hidden: int = 0
    allows_attention_bias: bool = False
    allows_mlp_bias: bool = False
    requires_head_dim: bool = False


_FAMILIES = (
    Family(
        "LlamaForCausalLM", "llama", ("llama",), allows_attention_bias=True, allows_mlp_bias=True
    ),
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
        allows_attention_bias=True,
        requires_head_dim=True,
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3moe",
        ("qwen3_moe",),
        qk_norm=True,
        windows="all",
        window_needs_flag=True,
        allows_attention_bias=True,
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        ("gemma2",),
        gemma=True,
        windows="alternating",
        full_attention_every=2,
        default_window=4096,
        gguf_windows=True,
        attn_softcap=50.0,
        logit_softcap=30.0,
        layers_scaled_by_hidden=46,
        allows_attention_bias=True,
        requires_head_dim=True,
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3",
        ("gemma3", "gemma3_text"),
        gemma=True,
        qk_norm=True,
        windows="alternating",
        full_attention_every=6,
        gguf_windows=True,
        local_rope_theta=10000.0,
        layers_scaled_by_hidden=62,
        allows_attention_bias=True,
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
)
FAMILIES = {family.architecture: family for family in _FAMILIES}
BY_MODEL_TYPE = {kind: family for family in _FAMILIES for kind in family.model_types}
# GGUF files of Mistral and Mixtral are llama too
BY_GGUF_NAME = {
    family.gguf_name: family
    for family in _FAMILIES
    if family.architecture not in ("MistralForCausalLM", "MixtralForCausalLM")
}
