"""Cases of products with the norm before them, and of the qkv projection with RoPE after it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from benchmarks.gpu_parts.case import KernelCase, Sizes, Tensors
from benchmarks.gpu_parts.inputs import Inputs, doubled_cache
from localgen.backends.cuda.kernels.gemm import dense, qkv_rope
from localgen.backends.cuda.kernels.kv_cache import LayerKV
from localgen.backends.cuda.kernels.norm import RMSNorm, rms_norm_reference
from localgen.backends.cuda.kernels.rope import rope_and_store_kv_reference

_EPS = 1e-5


def fused(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for rows, ins, size in (
        (1, sizes.hidden, sizes.intermediate),
        (1, 896, 1000),
        (5, sizes.hidden, 512),
    ):
        yield _gated_product(make, rows, ins, size)
    for rows, ins, heads, biased in (
        (1, sizes.hidden, 8, False),
        (1, 896, 14, True),
        (3, 896, 14, False),
    ):
        yield _projection(make, rows, ins, heads, biased)


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


def _projection(make: Inputs, rows: int, ins: int, heads: int, biased: bool) -> KernelCase:
    size, kv_heads, pages = 64, 2, 3
    x, scale = make.normal(rows, ins), make.normal(ins)
    outs = (heads + 2 * kv_heads) * size
    weight, bias = make.normal(outs, ins, std=0.02), make.normal(outs) if biased else None
    angles = make.normal(512, size // 2).float()
    table = (angles.cos(), angles.sin())
    positions = make.integers(0, 512, rows).int()
    slots = make.permutation(16 * pages)[:rows]
    cache = make.cache(pages, kv_heads, size, make.dtype)

    def found() -> Tensors:
        into = LayerKV(*(part.clone() for part in cache.tensors))
        queries = qkv_rope.project_and_store_kv(
            x, RMSNorm(scale, _EPS), weight, bias, positions, table, None, into, slots
        )
        return queries, into.keys, into.values

    def wanted() -> Tensors:
        into = doubled_cache(cache)
        qkv = _normed(x, scale) @ weight.double().T
        qkv = qkv if bias is None else qkv + bias.double()
        exact = table[0].double(), table[1].double()
        queries = rope_and_store_kv_reference(qkv, positions, exact, None, into, slots)
        return queries, into.keys, into.values

    name = f"{rows} × {ins} → {heads} + 2 × {kv_heads} heads{', bias' if biased else ''}"
    return KernelCase("project_and_store_kv", name, found, wanted)
