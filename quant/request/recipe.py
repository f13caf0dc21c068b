"""What to make of a model's weights: the method, its bits and groups, and what calibrates it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localgen.backends.errors import InvalidRequest

QuantizeMethod = Literal["rtn", "awq", "gptq", "smoothquant", "fp8"]
# what a job does with a layer: as of QuantizeJob
LayerMode = Literal["round", "fold", "observe"]

# widths that a method can write, its usual one first
_SUPPORTED_BITS: dict[QuantizeMethod, tuple[int, ...]] = {
    "rtn": (4, 3, 8),
    "awq": (4, 3, 8),
    "gptq": (4, 3, 8),
    "smoothquant": (8,),
    "fp8": (8,),
}


METHODS = tuple(_SUPPORTED_BITS)


def supported_bits(method: QuantizeMethod) -> tuple[int, ...]:
    """Bits that a method can make, its usual ones first."""
    return _SUPPORTED_BITS[method]


def default_bits(method: QuantizeMethod) -> int:
    """What a method usually makes."""
    return _SUPPORTED_BITS[method][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How weights are rounded. group_size: inputs that share a scale and a zero; None: a whole row.

    Only rtn, awq and gptq have groups; smoothquant and fp8 have one scale a row.
    clip: whether awq and gptq also search how far each group's range may shrink. desc_act: whether
    gptq goes through inputs by their weight in the Hessian. damping: share of the Hessian's mean
    diagonal that gptq adds to it. alpha: how much of the activations' range smoothquant moves
    into the weights.
    """

    method: QuantizeMethod
    bits: int = 4
    group_size: int | None = 128
    clip: bool = True
    desc_act: bool = True
    damping: float = 0.01
    alpha: float = 0.5

    def __post_init__(self) -> None:
        """InvalidRequest: values that no format can hold, or that exclude each other."""
        widths = _SUPPORTED_BITS[self.method]
        if self.bits not in widths:
            known = " or ".join(map(str, widths))
            raise InvalidRequest(f"{self.method} makes {known} bits, not {self.bits}", param="bits")
        if self.has_groups and self.group_size is not None and self.group_size % 8:
            raise InvalidRequest(
                f"a group size is a multiple of 8, {self.group_size} is not", param="group_size"
            )

    @property
    def has_groups(self) -> bool:
        """Whether inputs share scales in groups."""
        return self.method in ("rtn", "awq", "gptq")

    @property
    def needs_calibration(self) -> bool:
        """Whether it looks at activations."""
        return self.method in ("awq", "gptq", "smoothquant")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationConfig:
    """Text that activations are taken from. path: a user's file; None: what ships with localgen.

    samples: most sequences of seq_len tokens, drawn by the seed where the text has more.
    """

    path: Path | None = None
    samples: int = 128
    seq_len: int = 512
    seed: int = 0
