"""Cases of matrix products with all weight formats, and of mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu_parts.case import BF16, ROUNDED_ROWS, KernelCase, Sizes, kernel_case
from benchmarks.gpu_parts.inputs import Inputs, doubled
from localgen.backends.cuda.kernels.dispatch import Kernel, max_rows
from localgen.backends.cuda.kernels.gemm import dense, fp8, int4
from localgen.backends.cuda.kernels.gemm.int4_format import pack_grid, pack_int4
from localgen.backends.cuda.kernels.moe import fused_experts
from localgen.backends.cuda.kernels.moe.grouped_experts import ExpertRouting


def products(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    plain = dense.matmul, dense.matmul_reference
    gated = dense.gated_matmul, dense.gated_matmul_reference
    for rows, ins, outs in _products(sizes):
        given = (
            *(make.normal(rows, ins), make.normal(outs, ins, std=0.02)),
            *(make.normal(outs), make.normal(rows, outs)),
        )
        exact = tuple(map(doubled, given))
        name = f"{rows} × {ins} → {outs}"
        yield kernel_case("matmul", name, plain, given, exact)
        yield kernel_case("gated_matmul", name, gated, (*given[:2], "silu"), (*exact[:2], "silu"))


def _products(sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    """Yield rows, input features and output features."""
    for rows in (1, 2, 5, 8, 16, 20, 33, 64, 100, 130, sizes.rows):
        yield rows, sizes.hidden, sizes.hidden + 64
    for rows in (1, 12, 200):
        yield rows, sizes.hidden, 2 * sizes.intermediate
    for rows in (1, 7):
        yield rows, sizes.intermediate, sizes.hidden
        yield rows, 896, 1000


def int4_products(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    plain = int4.int4_matmul, int4.int4_matmul_reference
    gated = int4.int4_gated_matmul, int4.int4_gated_matmul_reference
    for group in (128, 32):
        for rows, ins, outs in _products(sizes):
            given = (
                *(make.normal(rows, ins), *int4_weight(make, outs, ins, group)),
                *(make.normal(outs), make.normal(rows, outs)),
            )
            exact = tuple(map(doubled, given))
            name = f"{rows} × {ins} → {outs}, groups of {group}"
            yield kernel_case("int4_matmul", name, plain, given, exact)
            ends = (*given[:3], "silu"), (*exact[:3], "silu")
            yield kernel_case("int4_gated_matmul", name, gated, *ends)


def int4_weight(make: Inputs, outs: int, ins: int, group: int) -> tuple[Tensor, Tensor]:
    """Return packed codes and the grid of scales and zeros of a random weight, [outs, ins]."""
    scales = (make.normal(outs, ins // group).abs() * 0.01 + 0.001).to(torch.float16)
    zeros = make.integers(0, 16, outs, ins // group, dtype=torch.uint8)
    codes = make.integers(0, 16, outs, ins, dtype=torch.uint8)
    return pack_int4(codes), pack_grid(scales, zeros)


def fp8_products(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    sides = fp8.fp8_matmul, fp8.fp8_matmul_reference
    for rows, ins, outs in _products(sizes):
        given = (
            make.normal(rows, ins),
            make.normal(outs, ins).to(torch.float8_e4m3fn),
            make.normal(outs, dtype=torch.float32).abs() * 0.02 + 0.001,
            make.normal(outs),
        )
        most = BF16 if rows <= max_rows(Kernel.FP8_GEMM) else ROUNDED_ROWS
        name = f"{rows} × {ins} → {outs}"
        yield kernel_case("fp8_matmul", name, sides, given, tuple(map(doubled, given)), most)


def mixtures(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    sides = fused_experts.fused_experts, fused_experts.fused_experts_reference
    hidden, inner = sizes.hidden // 2, 768
    for rows, count, top_k in ((1, 8, 2), (8, 16, 4), (sizes.rows, 16, 2)):
        weights = (
            make.normal(rows, hidden),
            make.normal(count, 2 * inner, hidden, std=0.02),
            make.normal(count, hidden, inner, std=0.02),
        )
        shares, ids = make.normal(rows, count, dtype=torch.float32).softmax(-1).topk(top_k)
        given = (*weights, ExpertRouting(ids, shares), "silu")
        exact = (*map(doubled, weights), ExpertRouting(ids, shares.double()), "silu")
        name = f"{rows} × {hidden}, {top_k} of {count} × {inner}"
        yield kernel_case("fused_experts", name, sides, given, exact)
