"""Cases of products with the norm before them, and of the qkv projection with RoPE after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu_parts.case import KernelCase, Sizes, Tensors
from benchmarks.gpu_parts.inputs import Inputs, doubled_cache
from benchmarks.gpu_parts.product_cases import int4_weight
from localgen.backends.cuda.kernels.gemm import dense, int4
from localgen.backends.cuda.kernels.gemm.int4_format import dequantize_int4
from localgen.backends.cuda.kernels.gemm.int4_qkv_rope import int4_project_and_store_kv
from localgen.backends.cuda.kernels.gemm.qkv_rope import project_and_store_kv
from localgen.backends.cuda.kernels.kv_cache import LayerKV
from localgen.backends.cuda.kernels.norm import RMSNorm, rms_norm_reference
from localgen.backends.cuda.kernels.rope import rope_and_store_kv_reference

_EPS = 1e-5
# inputs that share a scale of int4 weights
_GROUP = 128


def fused(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for rows, ins, size in (
        (1, sizes.hidden, sizes.intermediate),
        (1, 896, 1000),
        (5, sizes.hidden, 512),
    ):
        yield _gated_product(make, rows, ins, size)
        yield _int4_gated_product(make, rows, ins, size)
    for rows, ins, heads, biased in (
        (1, sizes.hidden, 8, False),
        (1, 896, 14, True),
        (3, 896, 14, False),
    ):
        for is_int4 in (False, True):
            yield _projection(make, rows, ins, heads, biased, is_int4)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm_reference(x.double(), weight.double(), _EPS, offset=False, residual=None)[0]


def _gated_product(make: Inputs, rows: int, ins: int, size: int) -> KernelCase:
    x, scale = make.normal(rows, ins), make.normal(ins)
    weight = make.normal(2 * size, ins, std=0.02)

    def found() -> Tensors:
        return (dense.gated_matmul(x, weight, "silu", norm=RMSNorm(scale, _EPS)),)

    def wanted() -> Tensors:
        return (dense.gated_matmul_reference(_normed(x, scale), weight.double(), "silu"),)

    return KernelCase("gated_matmul", f"{rows} × {ins} → {size}, norm", found, wanted)


def _int4_gated_product(make: Inputs, rows: int, ins: int, size: int) -> KernelCase:
    x, scale = make.normal(rows, ins), make.normal(ins)
    packed, grid = int4_weight(make, 2 * size, ins, _GROUP)

    def found() -> Tensors:
        return (int4.int4_gated_matmul(x, packed, grid, "silu", norm=RMSNorm(scale, _EPS)),)

    def wanted() -> Tensors:
        return (int4.int4_gated_matmul_reference(_normed(x, scale), packed, grid, "silu"),)

    return KernelCase("int4_gated_matmul", f"{rows} × {ins} → {size}, norm", found, wanted)


def _projection(
    make: Inputs, rows: int, ins: int, heads: int, biased: bool, is_int4: bool
) -> KernelCase:
    size, kv_heads, pages = 64, 2, 3
    x, scale = make.normal(rows, ins), make.normal(ins)
    outs = (heads + 2 * kv_heads) * size
    bias = make.normal(outs) if biased else None
    project: Callable[..., Tensor] = project_and_store_kv
    weight: tuple[Tensor, ...] = (make.normal(outs, ins, std=0.02),)
    exact_weight = weight[0].double()
    if is_int4:
        project, weight = int4_project_and_store_kv, int4_weight(make, outs, ins, _GROUP)
        exact_weight = dequantize_int4(*weight, torch.float64)
    angles = make.normal(512, size // 2).float()
    table = (angles.cos(), angles.sin())
    positions = make.integers(0, 512, rows).int()
    slots = make.permutation(16 * pages)[:rows]
    cache = make.cache(pages, kv_heads, size, make.dtype)

    def found() -> Tensors:
        into = LayerKV(*(part.clone() for part in cache.tensors))
        rest = bias, positions, table, None, into, slots
        queries = project(x, RMSNorm(scale, _EPS), *weight, *rest)
        return queries, into.keys, into.values

    def wanted() -> Tensors:
        into = doubled_cache(cache)
        qkv = _normed(x, scale) @ exact_weight.T
        qkv = qkv if bias is None else qkv + bias.double()
        exact = table[0].double(), table[1].double()
        queries = rope_and_store_kv_reference(qkv, positions, exact, None, into, slots)
        return queries, into.keys, into.values

    name = f"{rows} × {ins} → {heads} + 2 × {kv_heads} heads{', bias' if biased else ''}"
    return KernelCase("int4_" * is_int4 + "project_and_store_kv", name, found, wanted)
