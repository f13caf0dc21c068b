"""RoPE: frequencies, scaling methods, and tables of cos and sin; parsed from config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localgen.backends.formats.architecture.fields import ConfigFields

# only tables need torch: the converter to GGUF runs without it
if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Scaling of Llama 3.1: long wavelengths are stretched by `factor`, short ones are kept.

    Short is below trained_len / high_freq_factor, long above trained_len / low_freq_factor; the
    frequency is interpolated between them.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): low-frequency dimensions are stretched, high-frequency ones kept.

    beta_fast, beta_slow: rotations within trained_len at which interpolation begins and ends.
    truncate: these bounds are rounded to whole dimensions. attention_factor scales cos and sin.
    """

    factor: float
    trained_len: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, from one of two lists.

    short_factors, long_factors: dim / 2 values, for sequences up to trained_len and longer ones.
    attention_factor scales cos and sin.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    trained_len: int
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE over the first `dim` dimensions of a head."""

    theta: float
    dim: int
    scaling: Scaling | None = None

    @property
    def attention_factor(self) -> float:
        """Factor of cos and sin."""
        match self.scaling:
            case YarnScaling() | LongRopeScaling() as scaling:
                return scaling.attention_factor
        return 1.0

    def max_len(self, configured: int) -> int:
        """Longest sequence, in tokens, of a model whose file gives `configured`."""
        if isinstance(self.scaling, YarnScaling):
            return yarn_max_len(configured, self.scaling.factor, self.scaling.trained_len)
        return configured

    def cos_sin_table(self, max_len: int) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, times the attention factor: float32 [max_len, dim / 2].

        Computed in float32, as in training. LongRoPE uses its long factors for all positions if
        max_len exceeds the trained length, since a KV cache holds keys of one table only.
        """
        import torch

        positions = torch.arange(max_len, dtype=torch.float32)
        angles = positions[:, None] * self.inv_freq(max_len)
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def inv_freq(self, max_len: int) -> Tensor:
        """Radians per position, for sequences of up to max_len tokens: float32 [dim / 2]."""
        import torch

        plain = 1.0 / self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        match self.scaling:
            case None:
                return plain
            case LinearScaling(factor):
                return plain / factor
            case Llama3Scaling() as scaling:
                return _scale_llama3(plain, scaling)
            case YarnScaling() as scaling:
                return _scale_yarn(plain, scaling, self.theta, self.dim)
            case LongRopeScaling() as scaling:
                long = max_len > scaling.trained_len
                return plain / torch.tensor(scaling.long_factors if long else scaling.short_factors)


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """The query at position p is multiplied by 1 + beta * log(1 + floor(p / trained_len))."""

    beta: float
    trained_len: int

    def table(self, max_len: int) -> Tensor:
        """The factor of every position: float32 [max_len]."""
        import torch

        steps = (torch.arange(max_len) / self.trained_len).floor()
        return 1.0 + self.beta * torch.log(1.0 + steps)


def _scale_llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.trained_len * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * ((1.0 - kept) / scaling.factor + kept)


def _scale_yarn(plain: Tensor, scaling: YarnScaling, theta: float, dim: int) -> Tensor:
    import torch

    def dimension(turns: float) -> float:
        """The dimension that makes this many rotations within the trained length."""
        return dim * math.log(scaling.trained_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    kept = 1.0 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return plain * ((1.0 - kept) / scaling.factor + kept)


def read_rope(
    config: ConfigFields, *, head_dim: int, theta: float | None = None, partial: float = 1.0
) -> Rope:
    """Return the RoPE of a config.json, as written by transformers 5 or earlier.

    theta: default of rope_theta, or None if it is required. partial: default of
    partial_rotary_factor. Raises LoadFailed if a value is missing or invalid, or the type of
    scaling is not supported.
    """
    own = config.section("rope_parameters") or config.section("rope_scaling")
    return parse_rope(config, own, head_dim=head_dim, theta=theta, partial=partial)


def parse_rope(
    config: ConfigFields,
    section: ConfigFields | None,
    *,
    head_dim: int,
    theta: float | None = None,
    partial: float = 1.0,
) -> Rope:
    """Like read_rope, from `section`, and from the top level for fields that it lacks."""
    section = section or ConfigFields(config.path, {})
    rotary = (section if "partial_rotary_factor" in section else config).positive_float(
        "partial_rotary_factor", partial
    )
    dim = int(head_dim * rotary)
    if dim % 2 or not 0 < dim <= head_dim:
        raise config.load_error(f"{dim} rotary dimensions do not fit heads of {head_dim}")
    theta = (section if "rope_theta" in section else config).positive_float("rope_theta", theta)
    if theta <= 1.0:
        raise config.load_error(f"rope_theta is {theta}, it must be above 1")
    return Rope(theta, dim, _read_scaling(config, section, dim))


def _read_scaling(config: ConfigFields, section: ConfigFields, dim: int) -> Scaling | None:
    kind = section.string("rope_type", section.string("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(section.positive_float("factor"))
        case "llama3":
            return _read_llama3(config, section)
        case "yarn" if "long_factor" not in section:
            return _read_yarn(config, section)
        case "longrope" | "su" | "yarn":  # names of LongRoPE in the first Phi-3 files
            return _read_longrope(config, section, dim)
    raise config.load_error(
        f"rope scaling {kind} is not supported, only linear, llama3, yarn and longrope"
    )


def _read_llama3(config: ConfigFields, section: ConfigFields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=section.positive_float("factor"),
        low_freq_factor=section.positive_float("low_freq_factor"),
        high_freq_factor=section.positive_float("high_freq_factor"),
        trained_len=_trained_len(config, section),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise section.invalid_value(
            "high_freq_factor", f"above low_freq_factor ({scaling.low_freq_factor})"
        )
    return scaling


def _read_yarn(config: ConfigFields, section: ConfigFields) -> YarnScaling:
    trained_len = _trained_len(config, section)
    factor = section.positive_float(
        "factor", config.positive_int("max_position_embeddings") / trained_len
    )
    default = yarn_mscale(factor)
    if "mscale" in section and "mscale_all_dim" in section:
        scales = section.positive_float("mscale"), section.positive_float("mscale_all_dim")
        default = yarn_mscale(factor, scales[0]) / yarn_mscale(factor, scales[1])
    return YarnScaling(
        factor=factor,
        trained_len=trained_len,
        beta_fast=section.positive_float("beta_fast", 32.0),
        beta_slow=section.positive_float("beta_slow", 1.0),
        truncate=section.flag("truncate", True),
        attention_factor=section.positive_float("attention_factor", default),
    )


def yarn_mscale(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor of cos and sin."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def yarn_max_len(configured: int, factor: float, trained_len: int) -> int:
    """Longest sequence with YaRN, which files may enable without raising the length they give."""
    return max(configured, int(factor * trained_len))


def _read_longrope(config: ConfigFields, section: ConfigFields, dim: int) -> LongRopeScaling:
    trained_len = _trained_len(config, section)
    factor = section.positive_float(
        "factor", config.positive_int("max_position_embeddings") / trained_len
    )
    default = 1.0
    if factor > 1.0:
        default = math.sqrt(1.0 + math.log(factor) / math.log(trained_len))
    return LongRopeScaling(
        short_factors=section.positive_floats("short_factor", dim // 2),
        long_factors=section.positive_floats("long_factor", dim // 2),
        trained_len=trained_len,
        attention_factor=section.positive_float("attention_factor", default),
    )


def _trained_len(config: ConfigFields, section: ConfigFields) -> int:
    """Trained length: from the top level, else from the section, else the maximum length."""
    key = "original_max_position_embeddings"
    source = config if key in config else section
    length = source.positive_int(key, config.positive_int("max_position_embeddings"))
    if length < 2:
        raise source.invalid_value(key, "a length of at least 2")
    return length
