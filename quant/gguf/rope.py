"""Rotary positions for a GGUF file: numbers for the metadata, factors as tensors."""

from __future__ import annotations

import math

import gguf
import numpy as np
from gguf import MODEL_ARCH, RopeScalingType
from numpy.typing import NDArray

from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.architecture.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)
from localgen.quant.gguf.names import gguf_model_arch

Array = NDArray[np.float32]


def unsupported_rope_feature(spec: ModelSpec) -> str | None:
    """What llama.cpp cannot compute of the model's rotary positions."""
    kind, scaling = gguf_model_arch(spec), spec.rope.scaling
    if kind is MODEL_ARCH.LLAMA and spec.rope.dim != spec.head_dim:
        return f"{spec.rope.dim} rotary dimensions of {spec.head_dim}"
    if spec.local_rope is not None and spec.local_rope.scaling is not None:
        return "stretched positions in layers with a window"
    match scaling:
        case Llama3Scaling() if kind is not MODEL_ARCH.LLAMA:
            return "rope type llama3 in another model than Llama"
        case LongRopeScaling() if kind not in (MODEL_ARCH.LLAMA, MODEL_ARCH.PHI3):
            return "rope type longrope in another model than Llama and Phi"
        case YarnScaling() if (scaling.beta_fast, scaling.beta_slow) != (32.0, 1.0):
            return f"YaRN with betas {scaling.beta_fast:g} and {scaling.beta_slow:g}, not 32 and 1"
        case YarnScaling(truncate=False):
            return "YaRN with truncate false"
    return None


def add_rope_keys(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    """The keys of the model's rotary positions."""
    rope, scaling = spec.rope, spec.rope.scaling
    writer.add_rope_dimension_count(rope.dim)
    writer.add_rope_freq_base(rope.theta)
    if spec.local_rope is not None:
        writer.add_rope_freq_base_swa(spec.local_rope.theta)
    match scaling:
        case LinearScaling():
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(scaling.factor)
        case YarnScaling():
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(scaling.factor)
            writer.add_rope_scaling_orig_ctx_len(scaling.trained_len)
            # llama.cpp multiplies by YaRN's usual magnitude itself
            usual = 1.0 + 0.1 * math.log(max(scaling.factor, 1.0))
            if not math.isclose(scaling.attention_factor, usual):
                writer.add_rope_scaling_attn_factors(scaling.attention_factor / usual)
        case LongRopeScaling():
            writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
            writer.add_rope_scaling_orig_ctx_len(scaling.trained_len)
            writer.add_rope_scaling_attn_factors(scaling.attention_factor)


def rope_factor_tensors(rope: Rope) -> dict[str, Array]:
    """What llama.cpp divides each rotary frequency by, by tensor: [dim / 2]."""
    match rope.scaling:
        case Llama3Scaling():
            return {"rope_freqs.weight": llama3_factors(rope, rope.scaling)}
        case LongRopeScaling() as scaling:
            lists = {"long": scaling.long_factors, "short": scaling.short_factors}
            return {
                f"rope_factors_{length}.weight": np.array(values, np.float32)
                for length, values in lists.items()
            }
    return {}


def llama3_factors(rope: Rope, scaling: Llama3Scaling) -> Array:
    """[dim / 2]. Wavelengths short against the trained length stay, long ones stretch by `factor`,
    and between the two bounds the frequency is blended linearly (Llama 3.1's definition)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    exponents = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    wavelengths = 2 * math.pi * rope.theta**exponents
    kept = np.clip((scaling.trained_len / wavelengths - low) / (high - low), 0.0, 1.0)
    factors: Array = (1.0 / ((1.0 - kept) / scaling.factor + kept)).astype(np.float32)
    return factors
