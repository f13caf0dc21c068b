"""Every kernel in every shipped configuration compiles for every GPU it is for."""

from __future__ import annotations

import importlib

import pytest
from kernel_builds import KERNELS, SHARED_BYTES, Build, builds


@pytest.fixture(scope="module")
def compiled() -> list[Build]:
    return builds()


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_it_compiles_without_spills_and_within_shared_memory(
    compiled: list[Build], arch: int
) -> None:
    here = [build for build in compiled if build.arch == arch]
    assert not [build for build in here if build.error]
    assert not [build for build in here if build.local]
    assert not [build for build in here if build.shared > SHARED_BYTES[arch]]
    assert not [build for build in here if not build.registers], "nothing was read off the cubin"


@pytest.mark.parametrize(
    "module",
    [
        "norm",
        "rope",
        "activation",
        "attend_decode",
        "attend_prompt",
        "sampling",
        "rejection",
        "matmul",
        "int4",
        "fp8",
        "experts",
        "experts_many",
    ],
)
def test_every_kernel_says_what_it_ships(compiled: list[Build], module: str) -> None:
    assert hasattr(importlib.import_module(f"{KERNELS}.{module}"), "variants")
    assert {build.arch for build in compiled if build.module == module} >= {90, 100, 120}
