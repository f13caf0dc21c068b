"""The Llama family: its shape, its tensors' names and shapes, its rotary positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localgen.backends.errors import LoadFailed

_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The shape of a model, from its config.json."""

    vocab: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    ctx: int
    rms_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]
    tied: bool


def read_config(path: Path, config: dict[str, Any]) -> LlamaConfig:
    """The shape that the contents of a config.json describe.

    LoadFailed: not of the Llama family, a value is missing, or a variant llama.cpp computes
    differently under this name.
    """
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise LoadFailed(f"{path}: architecture {architecture} cannot be converted, only {known}")
    if config.get("hidden_act", "silu") != "silu":
        raise LoadFailed(f"{path}: hidden_act {config['hidden_act']} is not supported, only silu")
    # transformers 5 moved both rope settings into rope_parameters
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return LlamaConfig(
            vocab=int(config["vocab_size"]),
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ctx=int(config["max_position_embeddings"]),
            rms_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(path, rope),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise LoadFailed(f"{path} has no {error.args[0]}") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise LoadFailed(f"{path} holds a value of the wrong kind: {error}") from None


def _rope_scaling(path: Path, rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    match kind:
        case "default":
            return {}
        case "linear":
            return {"kind": kind, "factor": float(rope["factor"])}
        case "llama3":
            keys = ("factor", "low_freq_factor", "high_freq_factor")
            scaling = {key: float(rope[key]) for key in keys}
            trained_ctx = int(rope["original_max_position_embeddings"])
            return {"kind": kind, "trained_ctx": trained_ctx, **scaling}
    raise LoadFailed(f"{path}: rope scaling {kind} is not supported, only linear and llama3")


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the model must have, by its Hugging Face name."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = {
        "input_layernorm": (config.hidden,),
        "self_attn.q_proj": (queries, config.hidden),
        "self_attn.k_proj": (keys, config.hidden),
        "self_attn.v_proj": (keys, config.hidden),
        "self_attn.o_proj": (config.hidden, queries),
        "post_attention_layernorm": (config.hidden,),
        "mlp.gate_proj": (config.intermediate, config.hidden),
        "mlp.up_proj": (config.intermediate, config.hidden),
        "mlp.down_proj": (config.hidden, config.intermediate),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, config.hidden),
        "model.norm.weight": (config.hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, config.hidden)
    for index in range(config.layers):
        for part, shape in layer.items():
            shapes[f"model.layers.{index}.{part}.weight"] = shape
    return shapes


def interleave_rotary(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a q or k projection from Hugging Face's order to GGUF's, within each head.

    weight: [heads * head_dim, …]. Hugging Face rotates row i with row i + head_dim / 2,
    llama.cpp rotates neighbours: row 0, head_dim / 2, 1, head_dim / 2 + 1, …
    """
    half = weight.shape[0] // heads // 2
    split = weight.reshape(heads, 2, half, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def llama3_rope_factors(config: LlamaConfig) -> NDArray[np.float32]:
    """What llama.cpp divides each rotary frequency by, for rope type llama3: [head_dim / 2].

    Wavelengths short against the trained context stay, long ones stretch by `factor`, and
    between the two bounds the frequency is blended linearly (Llama 3.1's definition).
    """
    scaling = config.rope_scaling
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    wavelengths = 2 * math.pi * config.rope_theta**exponents
    kept = np.clip((scaling["trained_ctx"] / wavelengths - low) / (high - low), 0.0, 1.0)
    factors: NDArray[np.float32] = (1.0 / ((1.0 - kept) / factor + kept)).astype(np.float32)
    return factors
