"""Limits of well-known GPUs from their datasheets. It needs no package: benchmarks use it too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Peak figures of one GPU.

    key: its name in options. device_name: a part of the name that its driver reports.
    memory_bytes: usable by a model. flops: dense 16-bit products with 32-bit sums, in 1/s.
    fp8_flops: the same for 8-bit floats; None if the GPU has none. link_bytes_per_s: to other GPUs,
    in one direction; None if several cannot share a model.
    """

    key: str
    device_name: str
    memory_bytes: float
    bytes_per_s: float
    flops: float
    fp8_flops: float | None
    link_bytes_per_s: float | None


def _gpu(
    key: str,
    device_name: str,
    gb: float,
    gb_per_s: float,
    tflops: float,
    fp8_tflops: float | None = None,
    link_gb_per_s: float | None = None,
) -> Accelerator:
    return Accelerator(
        key,
        device_name,
        gb * 1e9,
        gb_per_s * 1e9,
        tflops * 1e12,
        fp8_tflops * 1e12 if fp8_tflops else None,
        link_gb_per_s * 1e9 if link_gb_per_s else None,
    )


# NVIDIA's datasheets and architecture whitepapers, without sparsity. NVLink where there is one,
# else PCIe of 16 lanes. Apple publishes bandwidths only: the products are 256 per core and cycle,
# and a GPU may use three quarters of the largest memory sold.
ACCELERATORS = (
    _gpu("h200", "H200", 141, 4800, 989, 1979, 450),
    _gpu("h100", "H100 80GB HBM3", 80, 3350, 989, 1979, 450),
    _gpu("h100-pcie", "H100 PCIe", 80, 2000, 756, 1513, 64),
    _gpu("b200", "B200", 180, 8000, 2250, 4500, 900),
    _gpu("a100", "A100-SXM4-80GB", 80, 2039, 312, None, 300),
    _gpu("a100-40gb", "A100-SXM4-40GB", 40, 1555, 312, None, 300),
    _gpu("l40s", "L40S", 48, 864, 362, 733, 32),
    _gpu("l4", "NVIDIA L4", 24, 300, 121, 242, 32),
    _gpu("a10", "NVIDIA A10", 24, 600, 125, None, 32),
    _gpu("3090", "RTX 3090", 24, 936, 71, None, 32),
    _gpu("4090", "RTX 4090", 24, 1008, 165, 330, 32),
    _gpu("5090", "RTX 5090", 32, 1792, 209, 419, 64),
    _gpu("6000-ada", "RTX 6000 Ada", 48, 960, 364, 728, 32),
    _gpu("m1-max", "Apple M1 Max", 48, 400, 10.4),
    _gpu("m2-ultra", "Apple M2 Ultra", 144, 800, 27.2),
    _gpu("m3-ultra", "Apple M3 Ultra", 384, 819, 28.2),
    _gpu("m4-pro", "Apple M4 Pro", 48, 273, 9.2),
    _gpu("m4-max", "Apple M4 Max", 96, 546, 18.4),
)


def find_accelerator(key: str) -> Accelerator | None:
    """The GPU of an option, such as `h100`, `RTX 4090` or `M4 Max`; None if it is not known."""
    wanted = _normalized(key)
    return next((gpu for gpu in ACCELERATORS if wanted in _names(gpu)), None)


def accelerator_of_device(device_name: str) -> Accelerator | None:
    """The GPU with the name that a driver reports; None if it is not known."""
    return next((gpu for gpu in ACCELERATORS if gpu.device_name in device_name), None)


def _names(gpu: Accelerator) -> Iterable[str]:
    yield _normalized(gpu.key)
    yield _normalized(gpu.device_name)


def _normalized(name: str) -> str:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    return "".join(word for word in words if word not in ("rtx", "nvidia", "apple", "geforce"))
