"""The device under test and its timing: CUDA events on a GPU, else the host clock."""

from __future__ import annotations

import contextlib
import gc
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch
from torch import Tensor

import localgen
from benchmarks.measure import machine

REPEATS = 5
# calls are repeated until a measurement takes about this long
_MEASURED_S = 2e-3
_LIBRARIES = ("torch", "triton", "transformers", "numpy", "safetensors")
# memory bandwidth in bytes/s from the vendors' datasheets, by a part of torch's device name
_DATASHEET = {
    "H200": 4.8e12,
    "H100 80GB HBM3": 3.35e12,
    "H100 PCIe": 2.0e12,
    "A100-SXM4-80GB": 2.039e12,
    "A100-SXM4-40GB": 1.555e12,
    "B200": 8.0e12,
    "L40S": 0.864e12,
    "RTX 4090": 1.008e12,
    "RTX 5090": 1.792e12,
}


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the CPU for tests of the benchmark."""

    torch: torch.device

    @classmethod
    def found(cls, *, gpu: bool) -> Device:
        """Return the first GPU if `gpu` is set and there is one, else the CPU."""
        return cls(torch.device("cuda", 0) if gpu and torch.cuda.is_available() else _CPU)

    @property
    def is_gpu(self) -> bool:
        return self.torch.type == "cuda"

    @property
    def name(self) -> str:
        """Device name as reported by torch."""
        return torch.cuda.get_device_name(self.torch) if self.is_gpu else "cpu"

    @property
    def datasheet_bytes_s(self) -> float | None:
        """Memory bandwidth of the datasheet; None if unknown."""
        return next((value for part, value in _DATASHEET.items() if part in self.name), None)

    @property
    def memory_bytes(self) -> int:
        """Memory of a GPU."""
        return int(torch.cuda.get_device_properties(self.torch).total_memory)

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch)

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the duration of a run."""
        if not self.is_gpu:
            begun_s = time.perf_counter()
            run()
            return time.perf_counter() - begun_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def median_s(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the median duration of a call.

        calls: the same work on different memory, one after the other, so that inputs are not in the
        cache. On a GPU they are replayed from a CUDA graph, without launch times.
        """

        def run_all() -> None:
            for call in calls:
                call()

        with torch.inference_mode():
            run = self._captured(run_all)
            run()
            once_s = self.seconds(run)
            times = max(1, math.ceil(_MEASURED_S / max(once_s, 1e-9))) if self.is_gpu else 1

            def repeated() -> None:
                for _ in range(times):
                    run()

            took = [self.seconds(repeated) for _ in range(REPEATS)]
        return statistics.median(took) / times / len(calls)

    def _captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return the replay of a CUDA graph of `run`, or `run` itself if it cannot be captured."""
        run()  # compile kernels and create library handles
        if not self.is_gpu:
            return run
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except RuntimeError:
            torch.cuda.synchronize()
            return run
        return graph.replay

    def clocks(self) -> str:
        """Clocks, temperature and power at this moment; empty on a CPU."""
        wanted = "clocks.sm,clocks.mem,temperature.gpu,power.draw"
        return _nvidia_smi(wanted) if self.is_gpu else ""

    def reset_peak(self) -> None:
        """Reset the peak memory statistics."""
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.torch)

    def peak_gb(self) -> float:
        """Peak memory of tensors since reset_peak; on a CPU, the current resident memory."""
        if self.is_gpu:
            return torch.cuda.max_memory_allocated(self.torch) / 1e9
        return float(psutil.Process().memory_info().rss) / 1e9

    def free_bytes(self) -> int | None:
        """Memory that no process uses, after unused cached memory is returned; None on a CPU."""
        if not self.is_gpu:
            return None
        self.free()
        return int(torch.cuda.mem_get_info(self.torch)[0])

    def free(self) -> None:
        """Return unused cached memory to the driver; on a CPU there is none."""
        if self.is_gpu:
            gc.collect()  # engines and their publish callbacks form reference cycles
            torch.cuda.empty_cache()

    def describe(self) -> dict[str, Any]:
        """Describe the machine and the GPU."""
        found: dict[str, Any] = machine()
        if not self.is_gpu:
            return found | {"gpu": None}
        own = torch.cuda.get_device_properties(self.torch)
        return found | {
            "gpu": self.name,
            "gpu_memory_bytes": own.total_memory,
            "gpu_processors": own.multi_processor_count,
            "gpu_l2_bytes": getattr(own, "L2_cache_size", None),
            "gpu_capability": f"{own.major}.{own.minor}",
            "gpu_datasheet_bytes_s": self.datasheet_bytes_s,
            "gpu_state": _nvidia_smi("driver_version,clocks.max.sm,clocks.max.mem,power.limit"),
        }


_CPU = torch.device("cpu")


def _nvidia_smi(fields: str) -> str:
    """The fields as printed by nvidia-smi; empty if it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Versions of localgen, Python, CUDA and the installed libraries."""
    found = {"localgen": localgen.__version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that torch allocates in the block with NaN or the largest integer."""
    deterministic: Any = torch.utils.deterministic
    filled, was = (
        deterministic.fill_uninitialized_memory,
        torch.are_deterministic_algorithms_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(was)


def largest_difference(found: Tensor, wanted: Tensor) -> str:
    """Where two tensors differ most, with both values there."""
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    off = (found.double() - wanted.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    at = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    return f"most at {list(at)}: {found[at].item():.4g}, wanted {wanted[at].item():.4g}"


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖; infinite if it is NaN or the shapes differ."""
    if found.shape != wanted.shape:
        return math.inf
    exact = wanted.double()
    off = float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))
    return math.inf if math.isnan(off) else off
