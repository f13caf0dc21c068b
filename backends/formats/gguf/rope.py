"""Rotary positions as GGUF files describe them: numbers in the metadata, factors in tensors."""

from __future__ import annotations

import math

import torch

from localgen.backends.formats.architecture.fields import ConfigFields
from localgen.backends.formats.architecture.rope import (
    LinearScaling,
    LongRopeScaling,
    Rope,
    Scaling,
    YarnScaling,
)
from localgen.backends.formats.gguf.file import GgufFile

_LLAMA_3, _SHORT, _LONG = (
    f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")
)
ROPE_FACTOR_TENSORS = (_LLAMA_3, _SHORT, _LONG)


def read_gguf_rope(file: GgufFile, config: ConfigFields, *, head_dim: int) -> Rope:
    """config: the architecture's own metadata.

    LoadFailed: a value is missing or wrong, or the kind of scaling is unknown.
    """
    dim = config.positive_int("rope.dimension_count", head_dim)
    if dim % 2 or dim > head_dim:
        raise config.load_error(f"{dim} rotary dimensions do not fit heads of {head_dim}")
    theta = config.positive_float("rope.freq_base", 10000.0)
    if theta <= 1.0:
        raise config.load_error(f"{config.prefix}rope.freq_base is {theta}, it must be above 1")
    return Rope(theta, dim, _read_scaling(file, config, dim))


def _read_scaling(file: GgufFile, config: ConfigFields, dim: int) -> Scaling | None:
    # the first files have scale_linear; and a factor without a type is linear
    key = "rope.scaling.factor"
    key = key if key in config else "rope.scale_linear"
    factor = config.positive_float(key) if config.values.get(key) else 1.0
    kind = config.string("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise config.load_error(
            f"rope scaling {kind!r} is not supported, only linear, yarn and longrope"
        )
    if kind == "yarn":
        return _read_yarn(file, config, factor)
    factor = 1.0 if kind == "none" else factor
    # Phi-3's converter names no type
    if _LONG in file or _SHORT in file:
        return _read_longrope(file, config, dim, factor)
    if _LLAMA_3 in file:
        return _per_frequency_scaling(_read_factors(file, _LLAMA_3, dim, factor))
    return None if factor == 1.0 else LinearScaling(factor)


def _read_yarn(file: GgufFile, config: ConfigFields, factor: float) -> YarnScaling:
    own = "rope.scaling."
    if config.positive_float(f"{own}yarn_ext_factor", 1.0) != 1.0:
        raise config.invalid_value(f"{own}yarn_ext_factor", "1")
    for name in ROPE_FACTOR_TENSORS:
        if name in file:
            raise config.load_error(f"yarn together with {name} is not supported")
    magnitude = 1.0 + 0.1 * math.log(max(factor, 1.0))
    return YarnScaling(
        factor=factor,
        trained_len=_trained_len(config),
        beta_fast=config.positive_float(f"{own}yarn_beta_fast", 32.0),
        beta_slow=config.positive_float(f"{own}yarn_beta_slow", 1.0),
        truncate=True,
        attention_factor=config.positive_float(f"{own}yarn_attn_factor", magnitude)
        * config.positive_float(f"{own}attn_factor", 1.0),
    )


def _read_longrope(
    file: GgufFile, config: ConfigFields, dim: int, factor: float
) -> LongRopeScaling:
    return LongRopeScaling(
        short_factors=_read_factors(file, _SHORT, dim, factor),
        long_factors=_read_factors(file, _LONG, dim, factor),
        trained_len=_trained_len(config),
        attention_factor=config.positive_float("rope.scaling.attn_factor", 1.0),
    )


def _per_frequency_scaling(factors: tuple[float, ...]) -> LongRopeScaling:
    """Every frequency divided by its own factor, however long a text is."""
    return LongRopeScaling(
        short_factors=factors, long_factors=factors, trained_len=1, attention_factor=1.0
    )


def _read_factors(file: GgufFile, name: str, dim: int, factor: float) -> tuple[float, ...]:
    values = file.read(name, (dim // 2,), device=torch.device("cpu"), dtype=torch.float32)
    if not bool((values > 0).all() and values.isfinite().all()):
        raise file.load_error(name, "has values that are no positive numbers")
    return tuple((values * factor).tolist())


def _trained_len(config: ConfigFields) -> int:
    key = "rope.scaling.original_context_length"
    length = config.positive_int(key, config.positive_int("context_length"))
    if length < 2:
        raise config.invalid_value(key, "a length of at least 2")
    return length
