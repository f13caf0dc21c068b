"""Recipe: how weights are rounded, and the text that calibrates it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localgen.backends.errors import InvalidRequest

QuantizeMethod = Literal["rtn", "awq", "gptq", "smoothquant", "fp8"]
# processing of a layer by QuantizeJob
LayerMode = Literal["round", "fold", "observe", "gguf"]

# bits that each method can write, its default first
_SUPPORTED_BITS: dict[QuantizeMethod, tuple[int, ...]] = {
    "rtn": (4, 3, 2, 8),
    "awq": (4, 3, 2, 8),
    "gptq": (4, 3, 2, 8),
    "smoothquant": (8,),
    "fp8": (8,),
}
METHODS = tuple(_SUPPORTED_BITS)
# methods whose rounding can be learned: steps by bits, where it was measured to win
_ROUNDING_STEPS: dict[QuantizeMethod, dict[int, int]] = {
    "awq": {2: 200, 3: 200, 4: 50},
    "gptq": {2: 200, 3: 200},
}
LEARNING_METHODS = tuple(_ROUNDING_STEPS)


def supported_bits(method: QuantizeMethod) -> tuple[int, ...]:
    """Bits that a method can write, its default first."""
    return _SUPPORTED_BITS[method]


def default_rounding_steps(method: QuantizeMethod, bits: int) -> int:
    """Steps of learned rounding; 0 for none."""
    return _ROUNDING_STEPS.get(method, {}).get(bits, 0)


def default_bits(method: QuantizeMethod) -> int:
    return _SUPPORTED_BITS[method][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How weights are rounded. group_size: inputs that share a scale and a zero point; None for a
    whole row.

    Only rtn, awq and gptq have groups; smoothquant and fp8 have one scale per row.
    clip: they search a smaller range for each group. desc_act: gptq rounds inputs in
    descending order of the Hessian's diagonal. damping: fraction of the Hessian's mean diagonal
    that gptq adds to it. asymmetry: share of the error of the inputs, those of the quantized layers
    before, that gptq corrects; 0 for none. rounding_steps: steps in which the rounding of a layer
    by awq or gptq is improved by the layer's output; 0 for none. alpha: share of the activations'
    range that smoothquant moves into the weights.
    """

    method: QuantizeMethod
    bits: int = 4
    group_size: int | None = 128
    clip: bool = True
    desc_act: bool = True
    damping: float = 0.01
    asymmetry: float = 0.25
    rounding_steps: int = 0
    alpha: float = 0.5

    def __post_init__(self) -> None:
        """Raises InvalidRequest for values that no format can hold."""
        widths = _SUPPORTED_BITS[self.method]
        if self.bits not in widths:
            known = " or ".join(map(str, sorted(widths)))
            raise InvalidRequest(
                f"{self.method} supports {known} bits, not {self.bits}", param="bits"
            )
        if self.rounding_steps and self.method not in LEARNING_METHODS:
            raise InvalidRequest(
                f"{' and '.join(LEARNING_METHODS)} learn their rounding, {self.method} does not",
                param="rounding_steps",
            )
        if self.has_groups and self.group_size is not None and self.group_size % 8:
            raise InvalidRequest(
                f"a group size is a multiple of 8, {self.group_size} is not", param="group_size"
            )

    @property
    def has_groups(self) -> bool:
        return self.method in ("rtn", "awq", "gptq")

    @property
    def is_asymmetric(self) -> bool:
        """gptq corrects errors of its inputs."""
        return self.method == "gptq" and self.asymmetry > 0

    @property
    def needs_originals(self) -> bool:
        """The method compares activations with those of the original model."""
        return self.is_asymmetric or self.rounding_steps > 0

    @property
    def needs_calibration(self) -> bool:
        """The method reads activations."""
        return self.method in ("awq", "gptq", "smoothquant")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationConfig:
    """Calibration text. path: None for localgen's own.

    samples: maximum number of sequences of seq_len tokens; the seed draws them from a longer text.
    """

    path: Path | None = None
    samples: int = 128
    seq_len: int = 512
    seed: int = 0
