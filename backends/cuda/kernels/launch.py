"""Launches of kernels, which can be listed instead, to know what a step will need compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_recording: ContextVar[LaunchRecording | None] = ContextVar("recording", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """kernel: a triton.jit function. signature: Triton's type of each argument, as `*bf16`, `i32`
    or `constexpr`. constants: values of those that are constexpr. min_arch: compute capability
    below which it is not used (80, 89, 90, 100, 120). archs: those that it is chosen for; None:
    all of these. max_registers: most of a thread; None: as the compiler has it.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None
    min_arch: int = 80
    archs: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel and what it is compiled for. args: numbers, None, and dtypes in place of tensors.

    options: constants by name, num_warps and the like.
    """

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LaunchRecording:
    """Launches on meta tensors, in order, and the GPU that they are for.

    arch: compute capability as in sm_90. num_sms: multiprocessors.
    """

    arch: int
    num_sms: int
    launches: list[KernelLaunch] = field(default_factory=list)


@contextmanager
def record_launches(arch: int, num_sms: int) -> Iterator[LaunchRecording]:
    """In this thread, launches are listed and not made. For meta tensors."""
    planned = LaunchRecording(arch, num_sms)
    token = _recording.set(planned)
    try:
        yield planned
    finally:
        _recording.reset(token)


def current_recording() -> LaunchRecording:
    """What is being planned."""
    planned = _recording.get()
    assert planned is not None, "meta tensors have kernels only while these are planned"
    return planned


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """What to call with the kernel's arguments."""
    planned = _recording.get()
    if planned is None:
        return kernel[grid]  # type: ignore[no-any-return]

    def listed(*args: Any, **options: Any) -> None:
        kinds = tuple(arg.dtype if isinstance(arg, Tensor) else arg for arg in args)
        planned.launches.append(KernelLaunch(kernel, kinds, options))

    return listed
