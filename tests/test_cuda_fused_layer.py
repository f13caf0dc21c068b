"""Fused layers: few launches, and the results of the separate steps."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_configs import write_config
from cuda_models import Model, make, random_text
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from localgen.backends.cuda import kernels
from localgen.backends.cuda.kernels.gemm.int4_format import dequantize_int4, pack_grid, pack_int4
from localgen.backends.cuda.kernels.gemm.int4_qkv_rope import int4_project_and_store_kv_triton
from localgen.backends.cuda.kernels.gemm.qkv_rope import project_and_store_kv_triton
from localgen.backends.cuda.kernels.kv_cache import LayerKV
from localgen.backends.cuda.kernels.launch import KernelLaunch, record_launches
from localgen.backends.cuda.kernels.norm import RMSNorm, rms_norm_reference
from localgen.backends.cuda.kernels.rope import rope_and_store_kv_reference
from localgen.backends.cuda.launch_plan import decode_inputs
from localgen.backends.cuda.model import decoder as decoder_module
from localgen.backends.cuda.model.batch import inputs_to_device
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.fused_layer import MAX_FUSED_ROWS
from localgen.backends.cuda.model.weights import random_weights
from localgen.backends.formats.architecture.model_spec import QuantizationConfig
from localgen.backends.formats.hf.config import read_hf_config

META = torch.device("meta")
# architectures with norms only before attention and MLP, without experts or scaled sums
FUSED = (
    "llama",
    "llama tied",
    "llama 3.1",
    "mistral window",
    "qwen2 window",
    "qwen3 yarn",
    "phi3",
    "phi4 mini",
    "smollm3",
    "seed oss",
    "ernie4.5",
    "ministral3",
)
ATTENTION = ["_decode_attention_kernel", "_combine_splits_kernel"]
SIX = ["_qkv_rope_kernel", *ATTENTION, *["_gemv_kernel"] * 3]
SEVEN = ["_gemv_kernel", "_rope_and_store_kv_kernel", *ATTENTION, *["_gemv_kernel"] * 3]
NORM = "_rms_norm_kernel"
NINE = [NORM, *SEVEN[:4], "_gemv_kernel", NORM, "_gemv_kernel", "_gemv_kernel"]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def decode_step(
    name: str, folder: Path, layers: int, *, rows: int = 1, cache: torch.dtype
) -> tuple[list[KernelLaunch], Counter[str]]:
    """Kernels and torch operations of a step of one sequence of 1,024 tokens, on an H100."""
    spec = read_hf_config(write_config(folder, name))
    spec = replace(spec, num_layers=layers, sliding_windows=spec.sliding_windows[:layers])
    with record_launches(90, 132) as recorded, torch.inference_mode(), Operations() as operations:
        weights = random_weights(spec, device=META, dtype=torch.bfloat16, seed=0)
        decoder = Decoder(spec, weights, 1)
        pages = KVCache.zeros(spec, 1, device=META, dtype=cache)
        batch = inputs_to_device(decode_inputs(1, 1024, rows), META)
        operations.counts.clear()
        decoder.forward(batch, pages)
    return recorded.launches, operations.counts


def layer_kernels(
    name: str, folder: Path, *, rows: int = 1, cache: torch.dtype = torch.bfloat16
) -> list[str]:
    """Kernels that a layer more launches."""
    one, two = (
        [
            each.kernel.fn.__name__
            for each in decode_step(name, folder, n, rows=rows, cache=cache)[0]
        ]
        for n in (1, 2)
    )
    layer = two[: len(two) - len(one)]
    assert two == layer + one
    return layer


@pytest.mark.parametrize(
    ("name", "cache", "expected"),
    [
        ("llama", torch.bfloat16, SIX),
        ("llama tied", torch.bfloat16, SIX),
        ("llama 3.1", torch.bfloat16, SIX),
        ("smollm3", torch.bfloat16, SIX),
        ("llama", torch.int8, SEVEN),
        ("llama", torch.float8_e4m3fn, SEVEN),
        ("qwen3 yarn", torch.bfloat16, SEVEN),
        ("phi4 mini", torch.bfloat16, SEVEN),
    ],
)
def test_launches_of_a_layer_with_one_row(
    name: str, cache: torch.dtype, expected: list[str], tmp_path: Path
) -> None:
    assert layer_kernels(name, tmp_path, cache=cache) == expected


def test_launches_of_a_layer_that_is_not_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module, "MAX_FUSED_ROWS", 0)
    assert layer_kernels("llama", tmp_path) == NINE


def test_launches_of_a_layer_with_drafts(tmp_path: Path) -> None:
    found = layer_kernels("llama", tmp_path, rows=5)
    assert found == [name.replace("gemv", "skinny_gemm") for name in NINE]


def test_launches_of_an_int4_layer_with_one_row(tmp_path: Path) -> None:
    spec = read_hf_config(write_config(tmp_path, "llama", hidden_size=256, intermediate_size=256))
    quant = QuantizationConfig(method="awq", bits=4, group_size=64, zero_point=True)
    spec = replace(spec, quant=quant, num_layers=1, sliding_windows=(None,))
    with record_launches(90, 132) as recorded, torch.inference_mode():
        weights = random_weights(spec, device=META, dtype=torch.bfloat16, seed=0)
        pages = KVCache.zeros(spec, 1, device=META, dtype=torch.bfloat16)
        inputs = inputs_to_device(decode_inputs(1, 1024), META)
        Decoder(spec, weights, 1).forward(inputs, pages)
    names = [each.kernel.fn.__name__ for each in recorded.launches]
    assert names[:6] == ["_int4_qkv_rope_kernel", *ATTENTION, *["_int4_gemv_kernel"] * 3]


def test_a_fused_layer_launches_nothing_but_its_kernels(tmp_path: Path) -> None:
    one, two = (decode_step("llama", tmp_path, n, cache=torch.bfloat16)[1] for n in (1, 2))
    assert set(two - one) <= {"empty", "empty_like", "flatten", "view"}


@pytest.mark.parametrize("name", ["gemma2", "olmo2", "glm4", "exaone4", "mixtral", "llama biases"])
def test_other_layers_keep_their_norms(name: str, tmp_path: Path) -> None:
    found, _ = decode_step(name, tmp_path, 2, cache=torch.bfloat16)
    assert [each.kernel.fn.__name__ for each in found].count(NORM) >= 5


@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_equal_separate_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The references bit for bit, with one row and with several."""
    make(name, tmp_path)
    text = random_text(seed=3, length=40)
    found = []
    for most_rows in (MAX_FUSED_ROWS, 0):
        monkeypatch.setattr(decoder_module, "MAX_FUSED_ROWS", most_rows)
        model = Model(tmp_path)
        parts = [model.step([(0, a, text[a:b])])[0] for a, b in ((0, 30), (30, 31), (31, 38))]
        found.append(torch.cat([*parts, *model.step([(0, 38, text[38:39])])]))
    assert torch.equal(*found)


def test_kernels_of_a_fused_step_equal_the_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16, a row after a prompt: logits, and the keys and values of all layers."""
    spec = read_hf_config(write_config(tmp_path, "qwen2 window"))
    weights = random_weights(spec, device="cpu", dtype=torch.float16, seed=1)
    caches = [KVCache.zeros(spec, 3, device="cpu", dtype=torch.float16) for _ in range(2)]
    decoder = Decoder(spec, weights, 48)
    inputs = inputs_to_device(decode_inputs(1, 17), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for layer, twin in zip(*(cache.layers for cache in caches), strict=True):
        for tensor, copy in zip(layer.tensors, twin.tensors, strict=True):
            tensor.normal_(generator=generator)
            copy.copy_(tensor)
    expected = decoder.forward(inputs, caches[0])
    for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(found.name)
        if hasattr(module, "can_use_triton"):
            monkeypatch.setattr(module, "can_use_triton", lambda x: True)
    ours = decoder.forward(inputs, caches[1])
    same(ours, expected.double(), 5e-3)
    for layer, twin in zip(*(cache.layers for cache in caches), strict=True):
        for tensor, copy in zip(layer.tensors, twin.tensors, strict=True):
            same(copy, tensor.double(), 5e-3)


# -- the projection with RoPE -----------------------------------------------------------------


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(ours: Tensor, exact: Tensor, limit: float) -> None:
    assert exact.dtype is torch.float64
    assert ours.shape == exact.shape
    error = (ours.double() - exact).abs().max().item() / exact.abs().max().item()
    assert error < limit, error


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.float16, 2e-3)])
@pytest.mark.parametrize("slot", [37, -1])
@pytest.mark.parametrize(
    ("ins", "heads", "kv_heads", "size", "biased"),
    [(64, 4, 2, 16, False), (1040, 3, 1, 32, True), (48, 2, 2, 64, True)],
)
def test_projection_with_rope_equals_the_references(
    ins: int,
    heads: int,
    kv_heads: int,
    size: int,
    biased: bool,
    slot: int,
    dtype: torch.dtype,
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    outs = (heads + 2 * kv_heads) * size
    x, weight = drawn(1, 1, ins, dtype=dtype) / 16, drawn(2, outs, ins, dtype=dtype) / 8
    scale, bias = drawn(3, ins, dtype=dtype), drawn(4, outs, dtype=dtype) if biased else None
    angles = torch.arange(50)[:, None] / 1e2 ** (torch.arange(size // 2) * 2 / size)
    cos_sin, positions, slots = (
        (angles.cos(), angles.sin()),
        torch.tensor([29], dtype=torch.int32),
        torch.tensor([slot]),
    )
    ours, exact = (
        LayerKV(*(torch.full((3, kv_heads, 16, size), 9.0, dtype=kind) for _ in range(2)))
        for kind in (dtype, torch.float64)
    )
    queries = project_and_store_kv_triton(
        x, RMSNorm(scale, 4e-3), weight, bias, positions, cos_sin, ours, slots
    )
    normed, _ = rms_norm_reference(x.double(), scale.double(), 4e-3, offset=False, residual=None)
    qkv = normed @ weight.double().T + (0 if bias is None else bias.double())
    expected = rope_and_store_kv_reference(qkv, positions, cos_sin, None, exact, slots)
    assert queries.dtype is dtype
    same(queries, expected, limit)
    for mine, theirs in ((ours.keys, exact.keys), (ours.values, exact.values)):
        same(mine, theirs, limit)
        untouched = theirs == 9.0
        assert untouched.any()
        assert (mine[untouched] == 9.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("slot", [37, -1])
@pytest.mark.parametrize(
    ("ins", "heads", "kv_heads", "size", "group"), [(256, 4, 2, 16, 64), (384, 3, 1, 64, 32)]
)
def test_int4_projection_with_rope_equals_the_references(
    ins: int,
    heads: int,
    kv_heads: int,
    size: int,
    group: int,
    slot: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outs = (heads + 2 * kv_heads) * size
    codes = torch.randint(0, 16, (outs, ins), generator=torch.Generator().manual_seed(1))
    packed = pack_int4(codes.to(torch.uint8))
    shape = (outs, ins // group)
    grid = pack_grid(drawn(2, *shape).abs() / 50 + 0.01, torch.full(shape, 7, dtype=torch.uint8))
    weight = dequantize_int4(packed, grid, torch.float64)
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    x, scale = drawn(3, 1, ins).to(dtype) / 16, drawn(4, ins).to(dtype)
    bias = drawn(5, outs).to(dtype)
    angles = torch.arange(50)[:, None] / 1e2 ** (torch.arange(size // 2) * 2 / size)
    cos_sin, positions = (angles.cos(), angles.sin()), torch.tensor([29], dtype=torch.int32)
    slots = torch.tensor([slot])
    ours, exact = (
        LayerKV(*(torch.full((3, kv_heads, 16, size), 9.0, dtype=kind) for _ in range(2)))
        for kind in (dtype, torch.float64)
    )
    queries = int4_project_and_store_kv_triton(
        x, RMSNorm(scale, 4e-3), packed, grid, bias, positions, cos_sin, ours, slots
    )
    normed, _ = rms_norm_reference(x.double(), scale.double(), 4e-3, offset=False, residual=None)
    qkv = normed @ weight.T + bias.double()
    expected = rope_and_store_kv_reference(qkv, positions, cos_sin, None, exact, slots)
    # rounded twice, before and after the rotation
    limit = {torch.float16: 2e-3, torch.bfloat16: 16e-3}[dtype]
    same(queries, expected, limit)
    same(ours.keys, exact.keys, limit)
    same(ours.values, exact.values, limit)


def poisoned(make: Any) -> Any:
    """Fill new tensors with NaN, so that unwritten elements show."""
    return lambda *a, **k: make(*a, **k).fill_(math.nan)
