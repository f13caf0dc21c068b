"""Kernel launches. They can be recorded instead of run, to find out which kernels to compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

# by kernel and options; then by device and kinds of the arguments
_known_launches: dict[tuple[Any, ...], dict[tuple[Any, ...], _KnownLaunch]] = {}
_recording: ContextVar[LaunchRecording | None] = ContextVar("recording", default=None)
_dependent: ContextVar[bool] = ContextVar("dependent", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A kernel configuration that the compile tests build.

    kernel: a triton.jit function. signature: Triton type of each argument, as `*bf16`, `i32` or
    `constexpr`. constants: values of the constexpr arguments. max_registers: limit per thread, or
    None for the compiler's choice. min_arch: lowest compute capability that uses it (80, 89, 90,
    100 or 120). archs: the capabilities that select it, or None for all.
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

    def __post_init__(self) -> None:
        # Triton compiles only with all arguments, also those with a default
        if "pdl" in self.kernel.arg_names:
            object.__setattr__(self, "signature", self.signature | {"pdl": "constexpr"})
            object.__setattr__(self, "constants", {"pdl": False} | self.constants)


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A recorded launch: a kernel and the arguments that select its compiled form.

    args: numbers, None, and dtypes in place of tensors. options: keyword arguments, such as
    constexpr values and num_warps.
    """

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LaunchRecording:
    """Launches recorded with meta tensors, in order, and the GPU they target.

    arch: compute capability, 90 for sm_90. num_sms: number of SMs (streaming multiprocessors).
    """

    arch: int
    num_sms: int
    launches: list[KernelLaunch] = field(default_factory=list)


@contextmanager
def record_launches(arch: int, num_sms: int) -> Iterator[LaunchRecording]:
    """Record launches instead of running them, in this context. For meta tensors."""
    planned = LaunchRecording(arch, num_sms)
    token = _recording.set(planned)
    try:
        yield planned
    finally:
        _recording.reset(token)


def current_recording() -> LaunchRecording:
    """Return the active recording."""
    planned = _recording.get()
    assert planned is not None, "kernels accept meta tensors only inside record_launches()"
    return planned


@contextmanager
def dependent_launches(enabled: bool) -> Iterator[None]:
    """Use programmatic dependent launch in this context; see `dependent_launch`."""
    token = _dependent.set(enabled)
    try:
        yield
    finally:
        _dependent.reset(token)


def ceil_div(count: int, size: int) -> int:
    """Number of blocks of a size. Outside of kernels, triton.cdiv takes several microseconds."""
    return -(-count // size)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number; see ceil_div."""
    return 1 << (number - 1).bit_length()


class Launcher:
    """Launches a kernel with the same options each time: constexpr arguments, num_warps and so on.

    Made once for each configuration and kept, because options are a large part of what a launch
    costs. Triton finds the compiled kernel for the arguments of a launch in some tens of
    microseconds. Later launches with arguments of the same kinds go to its launcher directly,
    without the hooks of Triton's own profiler.
    """

    __slots__ = ("_dependent", "_known", "kernel", "options")

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self._known = _known_launches.setdefault((id(kernel), *options.items()), {})
        waits = "pdl" in kernel.arg_names and "pdl" not in options
        self._dependent = {"pdl": True, "launch_pdl": True} if waits else None

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """Launch the kernel, or record the launch. args: tensors first, then numbers."""
        if self._dependent and _dependent.get():
            Launcher(self.kernel, **self.options, **self._dependent)(grid, *args)
            return
        planned = _recording.get()
        if planned is not None:
            kinds = tuple(arg.dtype if isinstance(arg, Tensor) else arg for arg in args)
            planned.launches.append(KernelLaunch(self.kernel, kinds, self.options))
            return
        device = args[0].get_device()
        kinds = (device, *map(argument_kind, args))
        known = self._known.get(kinds)
        if known is None:
            compiled = self.kernel[grid](*args, **self.options)
            if isinstance(compiled, CompiledKernel):  # not with Triton's interpreter
                self._known[kinds] = _KnownLaunch.of(compiled, self.kernel, len(args), self.options)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        fixed = (x, y, z, stream, known.function, known.metadata, None, None, None)
        known.launcher(*fixed, *args, *known.constants)


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """Return a callable that launches the kernel with its arguments and options; see Launcher.

    For kernels that a decode step does not launch in each layer.
    """

    def run(*args: Any, **options: Any) -> None:
        Launcher(kernel, **options)(grid, *args)

    return run


@dataclass(frozen=True, slots=True)
class _KnownLaunch:
    """A compiled kernel as Triton launches it. constants: the constexpr arguments, after others.

    compiled: keeps the module of `function` loaded.
    """

    compiled: CompiledKernel
    launcher: Callable[..., object]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]

    @classmethod
    def of(
        cls, compiled: CompiledKernel, kernel: Any, num_args: int, options: dict[str, Any]
    ) -> _KnownLaunch:
        """num_args: arguments that were not given by name."""
        rest = kernel.params[num_args:]
        assert all(param.is_constexpr for param in rest), kernel
        constants = tuple(options.get(param.name, param.default) for param in rest)
        metadata = compiled.packed_metadata
        return cls(compiled, compiled.run, compiled.function, metadata, constants)


def argument_kind(arg: Any) -> object:
    """Return a cache key: arguments with equal keys are compiled to the same kernel by Triton.

    Numbers: 1, multiples of 16, and those that need 64 bits. Tensors: dtype, and 16-byte alignment.
    """
    kind = type(arg)
    if kind is Tensor:  # asking a tensor's class about other things takes long
        return (arg.dtype, "unaligned") if arg.data_ptr() & 15 else arg.dtype
    if kind is int:
        if arg == 1 or arg.bit_length() > 31:
            return arg
        return "i32" if arg & 15 else "i32 of 16"
    if arg is None or kind is float or kind is bool:
        return kind if kind is float else (kind, arg)
    return (arg.dtype, "unaligned") if arg.data_ptr() & 15 else arg.dtype
