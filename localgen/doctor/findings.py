"""Findings of `localgen doctor`: problems, lost performance, and their remedies."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

from localgen.backends.units import format_size
from localgen.machine.llama_build import BrokenBuild, LlamaBuild
from localgen.machine.system_info import SystemInfo
from localgen.placement.backend_choice import INSTALL_COMMAND

# llama.cpp's name of a CPU feature: the kernel's
_CPU_FEATURES = {
    "AVX": "avx",
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX_VNNI": "avx_vnni",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "NEON": "asimd",
    "DOTPROD": "asimddp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
}
# setup leaves this one out with a GCC that miscompiles it (its bug 114098)
_AMX = ("AMX_INT8", "amx_int8")
_LOW_MEMORY_BYTES = 1 << 30
_REBUILD_COMMAND = (
    f"{shlex.quote(sys.executable)} -m pip install "
    "--force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem or a lost optimization. error: nothing runs until it is fixed."""

    message: str
    remedy: str
    error: bool = False


def collect_findings(
    machine: SystemInfo, build: LlamaBuild | BrokenBuild, no_cuda: str | None = None
) -> list[Finding]:
    """Return all findings, errors first. no_cuda: why the cuda backend cannot run."""
    if isinstance(build, BrokenBuild):
        return [
            _broken_build_finding(build),
            *_memory_findings(machine),
            *_driver_findings(machine),
        ]
    return [
        *_cuda_findings(machine, no_cuda),
        *_feature_findings(machine, build),
        *_amx_findings(machine, build),
        *_gpu_findings(machine, build),
        *_driver_findings(machine),
        *_quota_findings(machine, build),
        *_memory_findings(machine),
    ]


def missing_cpu_features(machine: SystemInfo, build: LlamaBuild) -> list[str]:
    """CPU features of the machine that the build does not use, in llama.cpp's names."""
    return [
        name
        for name, flag in _CPU_FEATURES.items()
        if flag in machine.cpu_flags and name not in build.features
    ]


def _broken_build_finding(build: BrokenBuild) -> Finding:
    remedy = f'CMAKE_ARGS="-DGGML_NATIVE=ON" {_REBUILD_COMMAND}'
    return Finding(f"llama.cpp is unusable: {build.reason}", remedy, error=True)


def _feature_findings(machine: SystemInfo, build: LlamaBuild) -> list[Finding]:
    missing = missing_cpu_features(machine, build)
    if not missing:
        return []
    remedy = f'CMAKE_ARGS="-DGGML_NATIVE=ON" {_REBUILD_COMMAND}'
    return [
        Finding(f"llama.cpp was built without {', '.join(missing)}, which this CPU has", remedy)
    ]


def _amx_findings(machine: SystemInfo, build: LlamaBuild) -> list[Finding]:
    name, flag = _AMX
    if flag not in machine.cpu_flags or name in build.features:
        return []
    message = f"llama.cpp was built without {name}, which this CPU has: prompts take longer"
    remedy = (
        f'CMAKE_ARGS="-DGGML_NATIVE=ON" {_REBUILD_COMMAND}; GCC before 11.5, 12.4 and 13.3 '
        "miscompiles AMX: with one of these, first install clang 16 or later with OpenMP (Debian, "
        "Ubuntu: apt install clang libomp-dev) and put CC=clang CXX=clang++ in front of the command"
    )
    return [Finding(message, remedy)]


def _gpu_findings(machine: SystemInfo, build: LlamaBuild) -> list[Finding]:
    if build.gpu:
        return []
    for there, maker, switch in (
        (bool(machine.nvidia) or "NVIDIA" in machine.displays, "NVIDIA", "GGML_CUDA"),
        (machine.metal, "Apple", "GGML_METAL"),
        ("AMD" in machine.displays, "AMD", "GGML_VULKAN"),
    ):
        if there:
            remedy = f'CMAKE_ARGS="-D{switch}=ON" {_REBUILD_COMMAND}'
            message = f"there is an {maker} GPU, but llama.cpp was built without {switch}"
            return [Finding(f"{message}: models run on the CPU", remedy)]
    return []


def _cuda_findings(machine: SystemInfo, no_cuda: str | None) -> list[Finding]:
    if not machine.nvidia or no_cuda is None:
        return []
    return [
        Finding(
            f"there is an NVIDIA GPU, but {no_cuda}",
            f"{shlex.quote(sys.executable)} -m {INSTALL_COMMAND}",
        )
    ]


def _driver_findings(machine: SystemInfo) -> list[Finding]:
    if machine.nvidia_error:
        return [Finding(machine.nvidia_error, "install or repair the NVIDIA driver")]
    return []


def _quota_findings(machine: SystemInfo, build: LlamaBuild) -> list[Finding]:
    quota = machine.cpu_quota
    if quota is None or quota >= build.threads:
        return []
    message = f"the container allows {quota:.1f} CPUs, but models use {build.threads} threads"
    return [Finding(message, f"-t {max(1, int(quota))}, or LOCALGEN_THREADS={max(1, int(quota))}")]


def _memory_findings(machine: SystemInfo) -> list[Finding]:
    available = machine.ram_available_bytes
    if available >= _LOW_MEMORY_BYTES:
        return []
    message = f"{format_size(available)} of {format_size(machine.ram_bytes)} memory is available"
    return [Finding(message, "close other programs, or use a smaller model or context")]
