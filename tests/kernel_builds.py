"""Compiles kernels for GPUs that are not present, in processes without Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

KERNELS = "localgen.backends.cuda.kernels"
# compute capability: bytes of shared memory that one block can have
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Build:
    """Resources of a kernel in one configuration on one target; error: why it does not compile.

    shared: bytes per block. local: bytes per thread that did not fit in registers.
    """

    module: str
    variant: str
    arch: int
    registers: int = 0
    shared: int = 0
    local: int = 0
    error: str = ""


def builds() -> list[Build]:
    """Every shipped configuration of every kernel on every target it supports."""
    # a forked process would inherit Triton's interpreter, which is loaded already
    context = get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, initializer=_compile_for_real) as pool:
        tasks = [task for module in _modules() for task in pool.submit(_tasks, module).result()]
        return list(pool.map(_build, *zip(*tasks, strict=True)))


def _compile_for_real() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _modules() -> Iterator[str]:
    package = importlib.import_module(KERNELS)
    for module in pkgutil.walk_packages(package.__path__, f"{KERNELS}."):
        yield module.name


def _variants(module: str) -> list[Any]:
    found = importlib.import_module(module)
    return list(found.variants()) if hasattr(found, "variants") else []


def _tasks(module: str) -> list[tuple[str, int, int]]:
    return [
        (module, index, arch)
        for index, variant in enumerate(_variants(module))
        for arch in SHARED_BYTES
        if arch >= variant.min_arch and arch in (variant.archs or SHARED_BYTES)
    ]


def _build(module: str, index: int, arch: int) -> Build:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant = _variants(module)[index]
    names = list(variant.signature)
    # as at run time: torch's tensors begin at multiples of 16 bytes
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if variant.signature[name].startswith("*")
        and not variant.kernel.params[i].do_not_specialize_on_alignment
    }
    source = ASTSource(variant.kernel, variant.signature, variant.constants, aligned)
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "maxnreg": variant.max_registers,
    }
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:
        return Build(module, variant.name, arch, error=f"{type(error).__name__}: {error}"[:500])
    registers, local = _usage(compiled.asm["cubin"])
    return Build(module, variant.name, arch, registers, compiled.metadata.shared, local)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory per thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    found = _USAGE.search(shown.stdout)
    assert found is not None, shown.stdout
    registers, stack, _, local = map(int, found.groups())
    return registers, max(stack, local)
