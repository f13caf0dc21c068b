"""Compile the kernels for GPUs that are not present; show registers, spills, memory and waits.

python -m benchmarks.kernel_resources [--only attention.decode] [--arch 90] [--before FILE]
[--output FILE]: no GPU is needed. --only and --arch may be repeated. The machine code (SASS) shows
which loops copy to shared memory asynchronously, and how many groups of copies each wait leaves in
flight: if 0, a loop does not load while it computes. With --before, the file of another run, each
kernel is shown before and after.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.measure import command, table

KERNELS = "localgen.backends.cuda.kernels"
# compute capability: bytes of shared memory that one block can have
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);")
_BRANCH = re.compile(r"\bBRA\b.*\b0x([0-9a-f]+)")
_WAIT = re.compile(r"\bDEPBAR\.LE SB0, 0x([0-9a-f]+)")
_GLOBAL_LOAD = re.compile(r"\bLDG\b")
_BYTE_LOAD = re.compile(r"\bLD[SG]\b\S*\.[US]8\b")


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions of an innermost loop.

    copies: asynchronous copies to shared memory. waits: groups of copies that each wait for copies
    leaves in flight. byte_loads: loads of a single byte. global_loads: from global memory to
    registers, which stop the loop until they arrive.
    """

    instructions: int
    copies: int
    waits: tuple[int, ...]
    byte_loads: int
    global_loads: int = 0


@dataclass(frozen=True, slots=True)
class Build:
    """Resources of a kernel in one configuration on one target. error: why it does not compile.

    shared: bytes per block. local: bytes per thread that did not fit in registers. loops: empty
    unless the machine code was read.
    """

    module: str
    variant: str
    arch: int
    registers: int = 0
    shared: int = 0
    local: int = 0
    loops: tuple[Loop, ...] = ()
    error: str = ""

    @property
    def in_flight(self) -> int | None:
        """Smallest number of copy groups in flight during a loop, or None if no loop copies."""
        return min((min(loop.waits, default=0) for loop in self.loops if loop.copies), default=None)

    @property
    def byte_loads(self) -> int:
        """Loads of a single byte in all loops."""
        return sum(loop.byte_loads for loop in self.loops)


def builds(
    only: str = "", archs: Collection[int] = tuple(SHARED_BYTES), *, with_loops: bool = False
) -> list[Build]:
    """Compile every shipped configuration of every kernel for every target it supports.

    only: beginning of the modules' names, as `attention`. with_loops: read the loops as well, which
    takes half a second for each configuration.
    """
    # a forked process would inherit Triton's interpreter, which may be loaded already
    context = get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, initializer=_compile_for_real) as pool:
        tasks = [
            (module, index, arch, with_loops)
            for module in _modules(only)
            for index, arch in pool.submit(_configurations, module, archs).result()
        ]
        # in chunks: for a few, a second process would import more than it compiles
        return list(pool.map(_build, *zip(*tasks, strict=True), chunksize=8)) if tasks else []


def _compile_for_real() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _modules(only: str) -> Iterator[str]:
    package = importlib.import_module(KERNELS)
    for module in pkgutil.walk_packages(package.__path__, f"{KERNELS}."):
        if module.name.startswith(f"{KERNELS}.{only}"):
            yield module.name


def _variants(module: str) -> list[Any]:
    found = importlib.import_module(module)
    return list(found.variants()) if hasattr(found, "variants") else []


def _configurations(module: str, archs: Collection[int]) -> list[tuple[int, int]]:
    return [
        (index, arch)
        for index, variant in enumerate(_variants(module))
        for arch in archs
        if arch >= variant.min_arch and arch in (variant.archs or archs)
    ]


def _build(module: str, index: int, arch: int, with_loops: bool) -> Build:
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
    shown = _dump(compiled.asm["cubin"], with_loops)
    found = _USAGE.search(shown)
    assert found is not None, shown
    registers, stack, _, local = map(int, found.groups())
    shared, loops = compiled.metadata.shared, tuple(read_loops(shown))
    return Build(module, variant.name, arch, registers, shared, max(stack, local), loops)


def _dump(cubin: bytes, with_code: bool) -> str:
    """Resource usage of a cubin, and its machine code."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    shown = ["--dump-resource-usage", *(["--dump-sass"] if with_code else [])]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, *shown, file.name], capture_output=True, text=True, check=True)
    return done.stdout


def read_loops(sass: str) -> Iterator[Loop]:
    """Yield the innermost loops of a kernel. sass: output of cuobjdump."""
    code = {int(at, 16): text for at, text in _INSTRUCTION.findall(sass)}
    ranges = [
        (target, at)
        for at, text in code.items()
        if (branch := _BRANCH.search(text)) and (target := int(branch[1], 16)) < at
    ]
    for begin, end in ranges:
        if any(begin <= low and high < end for low, high in ranges):
            continue
        body = [text for at, text in code.items() if begin <= at <= end]
        yield Loop(
            len(body),
            sum("LDGSTS" in text for text in body),
            tuple(int(wait[1], 16) for text in body if (wait := _WAIT.search(text))),
            sum(bool(_BYTE_LOAD.search(text)) for text in body),
            sum(bool(_GLOBAL_LOAD.search(text)) for text in body),
        )


def load_builds(file: Path) -> list[Build]:
    """Builds of an earlier run."""
    return [
        Build(**one | {"loops": tuple(Loop(**loop) for loop in one["loops"])})
        for one in json.loads(file.read_text(encoding="utf-8"))["builds"]
    ]


def comparison(after: Sequence[Build], before: Sequence[Build]) -> str:
    """Markdown table; a cell that changed shows both values, before → after."""
    earlier = {(b.module, b.variant, b.arch): b for b in before}
    rows = []
    for build in after:
        old, new = earlier.get((build.module, build.variant, build.arch)), _cells(build)
        pairs = zip(new if old is None else _cells(old), new, strict=True)
        cells = [b if a == b else f"{a} → {b}" for a, b in pairs]
        rows.append(
            (build.module.removeprefix(f"{KERNELS}."), build.variant, f"sm_{build.arch}", *cells)
        )
    head = (
        "module",
        "variant",
        "target",
        "registers",
        "shared",
        "spilled",
        "in flight",
        "byte loads",
    )
    return table(head, rows)


def _cells(build: Build) -> tuple[str, ...]:
    if build.error:
        return (build.error.partition("\n")[0], *("",) * 4)
    in_flight = "-" if build.in_flight is None else str(build.in_flight)
    shared = f"{build.shared / 1024:.1f} KiB"
    return str(build.registers), shared, f"{build.local} B", in_flight, str(build.byte_loads)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel_resources")
    parser.add_argument("--only", action="append", help="beginning of modules' names: attention")
    parser.add_argument("--arch", type=int, action="append", choices=SHARED_BYTES)
    parser.add_argument("--before", type=Path, help="result file to compare with")
    parser.add_argument("--output", type=Path, help="result file to write")
    given = parser.parse_args(arguments)
    before = load_builds(given.before) if given.before else []
    archs = given.arch or tuple(SHARED_BYTES)
    found = [b for only in given.only or [""] for b in builds(only, archs, with_loops=True)]
    print(comparison(found, before))
    if given.output:
        whole = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "triton": version("triton"),
            "command": command("benchmarks.kernel_resources", arguments),
            "before": [asdict(build) for build in before],
            "builds": [asdict(build) for build in found],
        }
        given.output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
