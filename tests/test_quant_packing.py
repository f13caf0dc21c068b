"""Packed weights equal the engine's readers and the published layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from quant_gptq_layout import gptq_parts
from torch import Tensor

from localgen.backends.cuda.model.int4_repack import (
    act_order,
    repack_awq,
    repack_gptq,
    repack_packed,
)
from localgen.backends.formats.architecture.model_spec import QuantizationConfig
from localgen.quant.files.packing import (
    GroupedWeight,
    RowWeight,
    is_symmetric,
    pack_linear,
    packing_layout,
    quantization_config,
    unpack_linear,
)
from localgen.quant.methods.gptq import factor_hessian, gptq_grid, round_gptq
from localgen.quant.request.recipe import Recipe

INS, OUTS, GROUP = 128, 64, 32


def grouped(bits: int, *, ordered: bool = True) -> GroupedWeight:
    made = torch.Generator().manual_seed(bits)
    groups = None
    if not ordered:
        groups = (torch.randperm(INS, generator=made) // GROUP).int()
    zeros = torch.randint(0, 2**bits, (OUTS, INS // GROUP), generator=made, dtype=torch.uint8)
    if is_symmetric(bits):
        zeros.fill_(2 ** (bits - 1))
    return GroupedWeight(
        codes=torch.randint(0, 2**bits, (OUTS, INS), generator=made, dtype=torch.uint8),
        scales=torch.rand(OUTS, INS // GROUP, generator=made).half().float(),
        zeros=zeros,
        bits=bits,
        group_index=groups,
    )


def published_awq(parts: dict[str, Tensor]) -> Tensor:
    """AutoAWQ: a word of eight columns holds columns 0 2 4 6 1 3 5 7, lowest bits first."""

    def columns(words: Tensor) -> Any:
        table = np.zeros((words.shape[0], words.shape[1] * 8))
        for row, line in enumerate(words.numpy().view(np.uint32).tolist()):
            for at, word in enumerate(line):
                for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                    table[row, at * 8 + column] = word >> (4 * place) & 15
        return table

    groups = np.arange(INS) // GROUP
    digits, zeros = columns(parts["qweight"]), columns(parts["qzeros"])
    weight = (digits - zeros[groups]) * parts["scales"].double().numpy()[groups]
    return torch.from_numpy(weight.T)


def published_pack_quantized(parts: dict[str, Tensor], bits: int) -> Tensor:
    """compressed-tensors: a stream of bits along the inputs of each output, zeros down the outputs;
    without zeros, codes are signed numbers plus half the range."""

    def stream(words: list[int], count: int) -> list[int]:
        bits_of = sum(word << (32 * index) for index, word in enumerate(words))
        return [bits_of >> (bits * index) & (2**bits - 1) for index in range(count)]

    outs, ins = parts["weight_shape"].tolist()
    words = parts["weight_packed"].numpy().view(np.uint32).tolist()
    digits = np.array([stream(row, ins) for row in words], float)
    zeros = np.full(parts["weight_scale"].shape, 2 ** (bits - 1))
    if "weight_zero_point" in parts:
        columns = parts["weight_zero_point"].numpy().view(np.uint32).T.tolist()
        zeros = np.array([stream(column, outs) for column in columns]).T
    groups = np.arange(ins) // GROUP
    scales = parts["weight_scale"].double().numpy()
    return torch.from_numpy((digits - zeros[:, groups]) * scales[:, groups])


def test_awq_as_published_and_in_the_engine() -> None:
    weight = grouped(4)
    parts = pack_linear(weight, "awq")
    assert parts["qweight"].shape == (INS, OUTS // 8)
    assert parts["scales"].dtype == torch.float16
    torch.testing.assert_close(published_awq(parts), weight.dequantize().double())
    linear = repack_awq(parts["qweight"], parts["qzeros"], parts["scales"], None)
    assert torch.equal(linear.dequantize(torch.float32), weight.dequantize())


@pytest.mark.parametrize("ordered", [True, False])
def test_gptq_in_the_engine(ordered: bool) -> None:
    weight = grouped(4, ordered=ordered)
    parts = gptq_parts(weight, 1)
    order = act_order(parts["g_idx"], INS // GROUP)
    linear = repack_gptq(
        parts["qweight"], parts["qzeros"], parts["scales"], None, order=order, zero_offset=1
    )
    x = torch.randn(3, INS)
    torch.testing.assert_close(linear(x), x @ weight.dequantize().T, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_pack_quantized_as_published(bits: int) -> None:
    weight = grouped(bits)
    parts = pack_linear(weight, "pack-quantized")
    assert parts["weight_packed"].shape == (OUTS, INS * bits // 32)
    assert ("weight_zero_point" in parts) == (not is_symmetric(bits))
    wanted = weight.dequantize()
    torch.testing.assert_close(published_pack_quantized(parts, bits), wanted.double())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_pack_quantized_as_compressed_tensors_unpacks_it(bits: int) -> None:
    """By the package, whose codes and zero points are signed."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    weight = grouped(bits)
    parts = pack_linear(weight, "pack-quantized")
    codes = helpers.unpack_from_int32(parts["weight_packed"], bits, torch.Size((OUTS, INS)))
    assert torch.equal(codes.int() + 2 ** (bits - 1), weight.codes.int())
    if "weight_zero_point" in parts:
        shape = torch.Size((OUTS, INS // GROUP))
        zeros = helpers.unpack_from_int32(parts["weight_zero_point"], bits, shape, packed_dim=0)
        assert torch.equal(zeros.int() + 2 ** (bits - 1), weight.zeros.int())


@pytest.mark.parametrize("symmetric", [True, False])
def test_pack_quantized_in_the_engine(symmetric: bool) -> None:
    """Four bits, which other tools write."""
    weight = grouped(4)
    if symmetric:
        weight = replace(weight, zeros=torch.full_like(weight.zeros, 8))
    parts = pack_linear(weight, "pack-quantized")
    zeros = None if symmetric else parts["weight_zero_point"]
    linear = repack_packed(parts["weight_packed"], zeros, parts["weight_scale"], None)
    assert torch.equal(linear.dequantize(torch.float32), weight.dequantize())


@pytest.mark.parametrize(
    ("recipe", "quant"),
    [
        (Recipe(method="gptq"), QuantizationConfig(method="awq", bits=4)),
        (Recipe(method="gptq", bits=2), QuantizationConfig(method="pack-quantized", bits=2)),
        (Recipe(method="gptq", bits=3), QuantizationConfig(method="pack-quantized", bits=3)),
        (Recipe(method="gptq", bits=8), QuantizationConfig(method="pack-quantized", bits=8)),
    ],
)
def test_packed_weights_are_unpacked_unchanged(recipe: Recipe, quant: QuantizationConfig) -> None:
    weight = grouped(recipe.bits)
    again = unpack_linear(pack_linear(weight, packing_layout(recipe)), quant)
    assert isinstance(again, GroupedWeight)
    assert torch.equal(again.codes, weight.codes)
    assert torch.equal(again.zeros, weight.zeros)
    assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("ordered", [True, False])
def test_gptq_folders_are_unpacked(bits: int, offset: int, ordered: bool) -> None:
    """Both versions of the layout, in any order of inputs."""
    weight = grouped(bits, ordered=ordered)
    quant = QuantizationConfig(method="gptq", bits=bits, zero_offset=offset)
    again = unpack_linear(gptq_parts(weight, offset), quant)
    assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_fp8_and_int8_rows_survive_packing(dtype: torch.dtype) -> None:
    values = (torch.rand(OUTS, INS) * 200 - 100).to(dtype)
    weight = RowWeight(values, torch.rand(OUTS, 1))
    parts = pack_linear(weight, "rows")
    assert (parts["weight"].dtype, parts["weight_scale"].shape) == (dtype, (OUTS, 1))
    method: Literal["int8", "fp8"] = "int8" if dtype is torch.int8 else "fp8"
    again = unpack_linear(parts, QuantizationConfig(method=method, bits=8))
    assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("recipe", "layout", "method"),
    [
        (Recipe(method="awq"), "awq", "awq"),
        (Recipe(method="rtn"), "awq", "awq"),
        (Recipe(method="gptq"), "awq", "awq"),
        (Recipe(method="awq", bits=3), "pack-quantized", "compressed-tensors"),
        (Recipe(method="rtn", bits=8), "pack-quantized", "compressed-tensors"),
        (Recipe(method="fp8", bits=8), "rows", "compressed-tensors"),
    ],
)
def test_the_layout_of_a_recipe(recipe: Recipe, layout: str, method: str) -> None:
    assert packing_layout(recipe) == layout
    assert quantization_config(recipe, [])["quant_method"] == method


def test_no_reader_needs_to_permute() -> None:
    """GPTQ's result has its groups in the order of inputs, whatever order it worked in."""
    made = torch.Generator().manual_seed(1)
    weight = torch.randn(OUTS, INS, generator=made)
    x = torch.randn(512, INS, generator=made) * torch.rand(INS, generator=made)
    recipe = Recipe(method="gptq", group_size=GROUP)
    shared = factor_hessian(x.T @ x, damping=0.01, desc_act=True, name="x")
    rounded = round_gptq(weight, gptq_grid(weight, recipe), shared)
    linear = repack_awq(**pack_linear(rounded, "awq"), bias=None)
    assert torch.equal(linear.dequantize(torch.float32), rounded.dequantize())
    assert float((rounded.dequantize() - weight).abs().max()) < float(weight.abs().max()) / 4
