"""Limits of well-known GPUs from their datasheets."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Peak figures of one GPU.

    key: its name in options. device_name: the name that its driver reports, without the maker's.
    memory_bytes: usable by a model. flops: dense 16-bit operations with 32-bit sums per second, a
    product and its sum counting as two. fp8_flops: the same for 8-bit floats; None if the GPU has
    none. link_bytes_per_s: to other GPUs, in one direction; None if several cannot share a model.
    """

    key: str
    device_name: str
    memory_bytes: float
    bytes_per_s: float
    flops: float
    fp8_flops: float | None
    link_bytes_per_s: float | None

    @property
    def has_cuda(self) -> bool:
        return not self.device_name.startswith("Apple")


def _gpu(
    key: str,
    device_name: str,
    gib: float,
    gb_per_s: float,
    tflops: float,
    fp8_tflops: float | None = None,
    link_gb_per_s: float | None = None,
) -> Accelerator:
    return Accelerator(
        key,
        device_name,
        gib * 2**30,
        gb_per_s * 1e9,
        tflops * 1e12,
        fp8_tflops * 1e12 if fp8_tflops else None,
        link_gb_per_s * 1e9 if link_gb_per_s else None,
    )


# memory: as drivers report it, with error correction; else NVIDIA's datasheets and architecture
# whitepapers, without sparsity. Links: NVLink of modules, PCIe of 16 lanes of cards. Apple: 256
# operations per core and cycle; a GPU may use three quarters of the largest memory sold.
ACCELERATORS = (
    _gpu("h200", "H200", 140, 4800, 989, 1979, 450),
    _gpu("h100", "H100 80GB HBM3", 79.6, 3350, 989, 1979, 450),
    _gpu("h100-pcie", "H100 PCIe", 79.6, 2000, 756, 1513, 64),
    _gpu("b200", "B200", 179, 8000, 2250, 4500, 900),
    _gpu("a100", "A100-SXM4-80GB", 80, 2039, 312, None, 300),
    _gpu("a100-40gb", "A100-SXM4-40GB", 40, 1555, 312, None, 300),
    _gpu("l40s", "L40S", 45, 864, 362, 733, 32),
    _gpu("l4", "L4", 22.5, 300, 121, 242, 32),
    _gpu("a10", "A10", 22.5, 600, 125, None, 32),
    _gpu("3090", "RTX 3090", 24, 936, 71, None, 32),
    _gpu("4090", "RTX 4090", 24, 1008, 165, 330, 32),
    _gpu("5090", "RTX 5090", 31.8, 1792, 209, 419, 64),
    _gpu("6000-ada", "RTX 6000 Ada Generation", 48, 960, 364, 728, 32),
    _gpu("m1-max", "Apple M1 Max", 48, 400, 10.4),
    _gpu("m2-ultra", "Apple M2 Ultra", 144, 800, 27.2),
    _gpu("m3-ultra", "Apple M3 Ultra", 384, 819, 28.2),
    _gpu("m4-pro", "Apple M4 Pro", 48, 273, 9.2),
    _gpu("m4-max", "Apple M4 Max", 96, 546, 18.4),
)
_MAKERS = re.compile(r"^(NVIDIA )?(GeForce )?")
# what people write or leave out
_OPTIONAL = re.compile(r"[^a-z0-9]|nvidia|geforce|apple|rtx|sxm\d?|80gb|hbm3|generation")


def find_accelerator(name: str) -> Accelerator | None:
    """The GPU of an option, such as `h100`, `RTX 4090` or `M4 Max`; None if it is not known."""
    wanted = _short_name(name)
    return next(
        (gpu for gpu in ACCELERATORS if wanted in map(_short_name, (gpu.key, gpu.device_name))),
        None,
    )


def accelerator_of_device(device_name: str) -> Accelerator | None:
    """The GPU with the name that a driver reports; None if it is not known."""
    name = _MAKERS.sub("", device_name)
    return next((gpu for gpu in ACCELERATORS if gpu.device_name == name), None)


def _short_names(gpu: Accelerator) -> tuple[str, str]:
    return _short_name(gpu.key), _short_name(gpu.device_name)


def _short_name(name: str) -> str:
    return _OPTIONAL.sub("", _OPTIONAL.sub("", name.lower()))
