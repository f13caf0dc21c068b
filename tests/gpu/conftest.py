"""Fixtures of the tests on a GPU, which skip with the reason where they cannot run.

They need pytest, torch, Triton, numpy and psutil: `make test-gpu` leaves out tests/conftest.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from fake_capture import capture_between_steps

from benchmarks.gpu_parts import case
from benchmarks.gpu_parts.case import Sizes
from benchmarks.gpu_parts.decoder_checks import CheckedModel
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.shapes import CHECKED

SEED = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu",
        dest="gpu_tests_on_cpu",
        action="store_true",
        help="run the tests for a GPU on the CPU at toy size, to try them",
    )


def on_cpu(config: pytest.Config) -> bool:
    return bool(config.getoption("gpu_tests_on_cpu", default=False))


def skip_reason(config: pytest.Config) -> str:
    """Why the tests cannot run; empty if they can."""
    if on_cpu(config):
        return ""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "kernels are interpreted in this run: make test-gpu"
    return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = skip_reason(config)
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Device:
    return Device.found(gpu=not on_cpu(request.config))


@pytest.fixture(scope="session")
def sizes(device: Device) -> Sizes:
    """Sizes of the inputs of kernels."""
    return case.FULL if device.is_gpu else case.QUICK


@pytest.fixture(scope="session")
def model(device: Device) -> CheckedModel:
    """A small Llama with random weights."""
    return CheckedModel.of(CHECKED[0], device, SEED)


@pytest.fixture(autouse=True)
def captured_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs are captured in the first answer, so that short ones use them."""
    capture_between_steps(monkeypatch)


@pytest.fixture(autouse=True)
def working_device(device: Device) -> Iterator[None]:
    """Ends the run if a test leaves the GPU unusable: all tests after it would fail too."""
    yield
    try:
        device.synchronize()
    except RuntimeError as error:
        pytest.exit(f"the GPU computes nothing more in this process: {error}", returncode=1)
