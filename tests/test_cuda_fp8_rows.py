"""Rows rounded to FP8 by norms and activations, and a decoder that multiplies them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from cuda_configs import write_config
from torch import Tensor

from benchmarks.gpu_parts import kernel_speed
from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.kernels import activation, dispatch, fp8_rows, norm
from localgen.backends.cuda.kernels.dispatch import Kernel, Operation
from localgen.backends.cuda.kernels.fp8_rows import (
    Fp8Rows,
    quantize_rows_fp8_reference,
    quantize_rows_fp8_triton,
)
from localgen.backends.cuda.kernels.gemm import fp8
from localgen.backends.cuda.kernels.gemm.fp8 import fp8_rows_matmul
from localgen.backends.cuda.kernels.norm import rms_norm_fp8_triton, rms_norm_reference
from localgen.backends.cuda.launch_plan import LaunchPlanner, prefill_inputs
from localgen.backends.cuda.model import linear
from localgen.backends.cuda.model.batch import inputs_to_device
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.linear import (
    DenseLinear,
    Fp8Linear,
    MergedLinear,
    gated_linear,
    gated_mlp,
    takes_fp8_rows,
)
from localgen.backends.cuda.model.weights import random_weights
from localgen.backends.formats.architecture.model_spec import ModelSpec, QuantizationConfig
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.formats.hf.config import read_hf_config


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new floats with NaN, so that unwritten elements show."""
    make = torch.empty

    def poisoned(*shape: Any, **options: Any) -> Tensor:
        found = make(*shape, **options)
        if options.get("dtype") is torch.float8_e4m3fn and not found.is_meta:
            found.view(torch.uint8).fill_(0x7F)
        return found

    monkeypatch.setattr(torch, "empty", poisoned)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(rows: Fp8Rows, exact: Tensor) -> None:
    """The largest value of a row is FP8's largest, and all are rounded as by PyTorch."""
    assert rows.values.dtype is torch.float8_e4m3fn
    again = quantize_rows_fp8_reference(exact)
    torch.testing.assert_close(rows.scales, again.scales.float(), rtol=1e-3, atol=1e-14)
    ours, wanted = rows.values.float(), again.values.float()
    # the interpreter loses a carry from the mantissa to the exponent, and bits of the smallest
    carried = (wanted.frexp().mantissa.abs() == 0.5) & (2 * ours == wanted)
    same = (ours == wanted) | carried | (wanted.abs() < 2**-6)
    assert same.float().mean() > 0.99  # float32 and float64 may lie on two sides of a middle


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [40, 4096, 5000])
def test_rows_are_rounded(size: int, dtype: torch.dtype) -> None:
    x = (drawn(1, 4, size) * torch.tensor([[1e-2], [1.0], [300.0], [0.0]])).to(dtype)
    rows = quantize_rows_fp8_triton(x)
    assert rows.dtype is dtype
    assert_rounded(rows, x.double())


def test_rows_that_need_no_rounding() -> None:
    """Every finite value of FP8 times a power of two: the scale, as the largest is 448."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F])
    exact = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    small = exact.abs() < 2**-6  # which the interpreter computes wrongly
    x = torch.stack((exact, exact * 2**-20)).masked_fill(small, 0.0)
    rows = quantize_rows_fp8_triton(x)
    assert rows.scales.flatten().tolist() == [1.0, 2**-20]
    assert torch.equal(rows.values.float() * rows.scales, x)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [40, 4200])
def test_activations_are_rounded(size: int, kind: Literal["silu", "gelu_tanh"]) -> None:
    x = drawn(2, 3, 2 * size)
    exact = activation.gated_activation_reference(x.double(), kind)
    assert_rounded(quantize_rows_fp8_triton(x, kind), exact)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("size", [64, 1000])
def test_norms_are_rounded(size: int, adds: bool) -> None:
    x, weight = drawn(3, 3, size), drawn(4, size)
    residual = drawn(5, 3, size) if adds else None
    rows, summed = rms_norm_fp8_triton(x, weight, 1e-5, offset=True, residual=residual)
    exact, exact_sum = rms_norm_reference(
        x.double(), weight.double(), 1e-5, offset=True, residual=residual
    )
    assert_rounded(rows, exact)
    torch.testing.assert_close(summed.double(), exact_sum, rtol=1e-6, atol=1e-6)


# -- products -----------------------------------------------------------------------------------


@pytest.fixture
def fp8_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Fp8Rows]:
    """FP8 weights are multiplied as on a GPU, everything else as on a CPU. Rows as multiplied."""
    multiplied: list[Fp8Rows] = []

    def multiply(x: Fp8Rows, *rest: Any) -> Tensor:
        multiplied.append(x)
        return fp8_rows_matmul(x, *rest)

    for module in (fp8, linear):
        monkeypatch.setattr(module, "fp8_rows_matmul", multiply)
    choose = dispatch.choose_kernel

    def choose_as_on_gpu(operation: Operation, x: Tensor, **options: Any) -> Kernel:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "can_use_triton", lambda x: True)
            patch.setattr(dispatch, "compute_capability", lambda device: 90)
            return choose(operation, x, **options)

    for module in (fp8, fp8_rows, norm):
        monkeypatch.setattr(module, "choose_kernel", choose_as_on_gpu)
    return multiplied


def fp8_linear(seed: int, outs: int, ins: int, bias: Tensor | None = None) -> Fp8Linear:
    weight = drawn(seed, outs, ins).to(torch.float8_e4m3fn)
    return Fp8Linear(weight, drawn(seed + 1, outs).abs() / 10, bias)


def test_who_takes_fp8_rows(fp8_gpu: list[Fp8Rows]) -> None:
    rows, dense = drawn(1, 33, 32, dtype=torch.float16), DenseLinear(drawn(2, 16, 32))
    one = fp8_linear(3, 16, 32)
    assert takes_fp8_rows(one, rows)
    assert not takes_fp8_rows(one, rows[:32])  # keep their precision
    assert not takes_fp8_rows(fp8_linear(3, 24, 32), rows)  # torch._scaled_mm cannot
    assert not takes_fp8_rows(dense, rows)
    assert not takes_fp8_rows(MergedLinear((one, one)), rows)
    assert not takes_fp8_rows(None, rows)


@pytest.mark.parametrize("fast", [False, True])
def test_fast_accumulation_is_chosen(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the benchmark; products of the engine do without it."""
    multiply, choices = torch._scaled_mm, []

    def watched(*given: Any, **options: Any) -> Tensor:
        choices.append(options["use_fast_accum"])
        return multiply(*given, **options)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    one, x = fp8_linear(1, 48, 64), drawn(3, 70, 64, dtype=torch.bfloat16)
    rows = quantize_rows_fp8_reference(x)
    ours = kernel_speed._fast_accumulation(one, x)() if fast else one.multiply_rows(rows)
    assert choices == [fast]
    assert isinstance(ours, Tensor)
    exact = (rows.values.double() * rows.scales) @ one.dequantize(torch.float64).T
    assert (ours - exact).norm() / exact.norm() < 4e-3


@pytest.mark.parametrize("rows", [33, 32])
def test_mlp_multiplies_rounded_activations(rows: int, fp8_gpu: list[Fp8Rows]) -> None:
    gate_up, down = fp8_linear(1, 96, 32), fp8_linear(3, 32, 48, drawn(5, 32))
    x = drawn(6, rows, 32, dtype=torch.float16)
    ours = gated_mlp(gate_up, down, x, "silu")
    assert [each.values.shape[1] for each in fp8_gpu] == ([32, 48] if rows > 32 else [])
    gated = gated_linear(DenseLinear(gate_up.dequantize(torch.float64)), x.double(), "silu")
    assert down.bias is not None
    exact = gated @ down.dequantize(torch.float64).T + down.bias
    assert ours.dtype is torch.float16
    assert (ours - exact).norm() / exact.norm() < (0.06 if rows > 32 else 2e-3)


def fp8_spec(folder: Path) -> ModelSpec:
    spec = read_hf_config(write_config(folder, "llama", num_hidden_layers=2))
    return replace(spec, quant=QuantizationConfig(method="fp8", bits=8))


def test_decoder_rounds_in_its_norms(
    tmp_path: Path, fp8_gpu: list[Fp8Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 70 tokens; its logits are near those without rounding."""
    spec = fp8_spec(tmp_path)
    weights = random_weights(spec, device="cpu", dtype=torch.float16, seed=1)

    def logits() -> Tensor:
        cache = KVCache.zeros(spec, 5, device="cpu", dtype=torch.float16)
        batch = inputs_to_device(prefill_inputs(70), torch.device("cpu"))
        return Decoder(spec, weights, 128).forward(batch, cache)

    rounded = logits()
    # of each layer qkv, output projection, gate and up, down
    assert len(fp8_gpu) == 4 * spec.num_layers
    monkeypatch.undo()
    exact = logits()
    assert len(fp8_gpu) == 4 * spec.num_layers
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.1


def test_kernels_that_round_are_precompiled(tmp_path: Path) -> None:
    """One row kernel for attention's output, one for the MLP; the norm's; no other."""
    planner = LaunchPlanner(
        ModelShard(fp8_spec(tmp_path)), CudaOptions(), torch.bfloat16, arch=90, num_sms=132
    )
    launches = planner.first_answer_launches()
    rounding = {
        (launch.kernel.fn.__name__, launch.options.get("activation"))
        for launch in launches
        if torch.float8_e4m3fn in launch.args and torch.float32 in launch.args
    }
    assert {("_quantize_rows_kernel", None), ("_quantize_rows_kernel", "silu")} <= rounding
    assert ("_rms_norm_kernel", None) in rounding
