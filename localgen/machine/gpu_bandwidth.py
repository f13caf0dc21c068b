"""Measure the memory bandwidth of a GPU with torch, in a subprocess."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

from localgen.machine.python_process import python_command, python_environment

_GPU_TIMEOUT_S = 60.0
_GPU_BLOCK_BYTES, _GPU_ROUNDS = 1 << 30, 10


def measure_gpu_bandwidth(index: int) -> float:
    """Bytes per second of the GPU with torch index `index`; 0 if it cannot be measured."""
    if find_spec("torch") is None:
        return 0.0
    try:
        done = subprocess.run(
            python_command(__name__, str(index)),
            env=python_environment(),
            capture_output=True,
            text=True,
            timeout=_GPU_TIMEOUT_S,
            check=False,
        )
        return float(done.stdout.split()[-1]) if done.returncode == 0 else 0.0
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return 0.0


def _copy_bandwidth(index: int) -> float:
    import torch

    device = torch.device("cuda", index)
    room = torch.cuda.mem_get_info(device)[0] // 4
    source = torch.ones(min(_GPU_BLOCK_BYTES, room) // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(_GPU_ROUNDS):
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize(device)
        best_s = min(best_s, begin.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / best_s  # read once, written once


if __name__ == "__main__":
    print(_copy_bandwidth(int(sys.argv[1])))
