"""Which kernel computes an operation, by the number of rows and the dtype.

The only place that decides; docs/gpu.md shows the table. Where no kernel is left, PyTorch computes:
products with a weight that is dequantized at each call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.device import can_use_triton, compute_capability

# products are named by the format of their weights
Operation = Literal[
    "dense",
    "int4",
    "fp8",
    "experts",
    "attention",
    "norm",
    "rope",
    "activation",
    "fp8_rows",
    "sampling",
    "drafts",
    "decode_inputs",
]


class Kernel(StrEnum):
    """An implementation of an operation."""

    GEMV = "gemv"
    SKINNY_GEMM = "skinny_gemm"
    INT4_GEMV = "int4_gemv"
    INT4_GEMM = "int4_gemm"
    INT4_WIDE = "int4_wide"
    INT4_DEQUANTIZE = "int4_dequantize"
    FP8_GEMM = "fp8_gemm"
    FP8_SCALED_MM = "fp8_scaled_mm"
    SMALL_BATCH_EXPERTS = "small_batch_experts"
    GROUPED_EXPERTS = "grouped_experts"
    DECODE_ATTENTION = "decode_attention"
    PREFILL_ATTENTION = "prefill_attention"
    RMS_NORM = "rms_norm"
    ROPE_AND_STORE_KV = "rope_and_store_kv"
    GATED_ACTIVATION = "gated_activation"
    QUANTIZE_ROWS = "quantize_rows"
    SAMPLE_TOKENS = "sample_tokens"
    REJECTION_SAMPLE = "rejection_sample"
    ADVANCE_DECODE_INPUTS = "advance_decode_inputs"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Route:
    """A kernel and what it serves: up to max_rows rows of inputs, or None for any number.

    Rows of attention are the query rows of a sequence. min_arch: lowest compute capability.
    any_dtype: also inputs that are not bf16 or fp16. how: a line for the documentation.
    """

    operation: Operation
    kernel: Kernel
    max_rows: int | None
    how: str
    min_arch: int = 80
    any_dtype: bool = False


# of each operation the first that serves the inputs
ROUTES = (
    Route("dense", Kernel.GEMV, 1, "sums of each thread, no tensor cores"),
    Route("dense", Kernel.SKINNY_GEMM, 8, "tensor cores, rows padded to 8"),
    Route("dense", Kernel.REFERENCE, None, "cuBLAS", any_dtype=True),
    Route("int4", Kernel.INT4_GEMV, 1, "sums of each thread, with the norm before it"),
    Route("int4", Kernel.INT4_GEMM, 16, "tensor cores on the codes, scaled by group"),
    Route("int4", Kernel.INT4_WIDE, 256, "dequantized in registers, inputs divided"),
    Route("int4", Kernel.INT4_DEQUANTIZE, None, "dequantized at each call, cuBLAS", any_dtype=True),
    Route("fp8", Kernel.FP8_GEMM, 32, "inputs keep 16 bits", min_arch=89),
    Route("fp8", Kernel.FP8_SCALED_MM, None, "inputs rounded to FP8, cuBLAS", min_arch=89),
    Route("experts", Kernel.SMALL_BATCH_EXPERTS, 8, "one program per row and block of outputs"),
    Route("experts", Kernel.GROUPED_EXPERTS, None, "rows sorted by expert"),
    Route("attention", Kernel.DECODE_ATTENTION, 8, "rows of a KV head in a tile", any_dtype=True),
    Route("attention", Kernel.PREFILL_ATTENTION, None, "tiles of rows", any_dtype=True),
    Route("norm", Kernel.RMS_NORM, None, "one program per row", any_dtype=True),
    Route("rope", Kernel.ROPE_AND_STORE_KV, None, "with QK norm and cache write", any_dtype=True),
    Route("activation", Kernel.GATED_ACTIVATION, None, "elementwise", any_dtype=True),
    Route("fp8_rows", Kernel.QUANTIZE_ROWS, None, "one program per row", 89, any_dtype=True),
    Route("sampling", Kernel.SAMPLE_TOKENS, None, "programs divide a row", any_dtype=True),
    Route("drafts", Kernel.REJECTION_SAMPLE, None, "programs divide a row", any_dtype=True),
    Route("decode_inputs", Kernel.ADVANCE_DECODE_INPUTS, None, "in place", any_dtype=True),
)
_ROUTES_OF = {
    operation: tuple(route for route in ROUTES if route.operation == operation)
    for operation in dict.fromkeys(route.operation for route in ROUTES)
}
_switched_off: set[Kernel] = set()


def choose_kernel(
    operation: Operation,
    x: Tensor,
    *,
    rows: int | None = None,
    fits: bool = True,
    unfit: tuple[Kernel, ...] = (),
) -> Kernel:
    """Return the kernel for an operation on x, [rows, ...].

    rows: those that the table counts, if they are not the rows of x. fits: the weight's layout
    suits the kernels of its format. unfit: those that it does not suit.
    """
    if not (fits and can_use_triton(x)):
        return Kernel.REFERENCE
    rows = x.shape[0] if rows is None else rows
    return _look_up(operation, rows, compute_capability(x.device), x.dtype, unfit)


@lru_cache(1024)
def _look_up(
    operation: Operation, rows: int, arch: int, dtype: torch.dtype, unfit: tuple[Kernel, ...]
) -> Kernel:
    if not rows:
        return Kernel.REFERENCE
    is_half = dtype in (torch.bfloat16, torch.float16)
    for route in _ROUTES_OF[operation]:
        if (
            (route.max_rows is None or rows <= route.max_rows)
            and arch >= route.min_arch
            and (is_half or route.any_dtype)
            and route.kernel not in unfit
            and route.kernel not in _switched_off
        ):
            return route.kernel
    return Kernel.REFERENCE


def max_rows(kernel: Kernel) -> int:
    """Return the largest number of rows that the kernel is chosen for."""
    found = next(route.max_rows for route in ROUTES if route.kernel is kernel)
    assert found is not None, f"{kernel} serves any number of rows"
    return found


def kernels_of(operation: Operation) -> frozenset[Kernel]:
    """Return the kernels of an operation."""
    return frozenset(route.kernel for route in _ROUTES_OF[operation])


def switch_off(kernels: Iterable[Kernel]) -> None:
    """Do not choose these kernels in this process: for benchmarks, if they compute wrong values."""
    _switched_off.update(kernels)
    _look_up.cache_clear()
