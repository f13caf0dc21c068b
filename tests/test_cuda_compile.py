"""Every kernel in every shipped configuration compiles for every GPU it supports."""

from __future__ import annotations

import importlib

import pytest
from kernel_builds import KERNELS, SHARED_BYTES, Build, builds


@pytest.fixture(scope="module")
def compiled() -> list[Build]:
    return builds()


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_kernels_compile_without_spills_and_within_shared_memory(
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
        "attention.decode",
        "attention.prefill",
        "sampling.sample",
        "sampling.rejection",
        "gemm.dense",
        "gemm.int4",
        "gemm.fp8",
        "moe.fused_experts",
        "moe.grouped_experts",
    ],
)
def test_every_kernel_lists_its_variants(compiled: list[Build], module: str) -> None:
    name = f"{KERNELS}.{module}"
    assert hasattr(importlib.import_module(name), "variants")
    assert {build.arch for build in compiled if build.module == name} >= {90, 100, 120}
