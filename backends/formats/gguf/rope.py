"""RoPE in GGUF files, read and written: numbers in the metadata, frequency factors in tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from localgen.backends.formats.architecture.families import Family
from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.architecture.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    Scaling,
    YarnScaling,
    yarn_mscale,
)

# the converter runs without torch, which GgufFile needs
if TYPE_CHECKING:
    from localgen.backends.formats.gguf.file import GgufFile

_DIM, _THETA, _LOCAL_THETA = "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa"
_KIND, _FACTOR, _ATTN_FACTOR, _TRAINED_LEN = (
    f"rope.scaling.{name}" for name in ("type", "factor", "attn_factor", "original_context_length")
)
_LLAMA_3, _SHORT, _LONG = (
    f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")
)
ROPE_FACTOR_TENSORS = (_LLAMA_3, _SHORT, _LONG)


def read_gguf_rope(file: GgufFile, config: ConfigFields, *, head_dim: int) -> Rope:
    """Return the model's RoPE. config: metadata of the architecture.

    Raises LoadFailed if a value is missing or invalid, or the type of scaling is not supported.
    """
    dim = config.positive_int(_DIM, head_dim)
    if dim % 2 or dim > head_dim:
        raise config.load_error(f"{dim} rotary dimensions do not fit heads of {head_dim}")
    theta = config.positive_float(_THETA, 10000.0)
    if theta <= 1.0:
        raise config.load_error(f"{config.prefix}{_THETA} is {theta}, it must be above 1")
    return Rope(theta, dim, _read_scaling(file, config, dim))


def read_local_rope(config: ConfigFields, family: Family, rope: Rope) -> Rope | None:
    """RoPE of layers with a window; None if it is that of all layers."""
    if family.local_rope_theta is None:
        return None
    return Rope(config.positive_float(_LOCAL_THETA, family.local_rope_theta), rope.dim)


def rope_metadata(spec: ModelSpec) -> dict[str, int | float | str]:
    """The model's RoPE as metadata of the architecture."""
    found: dict[str, int | float | str] = {_DIM: spec.rope.dim, _THETA: spec.rope.theta}
    if spec.local_rope is not None:
        found[_LOCAL_THETA] = spec.local_rope.theta
    match spec.rope.scaling:
        case LinearScaling(factor):
            found |= {_KIND: "linear", _FACTOR: factor}
        case YarnScaling() as yarn:
            found |= {_KIND: "yarn", _FACTOR: yarn.factor, _TRAINED_LEN: yarn.trained_len}
            # llama.cpp multiplies by YaRN's default itself
            default = yarn_mscale(yarn.factor)
            if not math.isclose(yarn.attention_factor, default):
                found[_ATTN_FACTOR] = yarn.attention_factor / default
        case LongRopeScaling() as scaling:
            found |= {_KIND: "longrope", _TRAINED_LEN: scaling.trained_len}
            found[_ATTN_FACTOR] = scaling.attention_factor
    return found


def rope_factor_tensors(rope: Rope) -> dict[str, NDArray[np.float32]]:
    """The divisors of the rotary frequencies, by tensor name: [dim / 2]."""
    match rope.scaling:
        case Llama3Scaling() as scaling:
            return {_LLAMA_3: llama3_factors(rope, scaling)}
        case LongRopeScaling() as scaling:
            lists = {_LONG: scaling.long_factors, _SHORT: scaling.short_factors}
            return {name: np.array(values, np.float32) for name, values in lists.items()}
    return {}


def llama3_factors(rope: Rope, scaling: Llama3Scaling) -> NDArray[np.float32]:
    """Llama3Scaling as a divisor of each frequency: [dim / 2]."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    exponents = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    wavelengths = 2 * math.pi * rope.theta**exponents
    kept = np.clip((scaling.trained_len / wavelengths - low) / (high - low), 0.0, 1.0)
    factors: NDArray[np.float32] = (1.0 / ((1.0 - kept) / scaling.factor + kept)).astype(np.float32)
    return factors


def _read_scaling(file: GgufFile, config: ConfigFields, dim: int) -> Scaling | None:
    # the first files have scale_linear; a factor without a type is linear
    key = _FACTOR if _FACTOR in config else "rope.scale_linear"
    factor = config.positive_float(key) if config.values.get(key) else 1.0
    kind = config.string(_KIND, "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise config.load_error(
            f"rope scaling {kind!r} is not supported, only linear, yarn and longrope"
        )
    if kind == "yarn":
        return _read_yarn(file, config, factor)
    factor = 1.0 if kind == "none" else factor
    # the converter of Phi-3 writes no type
    if _LONG in file or _SHORT in file:
        return LongRopeScaling(
            short_factors=_read_factors(file, _SHORT, dim, factor),
            long_factors=_read_factors(file, _LONG, dim, factor),
            trained_len=_trained_len(config),
            attention_factor=config.positive_float(_ATTN_FACTOR, 1.0),
        )
    if _LLAMA_3 in file:
        factors = _read_factors(file, _LLAMA_3, dim, factor)
        # a divisor for each frequency, the same for every length
        return LongRopeScaling(
            short_factors=factors, long_factors=factors, trained_len=1, attention_factor=1.0
        )
    return None if factor == 1.0 else LinearScaling(factor)


def _read_yarn(file: GgufFile, config: ConfigFields, factor: float) -> YarnScaling:
    own = "rope.scaling."
    if config.positive_float(f"{own}yarn_ext_factor", 1.0) != 1.0:
        raise config.invalid_value(f"{own}yarn_ext_factor", "1")
    for name in ROPE_FACTOR_TENSORS:
        if name in file:
            raise config.load_error(f"yarn together with {name} is not supported")
    return YarnScaling(
        factor=factor,
        trained_len=_trained_len(config),
        beta_fast=config.positive_float(f"{own}yarn_beta_fast", 32.0),
        beta_slow=config.positive_float(f"{own}yarn_beta_slow", 1.0),
        truncate=True,
        attention_factor=config.positive_float(f"{own}yarn_attn_factor", yarn_mscale(factor))
        * config.positive_float(_ATTN_FACTOR, 1.0),
    )


def _read_factors(file: GgufFile, name: str, dim: int, factor: float) -> tuple[float, ...]:
    import torch

    values = file.read(name, (dim // 2,), device=torch.device("cpu"), dtype=torch.float32)
    if not bool((values > 0).all() and values.isfinite().all()):
        raise file.load_error(name, "has values that are not positive numbers")
    return tuple((values * factor).tolist())


def _trained_len(config: ConfigFields) -> int:
    length = config.positive_int(_TRAINED_LEN, config.positive_int("context_length"))
    if length < 2:
        raise config.invalid_value(_TRAINED_LEN, "a length of at least 2")
    return length


def interleave_rotary(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of a q or k projection from Hugging Face's order to GGUF's.

    weight: [heads * head_dim, …]. Hugging Face rotates row i of a head with row i + head_dim / 2;
    llama.cpp rotates neighbours, so the new order is 0, head_dim / 2, 1, head_dim / 2 + 1, …
    """
    half = weight.shape[0] // heads // 2
    split = weight.reshape(heads, 2, half, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)
