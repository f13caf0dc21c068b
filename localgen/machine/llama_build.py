"""Probe the llama.cpp build in a subprocess.

A build for another CPU is killed by a signal and a broken one cannot be imported: both end only the
probe, and are reported as the reason.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localgen.backends.typed_data import decode_json
from localgen.machine.python_process import python_command, python_environment

PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaBuild:
    """A working build of llama.cpp.

    features: CPU features it uses. devices: compute devices by ggml's names. gpu: layers can be
    offloaded to a GPU. threads: default number of threads.
    """

    version: str
    folder: str
    features: tuple[str, ...]
    devices: tuple[str, ...]
    gpu: bool
    mmap: bool
    threads: int


@dataclass(frozen=True, slots=True)
class BrokenBuild:
    """A build that cannot be used, and why."""

    reason: str


def probe_llamacpp() -> LlamaBuild | BrokenBuild:
    """Probe llama.cpp in a subprocess."""
    try:
        found = subprocess.run(
            python_command(__name__),
            env=python_environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return BrokenBuild(f"it cannot be probed: {error}")
    if found.returncode < 0:
        name = signal.Signals(-found.returncode).name
        hint = ", it was built for another CPU" if name == "SIGILL" else ""
        return BrokenBuild(f"it is killed by {name} when imported{hint}")
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["no message"])[-1]
        return BrokenBuild(f"it cannot be imported: {last}")
    return decode_json(found.stdout.splitlines()[-1], LlamaBuild)


def parse_features(system_info: str) -> list[str]:
    """Enabled features: `CPU : AVX2 = 1 | FMA = 0 | CUDA : ARCHS = 800` gives AVX2 and ARCHS."""
    return [name for name, value in re.findall(r"(\w+) = (\w+)", system_info) if value != "0"]


def _inspect_build() -> dict[str, Any]:
    import llama_cpp

    from localgen.backends.llamacpp.devices import list_devices
    from localgen.backends.memory.system import num_physical_cores

    return {
        "version": llama_cpp.__version__,
        "folder": str(Path(llama_cpp.__file__).parent),
        "features": parse_features(llama_cpp.llama_print_system_info().decode()),
        "devices": [f"{device.name}: {device.description}" for device in list_devices()],
        "gpu": llama_cpp.llama_supports_gpu_offload(),
        "mmap": llama_cpp.llama_supports_mmap(),
        "threads": num_physical_cores(),
    }


if __name__ == "__main__":
    print(json.dumps(_inspect_build()))
