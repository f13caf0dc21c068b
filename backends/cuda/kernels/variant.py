"""A kernel in one of the configurations that are shipped, so that tests can compile all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """kernel: a triton.jit function. signature: Triton's type of each argument, as `*bf16`, `i32`
    or `constexpr`. constants: values of those that are constexpr. min_arch: compute capability
    below which it is not used (80, 89, 90, 100, 120). archs: those that it is chosen for; None:
    all of these. registers: most of a thread; None: as the compiler has it.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    registers: int | None = None
    min_arch: int = 80
    archs: frozenset[int] | None = None
