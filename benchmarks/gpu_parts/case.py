"""Kernel checks: a kernel and its reference implementation on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BF16 = 1e-2
# activations are rounded to FP8, which has three mantissa bits
ROUNDED_ROWS = 6e-2
# 8-bit values may differ by one step where the exact value lies between two
EIGHT_BITS = {torch.int8: 2e-2, torch.float8_e4m3fn: 4e-2}

Tensors = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kernel and its reference on the same inputs.

    found, wanted: outputs of the kernel, of the reference. most: maximum relative error.
    """

    kernel: str
    variant: str
    found: Callable[[], Tensors]
    wanted: Callable[[], Tensors]
    most: float = BF16

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.variant}"


def kernel_case(
    kernel: str,
    variant: str,
    sides: tuple[Callable[..., Any], Callable[..., Any]],
    given: tuple[Any, ...],
    exact: tuple[Any, ...],
    most: float = BF16,
) -> KernelCase:
    """Return the case of a kernel called with `given` and its reference called with `exact`.

    sides: kernel and reference; each returns a tensor or several.
    """

    def outputs(side: Callable[..., Any], arguments: tuple[Any, ...]) -> Tensors:
        found = side(*arguments)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    found, wanted = sides
    return KernelCase(
        *(kernel, variant, lambda: outputs(found, given), lambda: outputs(wanted, exact)), most
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the inputs. long: tokens of a long sequence. rows: of a large batch."""

    hidden: int
    intermediate: int
    long: int
    rows: int


FULL = Sizes(hidden=4096, intermediate=14336, long=5000, rows=300)
QUICK = Sizes(hidden=128, intermediate=256, long=150, rows=20)
