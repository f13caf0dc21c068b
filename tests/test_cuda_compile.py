"""Every kernel in every shipped configuration compiles for every GPU it supports."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import kernel_resources
from benchmarks.kernel_resources import (
    KERNELS,
    SHARED_BYTES,
    Build,
    Loop,
    builds,
    load_builds,
    main,
    read_loops,
)


@pytest.fixture(scope="module")
def compiled() -> list[Build]:
    return builds()


@pytest.fixture(scope="module")
def with_loops() -> list[Build]:
    of = {"attention": (80, 90), "gemm.int4": (90,)}
    return [build for only, archs in of.items() for build in builds(only, archs, with_loops=True)]


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
        "decode_inputs",
        "fp8_rows",
        "attention.decode",
        "attention.prefill",
        "attention.splits",
        "sampling.sample",
        "sampling.rejection",
        "gemm.gemv",
        "gemm.skinny_gemm",
        "gemm.qkv_rope",
        "gemm.int4_gemm",
        "gemm.int4_gemv",
        "gemm.int4_format",
        "gemm.int4_qkv_rope",
        "gemm.int4_wide",
        "gemm.fp8",
        "moe.fused_experts",
        "moe.grouped_experts",
    ],
)
def test_every_kernel_lists_its_variants(compiled: list[Build], module: str) -> None:
    name = f"{KERNELS}.{module}"
    assert hasattr(importlib.import_module(name), "variants")
    assert {build.arch for build in compiled if build.module == name} >= {90, 100, 120}


@pytest.mark.parametrize("module", ["gemm.int4_gemm", "gemm.int4_wide"])
def test_int4_loops_copy_codes_scales_and_zeros_while_they_compute(
    with_loops: list[Build], module: str
) -> None:
    """On sm_90: copies of a later turn are in flight, and nothing else is loaded."""
    found = [
        build
        for build in with_loops
        if build.module == f"{KERNELS}.{module}" and "sum-splits" not in build.variant
    ]
    assert found
    for build in found:
        assert build.in_flight, build
        assert [loop.global_loads for loop in build.loops if loop.copies] == [0], build


@pytest.mark.parametrize("arch", [80, 90])
def test_attention_loads_keys_and_values_ahead(with_loops: list[Build], arch: int) -> None:
    """At each wait of the loops, copies of the next block are in flight; no load is of one byte."""
    found = [
        build
        for build in with_loops
        if build.arch == arch and ".attention." in build.module and "combine" not in build.variant
    ]
    assert {build.module for build in found} == {
        f"{KERNELS}.attention.decode",
        f"{KERNELS}.attention.prefill",
    }
    for build in found:
        copying = [loop for loop in build.loops if loop.copies]
        assert len(copying) == 2, f"{build}: one loop with masks, one without"
        assert build.in_flight, build
        assert not build.byte_loads, build


_SASS = """
        /*0000*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR2][R2.64] ;    /* 0x0 */
        /*0010*/              @!P1 BRA 0x80 ;                                      /* 0x0 */
        /*0020*/                   S2R R0, SR_TID.X ;                              /* 0x0 */
        /*0030*/                   DEPBAR.LE SB0, 0x2 ;                            /* 0x0 */
        /*0040*/                   LDS.U8 R3, [R0+0x4] ;                           /* 0x0 */
        /*0048*/                   LDG.E.U16 R4, desc[UR2][R2.64] ;                /* 0x0 */
        /*0050*/                   LDGSTS.E.BYPASS.128 [R1], desc[UR2][R2.64] ;    /* 0x0 */
        /*0060*/                   DEPBAR.LE SB0, 0x1 ;                            /* 0x0 */
        /*0070*/               @P0 BRA 0x30 ;                                      /* 0x0 */
        /*0080*/                   DEPBAR.LE SB0, 0x0 ;                            /* 0x0 */
        /*0090*/              @!P2 BRA 0x20 ;                                      /* 0x0 */
        /*00a0*/                   BRA 0xa0 ;                                      /* 0x0 */
"""


def test_waits_are_those_of_the_innermost_loop() -> None:
    loops = tuple(read_loops(_SASS))
    assert loops == (Loop(instructions=6, copies=1, waits=(2, 1), byte_loads=1, global_loads=1),)
    assert Build("", "", 90, loops=loops).in_flight == 1
    assert Build("", "", 90, loops=(*loops, Loop(3, 1, (), 0))).in_flight == 0
    assert Build("", "", 90, loops=(Loop(3, 0, (), 0),)).in_flight is None


def test_a_comparison_shows_values_that_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel on one target, next to files in which it had the same and other values."""
    file = tmp_path / "resources.json"
    options = ["--only", "activation", "--arch", "90", "--output", str(file)]
    main(options)
    first = capsys.readouterr().out
    kernel = "| activation | "
    assert kernel in first
    assert "→" not in first
    found = load_builds(file)
    monkeypatch.setattr(kernel_resources, "builds", lambda *_, **__: found)
    main([*options, "--before", str(file)])
    assert capsys.readouterr().out == first
    whole = json.loads(file.read_text())
    assert whole["before"] == whole["builds"]
    for build in whole["builds"]:
        build["registers"] += 1000
    file.write_text(json.dumps(whole))
    main([*options, "--before", str(file)])
    changed = [line for line in capsys.readouterr().out.splitlines() if kernel in line]
    assert changed
    assert all(line.count("→") == 1 and "| 10" in line for line in changed)
