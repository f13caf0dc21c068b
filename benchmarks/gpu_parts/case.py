"""A kernel on given inputs beside its twin, and how far apart they may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BF16 = 1e-2
# rows are rounded to FP8, which leaves three bits behind the point
ROUNDED_ROWS = 6e-2
# a digit of eight bits more or less, wherever a value lies between two
EIGHT_BITS = {torch.int8: 2e-2, torch.float8_e4m3fn: 4e-2}

Tensors = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """found: the kernel's outputs. wanted: its twin's. most: relative error that is allowed."""

    kernel: str
    variant: str
    found: Callable[[], Tensors]
    wanted: Callable[[], Tensors]
    most: float = BF16

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.variant}"


def beside(
    kernel: str,
    variant: str,
    sides: tuple[Callable[..., Any], Callable[..., Any]],
    given: tuple[Any, ...],
    exact: tuple[Any, ...],
    most: float = BF16,
) -> Case:
    """Two functions, each of which gives a tensor or several: a kernel on `given`, its twin on
    `exact`."""

    def outputs(side: Callable[..., Any], arguments: tuple[Any, ...]) -> Tensors:
        found = side(*arguments)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    found, wanted = sides
    return Case(
        *(kernel, variant, lambda: outputs(found, given), lambda: outputs(wanted, exact)), most
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """hidden, intermediate: of a model. long: tokens of a long sequence. rows: of a wide step."""

    hidden: int
    intermediate: int
    long: int
    rows: int


FULL = Sizes(hidden=4096, intermediate=14336, long=5000, rows=300)
QUICK = Sizes(hidden=128, intermediate=256, long=150, rows=20)
