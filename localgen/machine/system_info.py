"""CPU, memory and GPUs, as reported by the operating system."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from localgen.backends.memory.system import available_memory_bytes, total_memory_bytes

_PCI_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemInfo:
    """The system's hardware.

    cpu_flags: in the kernel's names.
    cpu_quota: CPUs allowed by a container; None if unlimited.
    ram_bytes: within the limits of control groups.
    nvidia: GPUs listed by nvidia-smi; nvidia_error: why it failed.
    displays: vendors of the display adapters.
    """

    system: str
    cpu: str
    cpu_flags: frozenset[str]
    physical_cores: int
    logical_cores: int
    cpu_quota: float | None
    ram_bytes: int
    ram_available_bytes: int
    nvidia: tuple[str, ...]
    nvidia_error: str | None
    metal: bool
    displays: tuple[str, ...]


def read_system_info() -> SystemInfo:
    """Read the information now."""
    gpus, error = _query_nvidia_smi()
    return SystemInfo(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu_name(),
        cpu_flags=_cpu_flags(),
        physical_cores=psutil.cpu_count(logical=False) or 1,
        logical_cores=psutil.cpu_count() or 1,
        cpu_quota=cpu_quota(_read_text("/sys/fs/cgroup/cpu.max")),
        ram_bytes=total_memory_bytes(),
        ram_available_bytes=available_memory_bytes(),
        nvidia=gpus,
        nvidia_error=error,
        metal=sys.platform == "darwin" and platform.machine() == "arm64",
        displays=_display_vendors(),
    )


def cpu_quota(cpu_max: str) -> float | None:
    """Number of CPUs allowed by cgroup v2. cpu_max: `quota period` in microseconds, or `max …`."""
    match cpu_max.split():
        case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period):
            return int(quota) / int(period)
    return None


def cpu_name() -> str:
    """Name of the processor."""
    if sys.platform == "darwin":
        return (
            _command_output(["sysctl", "-n", "machdep.cpu.brand_string"]).strip()
            or platform.machine()
        )
    names = _cpu_lines("model name")
    return names[0] if names else platform.processor() or platform.machine()


def _cpu_flags() -> frozenset[str]:
    lines = _cpu_lines("flags") or _cpu_lines("Features")
    return frozenset(lines[0].split()) if lines else frozenset()


def _cpu_lines(key: str) -> list[str]:
    pairs = (line.partition(":") for line in _read_text("/proc/cpuinfo").splitlines())
    return [value.strip() for name, _, value in pairs if name.strip() == key]


def _query_nvidia_smi() -> tuple[tuple[str, ...], str | None]:
    """Return the GPUs listed by nvidia-smi, and the error if it fails."""
    if shutil.which("nvidia-smi") is None:
        return (), None
    query = "--query-gpu=name,memory.total,memory.free,driver_version"
    try:
        found = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi: {error}"
    if found.returncode:
        output = (found.stdout + found.stderr).strip().splitlines()
        return (), f"nvidia-smi: {output[0] if output else f'status {found.returncode}'}"
    return tuple(line.strip() for line in found.stdout.splitlines() if line.strip()), None


def _display_vendors() -> tuple[str, ...]:
    vendors = (
        _read_text(path).strip() for path in Path("/sys/class/drm").glob("card*/device/vendor")
    )
    return tuple(sorted({_PCI_VENDORS[vendor] for vendor in vendors if vendor in _PCI_VENDORS}))


def _command_output(command: list[str]) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _read_text(path: str | Path) -> str:
    try:
        return Path(os.fspath(path)).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
