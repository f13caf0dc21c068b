"""The table of kernels: complete, in order, as documented, and what the products choose from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from localgen.backends.cuda.kernels import dispatch
from localgen.backends.cuda.kernels.dispatch import (
    ROUTES,
    Kernel,
    WeightFormat,
    choose_kernel,
    kernels_of,
    max_rows,
    switch_off,
)
from localgen.backends.cuda.kernels.gemm import dense, fp8, int4
from localgen.backends.cuda.kernels.gemm.int4_format import pack_grid, pack_int4
from localgen.backends.cuda.kernels.launch import record_launches

LABELS: dict[WeightFormat, str] = {
    "dense": "bf16, fp16",
    "int4": "int4",
    "fp8": "FP8",
    "experts": "experts",
}
META = torch.device("meta")


@pytest.fixture(autouse=True)
def all_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_switched_off", set())


def rows_of(count: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(count, 256, dtype=dtype, device=META)


def chosen(weights: WeightFormat, rows: int, arch: int = 90, **unsuited: object) -> Kernel:
    with record_launches(arch, 132):
        return choose_kernel(weights, rows_of(rows), **unsuited)  # type: ignore[arg-type]


def documented() -> Iterator[str]:
    for weights, label in LABELS.items():
        first = 1
        for route in (route for route in ROUTES if route.weights == weights):
            last = route.max_rows
            rows = "more" if last is None else "1" if last == 1 else f"{first} to {last}"
            first = (last or 0) + 1
            yield f"  | {label} | {rows} | {route.kernel} | {route.how} |"


def test_docs_show_the_table() -> None:
    docs = (Path(__file__).parents[1] / "docs/gpu.md").read_text(encoding="utf-8").splitlines()
    head = docs.index("  | weights | rows | kernel | how |")
    assert docs[head + 2 : head + 3 + len(ROUTES)] == [*documented(), ""]


@pytest.mark.parametrize("weights", LABELS)
def test_each_number_of_rows_has_the_first_kernel_that_serves_it(weights: WeightFormat) -> None:
    """Larger numbers come later, and the last kernel takes any."""
    routes = [route for route in ROUTES if route.weights == weights]
    limits = [route.max_rows or 1 << 30 for route in routes]
    assert limits == sorted(set(limits))
    assert routes[-1].max_rows is None
    for route, before in zip(routes, [0, *limits], strict=False):
        for rows in (before + 1, route.max_rows or before + 9):
            assert chosen(weights, rows) is route.kernel


def test_what_the_kernels_do_not_serve() -> None:
    assert chosen("fp8", 1, arch=80) is Kernel.REFERENCE
    assert chosen("int4", 1, fits=False) is Kernel.REFERENCE
    assert chosen("experts", 1, unfit=(Kernel.SMALL_BATCH_EXPERTS,)) is Kernel.GROUPED_EXPERTS
    assert chosen("dense", 0) is Kernel.REFERENCE
    assert choose_kernel("dense", torch.zeros(1, 256).bfloat16()) is Kernel.REFERENCE  # on a CPU
    with record_launches(90, 132):
        wide = rows_of(1, torch.float32)
        assert choose_kernel("int4", wide) is Kernel.INT4_DEQUANTIZE
        assert choose_kernel("fp8", wide) is Kernel.REFERENCE
    assert max_rows(Kernel.INT4_WIDE) == 256
    with pytest.raises(AssertionError, match="any number"):
        max_rows(Kernel.GROUPED_EXPERTS)


def launched(rows: int, weights: WeightFormat) -> set[str]:
    """Names of the kernels that a product launches."""
    x, outs = rows_of(rows), 64
    with record_launches(90, 132) as recording:
        if weights == "dense":
            dense.matmul(x, torch.empty(outs, 256, dtype=x.dtype, device=META))
        elif weights == "int4":
            codes = torch.empty(outs, 256, dtype=torch.uint8, device=META)
            grid = pack_grid(torch.empty(outs, 2, device=META), codes[:, :2])
            int4.int4_matmul(x, pack_int4(codes), grid)
        else:
            weight = torch.empty(outs, 256, dtype=torch.float8_e4m3fn, device=META)
            fp8.fp8_matmul(x, weight, torch.empty(outs, device=META))
    return {launch.kernel.fn.__name__ for launch in recording.launches}


@pytest.mark.parametrize(
    ("weights", "rows", "kernel"),
    [
        ("dense", 1, "_gemv_kernel"),
        ("dense", 8, "_skinny_gemm_kernel"),
        ("dense", 9, ""),
        ("int4", 64, "_int4_gemm_kernel"),
        ("int4", 65, "_int4_wide_kernel"),
        ("int4", 257, "_dequantize_int4_kernel"),
        ("fp8", 64, "_skinny_gemm_kernel"),
        ("fp8", 65, "_quantize_rows_kernel"),
    ],
)
def test_products_launch_what_the_table_says(weights: WeightFormat, rows: int, kernel: str) -> None:
    assert launched(rows, weights) == ({kernel} if kernel else set())


def test_a_kernel_that_is_switched_off_leaves_the_others() -> None:
    switch_off([Kernel.INT4_WIDE])
    assert launched(65, "int4") == {"_dequantize_int4_kernel"}
    assert launched(64, "int4") == {"_int4_gemm_kernel"}
    switch_off([Kernel.GEMV])
    assert launched(1, "dense") == {"_skinny_gemm_kernel"}
    switch_off(kernels_of("int4"))
    assert launched(1, "int4") == launched(65, "int4") == set()
    assert launched(8, "dense") == {"_skinny_gemm_kernel"}
