"""Kernel speed, compared with torch: cuBLAS for matrix products, SDPA for attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_parts.ceilings import Ceilings
from benchmarks.gpu_parts.clock import Budget
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.inputs import Inputs
from benchmarks.gpu_parts.loaded import DTYPE, Loaded
from benchmarks.gpu_parts.progress import case_begins
from benchmarks.gpu_parts.report import GpuReport, format_error
from localgen.backends.cuda.kernels.attention.paged import paged_attention
from localgen.backends.cuda.kernels.attention_metadata import AttentionMetadata
from localgen.backends.cuda.kernels.fp8_rows import quantize_rows_fp8
from localgen.backends.cuda.kernels.gemm.fp8 import fp8_rows_matmul
from localgen.backends.cuda.kernels.kv_cache import LayerKV
from localgen.backends.cuda.kernels.moe.fused_experts import fused_experts
from localgen.backends.cuda.kernels.moe.grouped_experts import ExpertRouting
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, pages_for
from localgen.backends.cuda.model.linear import DenseLinear, Fp8Linear, Linear, takes_fp8_rows
from localgen.backends.cuda.model.weights import LayerWeights
from localgen.backends.formats.architecture.model_spec import ModelSpec

PART, SDPA = "kernels", "torch SDPA"
OTHERS = ATTENTION, EXPERTS = "attention", "experts"
_NAMES = ("qkv", "attention_out", "gate_up", "down")
# number of layers whose weights are read one after the other: many times the L2 cache in size
_LAYERS = 16
# bytes of different keys and values that are read one after the other
_ROTATED_BYTES = 200e6
# different choices of experts that are computed one after the other
_ROUTINGS = 8


@dataclass(frozen=True, slots=True)
class KernelBench:
    """State shared by both tests."""

    device: Device
    ceilings: Ceilings
    report: GpuReport
    make: Inputs


def products(bench: KernelBench, model: Loaded, rows: Sequence[int], budget: Budget) -> None:
    """Measure the four matrix products of a layer, and cuBLAS if the weights have 16 bits."""
    for count in rows:
        test = f"a layer's products, {count} rows"
        if not budget.fits(test):
            return
        case_begins(f"{test}: {model.name}")
        _layer(bench, test, model.name, model, count, _call)
        if model.spec.quant is None:
            _layer(bench, test, f"cuBLAS, {model.name}", model, count, _cublas)
        if _rounds_inputs(bench.make, model, count):
            side = f"fast accumulation, {model.name}"
            _layer(bench, test, side, model, count, _fast_accumulation)


Maker = Callable[[Linear, Tensor], Callable[[], object]]


def _call(linear: Linear, x: Tensor) -> Callable[[], object]:
    return lambda: linear(x)


def _cublas(linear: Linear, x: Tensor) -> Callable[[], object]:
    assert isinstance(linear, DenseLinear)
    weight = linear.weight
    return lambda: functional.linear(x, weight)


def _rounds_inputs(make: Inputs, model: Loaded, rows: int) -> bool:
    linear = model.weights.layers[0].qkv
    return takes_fp8_rows(linear, make.normal(rows, linear.in_features))


def _fast_accumulation(linear: Linear, x: Tensor) -> Callable[[], object]:
    """FP8 products whose sums stay in the tensor cores, which is less exact."""
    assert isinstance(linear, Fp8Linear)
    weight, scale = linear.weight, linear.scale
    return lambda: fp8_rows_matmul(quantize_rows_fp8(x), weight, scale, fast_accum=True)


def _layer(
    bench: KernelBench, test: str, side: str, model: Loaded, rows: int, maker: Maker
) -> None:
    layers = model.weights.layers[:_LAYERS]
    took_us = {}
    for name in _NAMES:
        linears = [_linear(layer, name) for layer in layers]
        xs = [bench.make.normal(rows, linear.in_features) for linear in linears]
        calls = [maker(linear, x) for linear, x in zip(linears, xs, strict=True)]
        took_us[f"{name}_us"] = bench.device.median_s(calls) * 1e6
    whole_us = sum(took_us.values())
    layer_bytes = _layer_bytes(model)
    first = [_linear(layers[0], name) for name in _NAMES]
    sums = 2 * rows * sum(linear.in_features * linear.out_features for linear in first)
    bytes_s = layer_bytes / whole_us * 1e6
    figures = {"gb_s": bytes_s / 1e9, **bench.ceilings.shares(bytes_s)}
    figures |= {"us": whole_us, "tflop_s": sums / whole_us / 1e6, **took_us}
    bench.report.add(PART, test, side, [figures])


def _linear(layer: LayerWeights, name: str) -> Linear:
    found = getattr(layer, name)
    assert found is not None
    return found  # type: ignore[no-any-return]


def _layer_bytes(model: Loaded) -> float:
    """Approximate bytes of one layer's weights; norms are negligible."""
    head = (
        0
        if model.spec.tied_embeddings
        else model.spec.vocab_size * model.spec.hidden_size * DTYPE.itemsize
    )
    embed = model.weights.embed.nbytes
    return (model.weights.num_bytes - head - embed) / model.spec.num_layers


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Sizes of a mixture-of-experts layer. intermediate: of each expert."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    @property
    def title(self) -> str:
        """Name of the test."""
        size = f"{self.hidden} × {self.intermediate}"
        return f"{self.top_k} of {self.num_experts} experts of {size}"


def experts(bench: KernelBench, layer: ExpertLayer, rows: Sequence[int], budget: Budget) -> None:
    """Measure a mixture-of-experts layer: the bytes of the experts that its rows choose."""
    make, expert_size = bench.make, 3 * layer.hidden * layer.intermediate
    gate_up = make.normal(layer.num_experts, 2 * layer.intermediate, layer.hidden, std=0.02)
    down = make.normal(layer.num_experts, layer.hidden, layer.intermediate, std=0.02)
    for count in rows:
        test = f"{layer.title}, {count} rows"
        if not budget.fits(test):
            return
        case_begins(test)
        calls, chosen = [], 0
        for _ in range(_ROUTINGS):
            scores = make.normal(count, layer.num_experts, dtype=torch.float32).softmax(-1)
            routing = ExpertRouting(*reversed(scores.topk(layer.top_k)))
            chosen += len(set(routing.topk_ids.flatten().tolist()))
            x = make.normal(count, layer.hidden)
            calls.append(partial(fused_experts, x, gate_up, down, routing, "silu"))
        took_s = bench.device.median_s(calls)
        bytes_s = chosen / _ROUTINGS * expert_size * DTYPE.itemsize / took_s
        sums = 2 * count * layer.top_k * expert_size
        figures = {"gb_s": bytes_s / 1e9, **bench.ceilings.shares(bytes_s)}
        figures |= {"us": took_s * 1e6, "tflop_s": sums / took_s / 1e12}
        bench.report.add(PART, test, "localgen", [figures])


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """A batch of sequences with `tokens` tokens each, of which the last `rows` are new.

    longest: tokens of the first sequence, if it has more. int8: the KV cache has 8 bits.
    """

    sequences: int
    tokens: int
    rows: int = 1
    longest: int = 0
    int8: bool = False

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [max(self.longest, self.tokens), *[self.tokens] * (self.sequences - 1)]

    @property
    def title(self) -> str:
        """Name of the test."""
        what = "decoding" if self.rows == 1 else f"{self.rows} new"
        longest = f", one of {self.longest:,}" if self.longest else ""
        small = ", int8 cache" if self.int8 else ""
        return f"attention, {self.sequences} × {self.tokens:,}{longest}, {what}{small}"


def attention(
    bench: KernelBench, spec: ModelSpec, batches: Sequence[SequenceBatch], budget: Budget
) -> None:
    """Measure one layer's attention; for SDPA keys and values are contiguous, not paged."""
    for batch in batches:
        test = batch.title
        if not budget.fits(test):
            return
        case_begins(test)
        _attend(bench, test, "localgen", spec, batch, _paged)
        if batch.longest or batch.int8:  # SDPA has neither
            continue
        try:
            _attend(bench, test, SDPA, spec, batch, _sdpa)
        except RuntimeError as error:  # not every torch build supports every shape
            bench.report.skipped.append((f"{SDPA}, {test}", format_error(error)))


def _attend(
    bench: KernelBench,
    test: str,
    side: str,
    spec: ModelSpec,
    batch: SequenceBatch,
    maker: Callable[[Inputs, ModelSpec, SequenceBatch], Callable[[], object]],
) -> None:
    item_bytes = 1 if batch.int8 else DTYPE.itemsize
    kv = 2 * sum(batch.lengths) * spec.num_kv_heads * spec.head_dim * item_bytes
    copies = max(1, min(16, int(_ROTATED_BYTES // kv))) if bench.device.is_gpu else 1
    took_s = bench.device.median_s([maker(bench.make, spec, batch) for _ in range(copies)])
    rows = batch.rows
    seen = sum(rows * (tokens - rows) + rows * (rows + 1) / 2 for tokens in batch.lengths)
    sums = 4 * spec.num_heads * spec.head_dim * seen
    if batch.rows == 1:
        figures = {"gb_s": kv / took_s / 1e9, **bench.ceilings.shares(kv / took_s)}
    else:
        figures = {"tflop_s": sums / took_s / 1e12}
    bench.report.add(PART, test, side, [figures | {"us": took_s * 1e6}])
    bench.device.free()


def _paged(make: Inputs, spec: ModelSpec, batch: SequenceBatch) -> Callable[[], object]:
    count, lengths = batch.sequences, batch.lengths
    pages = sum(map(pages_for, lengths))
    kind = torch.int8 if batch.int8 else make.dtype
    cache: LayerKV = make.cache(pages, spec.num_kv_heads, spec.head_dim, kind)
    ragged: AttentionMetadata = make.ragged([batch.rows] * count, lengths, pages)
    queries = make.normal(batch.rows * count, spec.num_heads, spec.head_dim)
    return lambda: paged_attention(
        queries, cache, ragged, scale=spec.attn_scale, window=None, softcap=None
    )


def _sdpa(make: Inputs, spec: ModelSpec, batch: SequenceBatch) -> Callable[[], object]:
    tokens = pages_for(batch.tokens) * PAGE_TOKENS
    shape = (batch.sequences, spec.num_kv_heads, tokens, spec.head_dim)
    keys, values = (make.normal(*shape)[:, :, : batch.tokens] for _ in range(2))
    queries = make.normal(batch.sequences, spec.num_heads, batch.rows, spec.head_dim)
    causal = batch.rows > 1
    bias = None
    if causal and batch.rows < batch.tokens:
        from torch.nn.attention.bias import causal_lower_right

        bias, causal = causal_lower_right(batch.rows, batch.tokens), False
    return lambda: functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=bias, is_causal=causal, enable_gqa=True
    )
