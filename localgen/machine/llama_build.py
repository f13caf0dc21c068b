"""What llama.cpp was built with, found in an interpreter of its own.

A build for another CPU dies by a signal, a broken one cannot be imported: here that ends a
probe, and the one who asked says so in a sentence.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from localgen.machine.python_process import python_command, python_environment

PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaBuild:
    """A working build. features: the CPU features it uses; threads: what models get by default.

    devices: what it can compute on, as it names them; gpu: whether layers can go to a GPU.
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
    """Why llama.cpp cannot be used."""

    reason: str


def probe_llamacpp() -> LlamaBuild | BrokenBuild:
    """Look at llama.cpp from outside."""
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
        return BrokenBuild(f"cannot be looked at: {error}")
    if found.returncode < 0:
        name = signal.Signals(-found.returncode).name
        hint = ", it was built for another CPU" if name == "SIGILL" else ""
        return BrokenBuild(f"it ends with {name} when imported{hint}")
    if found.returncode:
        last = (found.stderr.strip().splitlines() or ["no message"])[-1]
        return BrokenBuild(f"it cannot be imported: {last}")
    return msgspec.json.decode(found.stdout.splitlines()[-1], type=LlamaBuild)


def parse_features(system_info: str) -> list[str]:
    """`AVX2` and `CUDA` of `CPU : AVX2 = 1 | FMA = 0 | CUDA : ARCHS = 800`."""
    return [name for name, value in re.findall(r"(\w+) = (\w+)", system_info) if value != "0"]


def _inspect_build() -> dict[str, Any]:
    import llama_cpp

    from localgen.backends.llamacpp.devices import list_devices
    from localgen.backends.llamacpp.options import num_physical_cores

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
