"""Packed weights equal the engine's readers and the published layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from localgen.backends.cuda.model.int4_repack import act_order, repack_awq, repack_gptq
from localgen.quant.files.packing import (
    GroupedWeight,
    PackingLayout,
    RowWeight,
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
    return GroupedWeight(
        codes=torch.randint(0, 2**bits, (OUTS, INS), generator=made, dtype=torch.uint8),
        scales=torch.rand(OUTS, INS // GROUP, generator=made).half().float(),
        zeros=torch.randint(0, 2**bits, (OUTS, INS // GROUP), generator=made, dtype=torch.uint8),
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


def published_gptq(parts: dict[str, Tensor], bits: int) -> Tensor:
    """GPTQ v1: a stream of bits down the inputs, zeros along the outputs and stored less one."""

    def stream(words: list[int], count: int) -> list[int]:
        bits_of = sum(word << (32 * index) for index, word in enumerate(words))
        return [bits_of >> (bits * index) & (2**bits - 1) for index in range(count)]

    words = parts["qweight"].numpy().view(np.uint32).T.tolist()
    digits = np.array([stream(column, INS) for column in words], float)
    rows = parts["qzeros"].numpy().view(np.uint32).tolist()
    zeros = (np.array([stream(row, OUTS) for row in rows]) + 1) % 2**bits
    groups = parts["g_idx"].numpy()
    scales = parts["scales"].double().numpy()
    return torch.from_numpy((digits - zeros.T[:, groups]) * scales.T[:, groups])


def test_awq_as_published_and_in_the_engine() -> None:
    weight = grouped(4)
    parts = pack_linear(weight, "awq")
    assert parts["qweight"].shape == (INS, OUTS // 8)
    assert parts["scales"].dtype == torch.float16
    torch.testing.assert_close(published_awq(parts), weight.dequantize().double())
    linear = repack_awq(parts["qweight"], parts["qzeros"], parts["scales"], None)
    assert torch.equal(linear.dequantize(torch.float32), weight.dequantize())


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("ordered", [True, False])
def test_gptq_as_published(bits: int, ordered: bool) -> None:
    weight = grouped(bits, ordered=ordered)
    parts = pack_linear(weight, "gptq")
    assert parts["qweight"].shape == (INS * bits // 32, OUTS)
    assert parts["qzeros"].shape == (INS // GROUP, OUTS * bits // 32)
    torch.testing.assert_close(published_gptq(parts, bits), weight.dequantize().double())


@pytest.mark.parametrize("ordered", [True, False])
def test_gptq_in_the_engine(ordered: bool) -> None:
    weight = grouped(4, ordered=ordered)
    parts = pack_linear(weight, "gptq")
    order = act_order(parts["g_idx"], INS // GROUP)
    linear = repack_gptq(
        parts["qweight"], parts["qzeros"], parts["scales"], None, order=order, zero_offset=1
    )
    x = torch.randn(3, INS)
    torch.testing.assert_close(linear(x), x @ weight.dequantize().T, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("layout", "bits", "ordered"),
    [("awq", 4, True), *(("gptq", bits, bits != 8) for bits in (3, 4, 8))],
)
def test_packed_weights_are_unpacked_unchanged(
    layout: PackingLayout, bits: int, ordered: bool
) -> None:
    weight = grouped(bits, ordered=ordered)
    again = unpack_linear(pack_linear(weight, layout), layout, bits)
    assert isinstance(again, GroupedWeight)
    assert torch.equal(again.codes, weight.codes)
    assert torch.equal(again.zeros, weight.zeros)
    assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_fp8_and_int8_rows_survive_packing(dtype: torch.dtype) -> None:
    values = (torch.rand(OUTS, INS) * 200 - 100).to(dtype)
    weight = RowWeight(values, torch.rand(OUTS, 1))
    parts = pack_linear(weight, "compressed-tensors")
    assert (parts["weight"].dtype, parts["weight_scale"].shape) == (dtype, (OUTS, 1))
    again = unpack_linear(parts, "compressed-tensors", 8)
    assert torch.equal(again.dequantize(), weight.dequantize())


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        (Recipe(method="awq"), "awq"),
        (Recipe(method="rtn"), "awq"),
        (Recipe(method="awq", bits=3), "gptq"),
        (Recipe(method="rtn", bits=8), "gptq"),
        (Recipe(method="gptq"), "gptq"),
        (Recipe(method="fp8", bits=8), "compressed-tensors"),
    ],
)
def test_the_layout_of_a_recipe(recipe: Recipe, layout: PackingLayout) -> None:
    assert packing_layout(recipe) == layout
    assert quantization_config(recipe, [])["quant_method"] == layout


def test_no_reader_needs_to_permute() -> None:
    """GPTQ's result has its groups in the order of inputs, whatever order it worked in."""
    made = torch.Generator().manual_seed(1)
    weight = torch.randn(OUTS, INS, generator=made)
    x = torch.randn(512, INS, generator=made) * torch.rand(INS, generator=made)
    recipe = Recipe(method="gptq", group_size=GROUP)
    shared = factor_hessian(x.T @ x, damping=0.01, desc_act=True, name="x")
    rounded = round_gptq(weight, gptq_grid(weight, recipe), shared)
    assert torch.equal(pack_linear(rounded, "gptq")["g_idx"], (torch.arange(INS) // GROUP).int())
    assert quantization_config(recipe, [])["desc_act"] is False
