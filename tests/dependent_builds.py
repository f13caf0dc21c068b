"""Compiles kernels for programmatic dependent launch, in a process without Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ARCH = 90
# of each kernel, because compiling and disassembling take a second
_MOST_VARIANTS = 4
_KERNELS = "localgen.backends.cuda.kernels"
_MODULES = (
    "norm",
    "rope",
    "gemm.gemv",
    "gemm.skinny_gemm",
    "gemm.qkv_rope",
    "gemm.fp8",
    "gemm.int4_gemm",
    "gemm.int4_gemv",
    "gemm.int4_qkv_rope",
    "attention.decode",
    "attention.splits",
)


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel compiled for dependent launch. arguments: names of its parameters in PTX."""

    variant: str
    kernel: str
    arguments: list[str]
    ptx: str
    sass: str


def dependent_builds() -> list[Code]:
    """Some variants of all kernels that have a `pdl` argument."""
    # a forked process would inherit Triton's interpreter, which may be loaded already
    context = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_compile_for_real) as pool:
        return [code for found in pool.map(_compile_module, _MODULES) for code in found]


def _compile_for_real() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _compile_module(module: str) -> list[Code]:
    by_kernel: dict[str, list[Any]] = {}
    for variant in importlib.import_module(f"{_KERNELS}.{module}").variants():
        if "pdl" in variant.kernel.arg_names and ARCH in (variant.archs or (ARCH,)):
            by_kernel.setdefault(variant.kernel.fn.__name__, []).append(variant)
    return [
        _compile(variant)
        for variants in by_kernel.values()
        for variant in variants[:: -(-len(variants) // _MOST_VARIANTS)]
    ]


def _compile(variant: Any) -> Code:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = variant.signature
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(variant.signature)
        if signature[name].startswith("*")
        and not variant.kernel.params[i].do_not_specialize_on_alignment
    }
    source = ASTSource(variant.kernel, signature, variant.constants | {"pdl": True}, aligned)
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "maxnreg": variant.max_registers,
        "launch_pdl": True,
    }
    built = triton.compile(source, target=GPUTarget("cuda", ARCH, 32), options=options)
    assert built.metadata.launch_pdl
    return Code(
        variant.name,
        variant.kernel.fn.__name__,
        [name for name, kind in signature.items() if kind != "constexpr"],
        built.asm["ptx"],
        _sass(built.asm["cubin"]),
    )


def _sass(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = ["--dump-resource-usage", "--dump-sass", file.name]
        return subprocess.run([tool, *shown], capture_output=True, text=True, check=True).stdout
