"""Every kernel equals its reference in float64, on bfloat16 inputs of real models' sizes."""

from __future__ import annotations

import pytest

from benchmarks.gpu_parts.bench import GpuBench
from benchmarks.gpu_parts.case import Sizes
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.kernel_checks import GROUPS, kernels
from benchmarks.gpu_parts.plan import QUICK
from benchmarks.gpu_parts.report import GpuReport
from benchmarks.gpu_parts.smoke import smoke

pytestmark = pytest.mark.gpu
SEED = 1


def test_kernels_run_alone_and_from_a_graph(device: Device) -> None:
    report = GpuReport(True, SEED, {}, {}, [])
    smoke(GpuBench(device, QUICK, report))
    assert len(report.checks) == (2 if device.is_gpu else 1)
    assert [check.line() for check in report.failed] == []


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_equal_their_references(device: Device, sizes: Sizes, group: str) -> None:
    checks = list(kernels(device, sizes, SEED, group))
    assert checks
    assert [check.line() for check in checks if not check.passed] == []
