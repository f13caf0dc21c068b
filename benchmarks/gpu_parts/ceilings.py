"""Hardware ceilings: bandwidth of reading and copying, throughput of bfloat16 matrix products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.report import GpuReport, Row

PART, COPY = "ceilings", "copy"


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes/s of a copy, reads plus writes, and of the datasheet; None if unknown."""

    copy_bytes_s: float | None
    datasheet_bytes_s: float | None

    @classmethod
    def of(cls, rows: Sequence[Row], device: Device) -> Ceilings:
        """Ceilings as measured in these rows."""
        copies = [row for row in rows if row.part == PART and row.test.startswith(COPY)]
        measured = copies[-1].median("gb_s") if copies else None
        return cls(measured and measured * 1e9, device.datasheet_bytes_s)

    def shares(self, bytes_s: float) -> dict[str, float]:
        """Return a bandwidth as shares of the known ceilings, as figures of a report."""
        known = {"copy": self.copy_bytes_s, "datasheet": self.datasheet_bytes_s}
        return {f"share_{name}": bytes_s / most for name, most in known.items() if most}


def measure(device: Device, report: GpuReport, *, size: int, side: int) -> None:
    """Measure the ceilings. size: bytes of the buffers. side: of the square matrices."""
    source = torch.randn(size // 4, device=device.torch)
    target = torch.empty_like(source)
    copy_s = device.median_s([lambda: target.copy_(source)])
    # a reduction reads everything once and writes almost nothing
    read_s = min(device.median_s([read]) for read in _readers(source))
    found = Ceilings(2 * source.nbytes / copy_s, device.datasheet_bytes_s)
    for name, bytes_s in (("read", source.nbytes / read_s), (COPY, 2 * source.nbytes / copy_s)):
        figures = {"gb_s": bytes_s / 1e9} | found.shares(bytes_s)
        report.add(PART, f"{name} of {size / 1e9:.2g} GB", "torch", [figures])
    # random values, because zeros multiply faster than real data
    one, other = (
        torch.randn(side, side, device=device.torch, dtype=torch.bfloat16) for _ in range(2)
    )
    product_s = device.median_s([lambda: one @ other])
    report.add(
        PART,
        f"bf16 product of {side}²",
        "torch",
        [{"tflop_s": 2 * side**3 / product_s / 1e12}],
    )


def _readers(x: torch.Tensor) -> list[Callable[[], object]]:
    """Return ways to read all of x; the fastest one depends on the GPU."""
    rows = x.view(1024, -1)
    return [lambda: x.sum(), lambda: rows.sum(1), lambda: rows.amax(1)]
