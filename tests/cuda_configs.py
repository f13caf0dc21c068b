"""Tiny configurations of every architecture of the CUDA engine, for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from localgen.backends.formats.architecture.families import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
THETA = {"rope_theta": 10000.0}
LLAMA_3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
PHI_LENGTHS = {"original_max_position_embeddings": 128}
GEMMA: dict[str, Any] = {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 24}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "head_dim": 32,
}
# its queries are scaled from position 32 on
MINISTRAL_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def longrope(kind: str, dim: int) -> dict[str, Any]:
    short = [1.0 + 0.1 * i for i in range(dim // 2)]
    return {"type": kind, "short_factor": short, "long_factor": [2 * x for x in short]}


# model_type of config.json, then all that differs from SIZES
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", THETA),
    "llama first files": ("llama", {}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    # two ranks cannot divide its vocabulary and key-value heads evenly
    "llama uneven": ("llama", {**THETA, "num_key_value_heads": 1, "vocab_size": 99}),
    "llama tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama 3.1": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA_3}),
    "llama linear": ("llama", {**THETA, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "mistral": ("mistral", {**THETA, "sliding_window": None, "head_dim": 32}),
    "mistral first files": ("mistral", THETA),
    "mistral window": ("mistral", {**THETA, "sliding_window": 24}),
    "qwen2": ("qwen2", {**THETA, "use_sliding_window": False, "sliding_window": 24}),
    "qwen2 window": (
        "qwen2",
        {**THETA, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen2 yarn": ("qwen2", {**THETA, "rope_scaling": YARN}),
    "qwen3": ("qwen3", {"rope_theta": 1e6, "head_dim": 32}),
    "qwen3 window": (
        "qwen3",
        {
            **THETA,
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
    ),
    "qwen3 yarn": (
        "qwen3",
        {
            "rope_theta": 1e6,
            "head_dim": 64,
            "attention_bias": True,
            "rope_scaling": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
        },
    ),
    "qwen3 yarn mscale": (
        "qwen3",
        {**THETA, "head_dim": 32, "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    ),
    "gemma2": ("gemma2", {**THETA, **GEMMA}),
    "gemma2 uncapped": (
        "gemma2",
        {
            **THETA,
            **GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 12.0,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA,
            "rope_theta": 1e6,
            "rope_local_base_freq": 20000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
    ),
    "gemma3 listed": (
        "gemma3_text",
        {
            **GEMMA,
            "rope_theta": 1e6,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 20.0,
        },
    ),
    "phi3": ("phi3", {**THETA, "sliding_window": 24}),
    "phi3 longrope": ("phi3", {**THETA, **PHI_LENGTHS, "rope_scaling": longrope("longrope", 16)}),
    "phi4 mini": (
        "phi3",
        {
            **THETA,
            **PHI_LENGTHS,
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
            "rope_scaling": longrope("longrope", 12),
        },
    ),
    "phi4 unscaled": (
        "phi3",
        {**THETA, "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    ),
    "mixtral": ("mixtral", {"rope_theta": 1e6, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3 moe": ("qwen3_moe", {"rope_theta": 1e6, **MOE, "norm_topk_prob": True}),
    "qwen3 moe window": (
        "qwen3_moe",
        {**THETA, **MOE, "use_sliding_window": True, "sliding_window": 24},
    ),
    "smollm3": ("smollm3", {**THETA, "no_rope_layers": [1, 0, 1]}),
    "smollm3 biases": ("smollm3", {**THETA, "attention_bias": True, "mlp_bias": True}),
    "smollm3 window": (
        "smollm3",
        {
            **THETA,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "no_rope_layer_interval": 2,
        },
    ),
    "olmo2": ("olmo2", THETA),
    "olmo2 biases": ("olmo2", {**THETA, "attention_bias": True}),
    "granite": (
        "granite",
        {
            **THETA,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 12.0,
            "logits_scaling": 1.7,
            "residual_multiplier": 0.22,
            "mlp_bias": True,
        },
    ),
    "glm4": ("glm4", {**THETA, "head_dim": 32}),
    "glm4 unbiased": (
        "glm4",
        {**THETA, "head_dim": 32, "attention_bias": False, "partial_rotary_factor": 0.25},
    ),
    "gemma3 images": (
        "gemma3",
        {
            "tie_word_embeddings": True,
            "text_config": {
                **SIZES,
                **GEMMA,
                "model_type": "gemma3_text",
                "rope_theta": 1e6,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 2,
            },
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
    ),
    "mistral3 images": (
        "mistral3",
        {
            "tie_word_embeddings": False,
            "text_config": {**SIZES, **THETA, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**VISION, "model_type": "pixtral"},
        },
    ),
    "ministral3": ("ministral3", {"head_dim": 32, "rope_parameters": MINISTRAL_ROPE}),
    "ministral3 images": (
        "mistral3",
        {
            "tie_word_embeddings": True,
            "text_config": {
                **SIZES,
                "model_type": "ministral3",
                "head_dim": 32,
                "rope_parameters": MINISTRAL_ROPE,
            },
            "vision_config": {**VISION, "model_type": "pixtral"},
        },
    ),
    "seed oss": ("seed_oss", {**THETA, "head_dim": 32}),
    "seed oss biases": (
        "seed_oss",
        {**THETA, "head_dim": 32, "attention_bias": False, "attention_out_bias": True},
    ),
    "ernie4.5": ("ernie4_5", {**THETA, "head_dim": 32}),
    "ernie4.5 biases": (
        "ernie4_5",
        {**THETA, "head_dim": 32, "use_bias": True, "tie_word_embeddings": False},
    ),
    "exaone4": (
        "exaone4",
        {
            **THETA,
            "head_dim": 32,
            "sliding_window": 24,
            "sliding_window_pattern": "LG",
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "exaone4 pattern": (
        "exaone4",
        {**THETA, "head_dim": 32, "sliding_window": 24, "sliding_window_pattern": 2},
    ),
    "exaone4 global": (
        "exaone4",
        {
            **THETA,
            "head_dim": 32,
            "rope_scaling": LLAMA_3,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "olmo3": (
        "olmo3",
        {
            "rope_theta": 500000.0,
            "rope_scaling": YARN,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "ministral3": "Ministral3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
}
# those that can be quantized and converted to GGUF
CONVERTIBLE = [
    name
    for name, (kind, _) in CONFIGS.items()
    if (family := FAMILIES.get(_CLASSES[kind])) is not None and family.gguf_name
]


def config_json(name: str, **changes: Any) -> dict[str, Any]:
    """Contents of a config.json as published models have it; None omits a field."""
    kind, more = CONFIGS[name]
    sizes = {} if "text_config" in more else SIZES
    values = {"model_type": kind, "architectures": [_CLASSES[kind]], **sizes, **more, **changes}
    return {key: value for key, value in values.items() if value is not None or key in more}


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    """Write a folder that holds only this config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json(name, **changes)))
    return folder
