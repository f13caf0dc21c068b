"""Cases of norms, gated activations, RoPE and attention, with the sizes of real models.

Kernels are called as in the decoder, by their public function, which selects the Triton kernel on
a GPU and the reference on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu_parts.case import BF16, EIGHT_BITS, KernelCase, Sizes, Tensors, kernel_case
from benchmarks.gpu_parts.inputs import Inputs, doubled, doubled_cache, exact_cache
from localgen.backends.cuda.kernels import activation, fp8_rows, norm, rope
from localgen.backends.cuda.kernels.attention import paged
from localgen.backends.cuda.kernels.gemm.tile import ActivationKind
from localgen.backends.cuda.kernels.kv_cache import QUANTIZED_MAX, LayerKV, dequantize_kv


def norms(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for rows, size in ((1, sizes.hidden), (sizes.rows, sizes.hidden), (7, 1000)):
        for adds, offset in ((True, False), (False, True)):
            x, weight = make.normal(rows, size), make.normal(size)
            residual = make.normal(rows, size) if adds else None

            def found(
                x: Tensor = x,
                w: Tensor = weight,
                r: Tensor | None = residual,
                offset: bool = offset,
            ) -> Tensors:
                return norm.rms_norm(x, w, 1e-5, offset=offset, residual=r)

            def wanted(
                x: Tensor = x,
                w: Tensor = weight,
                r: Tensor | None = residual,
                offset: bool = offset,
            ) -> Tensors:
                # normalize the sum after rounding, as it is stored
                summed = x if r is None else (x.float() + r.float()).to(x.dtype)
                normed, _ = norm.rms_norm_reference(
                    summed.double(), w.double(), 1e-5, offset=offset, residual=None
                )
                return normed, summed.double()

            kind = f"{rows} × {size}{', residual' if adds else ''}{', offset' if offset else ''}"
            yield KernelCase("rms_norm", kind, found, wanted)
    if _has(torch.float8_e4m3fn, make.device):
        yield from _rounded_rows(make, sizes)


def gates(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    kinds: tuple[ActivationKind, ...] = ("silu", "gelu_tanh")
    for rows, size in ((1, sizes.intermediate), (sizes.rows, 1000)):
        for kind in kinds:
            x = make.normal(rows, 2 * size, std=2.0)
            sides = activation.gated_activation, activation.gated_activation_reference
            name = f"{rows} × {size}, {kind}"
            yield kernel_case("gated_activation", name, sides, (x, kind), (x.double(), kind))


def _rounded_rows(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    """Norms and activations that are rounded to FP8, and rows that are only rounded."""
    for rows, size in ((1, sizes.hidden), (sizes.rows, sizes.intermediate), (7, 1000)):
        x, weight, residual = make.normal(rows, size), make.normal(size), make.normal(rows, size)
        most, shape = EIGHT_BITS[torch.float8_e4m3fn], f"{rows} × {size}"
        yield kernel_case(
            "rms_norm_fp8",
            shape,
            (_exact_norm_rows, _exact_norm_rows),
            (norm.rms_norm_fp8, x, weight, residual),
            (norm.rms_norm_fp8_reference, *map(doubled, (x, weight, residual))),
            most,
        )
        for kind in (None, "silu", "gelu_tanh"):
            yield kernel_case(
                "quantize_rows_fp8",
                f"{shape}, {kind}",
                (_exact_rows, _exact_rows),
                (fp8_rows.quantize_rows_fp8, x, kind),
                (fp8_rows.quantize_rows_fp8_reference, doubled(x), kind),
                most,
            )


def _exact_rows(quantize: Callable[..., fp8_rows.Fp8Rows], *arguments: object) -> Tensor:
    found = quantize(*arguments)
    return found.values.to(found.scales.dtype) * found.scales


def _exact_norm_rows(
    rounded: Callable[..., tuple[fp8_rows.Fp8Rows, Tensor]],
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
) -> Tensors:
    rows, summed = rounded(x, weight, 1e-5, offset=False, residual=residual)
    return rows.values.to(rows.scales.dtype) * rows.scales, summed


def rotations(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    kinds = (make.dtype, torch.int8, torch.float8_e4m3fn)
    for rows, size, half, normed in (
        (1, 128, 64, False),
        (sizes.rows, 64, 32, True),
        (9, 96, 24, True),
    ):
        for kind in kinds:
            if _has(kind, make.device):
                yield _rotation(make, rows, size, half, normed, kind)


def _has(kind: torch.dtype, device: torch.device) -> bool:
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
    return not (old and kind is torch.float8_e4m3fn)


def _rotation(
    make: Inputs, rows: int, size: int, half: int, normed: bool, kind: torch.dtype
) -> KernelCase:
    heads, kv_heads, pages = 8, 2, 2 + rows // 8
    qkv = make.normal(rows, (heads + 2 * kv_heads) * size)
    angles = make.normal(512, half, dtype=torch.float32)
    table = (angles.cos(), angles.sin())
    positions = make.integers(0, 512, rows, dtype=torch.int32)
    slots = make.permutation(16 * pages)[:rows]
    slots[rows // 2] = slots[0] if rows == 1 else -1
    weights = None
    if normed:
        weights = rope.QKNorm(make.normal(size), make.normal(size), 1e-5, False)
    cache = make.cache(pages, kv_heads, size, kind)

    def stored(into: LayerKV, queries: Tensor) -> Tensors:
        # dequantize the whole cache: other slots must be unchanged
        keys = dequantize_kv(into.keys, into.key_scales)
        return queries, keys, dequantize_kv(into.values, into.value_scales)

    def found() -> Tensors:
        into = LayerKV(*(part.clone() for part in cache.tensors))
        return stored(into, rope.rope_and_store_kv(qkv, positions, table, weights, into, slots))

    def wanted() -> Tensors:
        # the reference computes and stores in float64; only 8-bit caches are rounded, once
        into = doubled_cache(cache)
        norms = weights and rope.QKNorm(
            weights.q_weight.double(), weights.k_weight.double(), weights.eps, weights.offset
        )
        exact = tuple(part.double() for part in table)
        queries = rope.rope_and_store_kv_reference(
            qkv.double(), positions, (exact[0], exact[1]), norms, into, slots
        )
        return stored(into, queries)

    name = f"{rows} × {size}, {2 * half} rotated{', norms' if normed else ''}, {_short(kind)}"
    return KernelCase("rope_and_store_kv", name, found, wanted, EIGHT_BITS.get(kind, BF16))


def attentions(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    """Cases of decoding, a whole prompt, chunks after cached tokens, and mixed steps.

    In "uneven", one of many sequences is long, and in "turn" a few tokens follow a long prefix.
    """
    long = sizes.long
    steps = {
        "one": ([1], [long]),
        "decode": ([1] * 5, [long, 1, 17, 256, 33]),
        "prompt": ([97], [97]),
        "cached": ([64, 40], [long, 40]),
        "mixed": ([1, 70, 1, 1], [long, 90, 16, 5]),
        "uneven": ([1] * 9, [2 * long] + [20] * 8),
        "turn": ([20], [2 * long]),
    }
    for name, (rows, lengths) in steps.items():
        yield _attention(make, name, rows, lengths, make.dtype)
    rows, lengths = steps["mixed"]
    for kind in (torch.int8, torch.float8_e4m3fn):
        if _has(kind, make.device):
            yield _attention(make, "decode", *steps["decode"], kind)
            yield _attention(make, "mixed", rows, lengths, kind)
    for size in (64, 96, 256):
        yield _attention(make, "mixed", rows, lengths, make.dtype, size=size, heads=6)
    for step in ("decode", "mixed"):
        yield _attention(make, step, *steps[step], make.dtype, window=50, softcap=30.0)


def _attention(
    make: Inputs,
    step: str,
    rows: list[int],
    lengths: list[int],
    kind: torch.dtype,
    *,
    size: int = 128,
    heads: int = 8,
    window: int | None = None,
    softcap: float | None = None,
) -> KernelCase:
    kv_heads, pages = 2, -(-max(lengths) // 16) * len(lengths) + 3
    queries = make.normal(sum(rows), heads, size)
    cache = make.cache(pages, kv_heads, size, kind)
    ragged = make.ragged(rows, lengths, pages)
    scale = size**-0.5

    def found() -> Tensors:
        return (
            paged.paged_attention(
                queries, cache, ragged, scale=scale, window=window, softcap=softcap
            ),
        )

    def wanted() -> Tensors:
        return (
            paged.paged_attention_reference(
                *(queries.double(), exact_cache(cache), ragged),
                scale=scale,
                window=window,
                softcap=softcap,
            ),
        )

    masked = f", window {window}, softcap {softcap}" if window else ""
    name = f"{step} of {max(lengths)}, {heads}/{kv_heads} × {size}, {_short(kind)}{masked}"
    return KernelCase("paged_attention", name, found, wanted)


def _short(kind: torch.dtype) -> str:
    return f"{'cache ' if kind in QUANTIZED_MAX else ''}{str(kind).removeprefix('torch.')}"
