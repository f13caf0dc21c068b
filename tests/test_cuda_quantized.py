"""Quantized checkpoints: AutoAWQ, GPTQ and FP8, written value by value from their definitions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_folders import edit

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from cuda_checkpoints import State, assert_one_line, load, make, rewrite, shapes
from safetensors.torch import load_file, save_file
from torch import Tensor

from localgen.backends.cuda.model.linear import (
    DenseLinear,
    Fp8Linear,
    Int4Linear,
    Linear,
    MergedLinear,
)
from localgen.backends.cuda.model.weights import DecoderWeights, random_weights
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.model_files import model_folder
from localgen.backends.formats.weight_sizes import read_weight_sizes

GROUP = 16


def words_of(digits: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int [a, 8 b] of 0 to 15 -> int32 [a, b]; digit i of a word is column order[i] of eight."""
    words = torch.zeros(digits.shape[0], digits.shape[1] // 8, dtype=torch.int64)
    for i, column in enumerate(order):
        words |= digits[:, column::8].long() << (4 * i)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def random_digits(*shape: int) -> Tensor:
    return torch.randint(0, 16, shape)


def scales_of(*shape: int) -> Tensor:
    return (0.01 + 0.01 * torch.rand(shape)).half()


def awq(ins: int, outs: int) -> tuple[State, Tensor]:
    """The tensors of a linear in AutoAWQ's GEMM layout, and its weight [out, in]."""
    digits, zeros = random_digits(ins, outs), random_digits(ins // GROUP, outs)
    scales, order = scales_of(ins // GROUP, outs), (0, 2, 4, 6, 1, 3, 5, 7)
    group = torch.arange(ins) // GROUP
    weight = (digits - zeros[group]).double() * scales[group].double()
    words = {"qweight": words_of(digits, order), "qzeros": words_of(zeros, order)}
    return {**words, "scales": scales}, weight.T


def gptq(
    ins: int, outs: int, *, offset: int = 1, g_idx: Tensor | None = None, group: int = GROUP
) -> tuple[State, Tensor]:
    """As awq, in GPTQ's layout. offset: subtracted from stored zeros."""
    digits, zeros = random_digits(ins, outs), random_digits(ins // group, outs)
    scales = scales_of(ins // group, outs)
    groups = torch.arange(ins) // group if g_idx is None else g_idx
    weight = (digits - zeros[groups]).double() * scales[groups].double()
    tensors = {
        "qweight": words_of(digits.T).T.contiguous(),
        "qzeros": words_of((zeros - offset) & 15),
        "scales": scales,
        "g_idx": groups.to(torch.int32),
    }
    return tensors, weight.T


def packed(ins: int, outs: int, *, zero_points: bool = True) -> tuple[State, Tensor]:
    """As awq, in the pack-quantized format of compressed-tensors."""
    digits, zeros = random_digits(outs, ins), random_digits(outs, ins // GROUP)
    if not zero_points:
        zeros.fill_(8)
    scales, group = scales_of(outs, ins // GROUP), torch.arange(ins) // GROUP
    tensors = {
        "weight_packed": words_of(digits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([outs, ins]),
    }
    if zero_points:
        tensors["weight_zero_point"] = words_of(zeros.T).T.contiguous()
    return tensors, (digits - zeros[:, group]).double() * scales[:, group].double()


def packed_config(**weights: Any) -> dict[str, Any]:
    """quantization_config of `packed`."""
    common = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**common, **weights}}},
    }


def fp8(ins: int, outs: int, *, per_row: bool = True) -> tuple[State, Tensor]:
    weight = torch.randn(outs, ins).to(torch.float8_e4m3fn)
    scale = torch.rand(outs, 1).bfloat16() if per_row else torch.tensor(0.3)
    return {"weight": weight, "weight_scale": scale}, weight.double() * scale.double()


Quantize = Callable[[int, int], tuple[State, Tensor]]


def quantized(folder: Path, quantize: Quantize, **quantization: Any) -> State:
    """A Llama folder with the linears of `quantize`; returns their weights [out, in]."""
    model = make("llama", folder)
    edit(folder / "config.json", quantization_config=quantization)
    tensors: State = {}
    weights: State = {}
    for name, tensor in model.state_dict().items():
        linear = name.removesuffix(".weight")
        if not linear.endswith("_proj"):
            tensors[name] = tensor
            continue
        parts, weights[linear] = quantize(tensor.shape[1], tensor.shape[0])
        tensors |= {f"{linear}.{part}": value for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    return weights


def assert_computes(linear: Linear | None, *weights: Tensor) -> None:
    """Assert that the linear multiplies by these weights, concatenated by outputs."""
    assert linear is not None
    weight = torch.cat(weights)
    assert (linear.out_features, linear.in_features) == weight.shape
    x = torch.randn(5, linear.in_features)
    torch.testing.assert_close(linear(x).double(), x.double() @ weight.T, atol=1e-4, rtol=1e-4)
    low = linear(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), x.double() @ weight.T, atol=0.3, rtol=0.05)


def assert_computes_all(weights: DecoderWeights, expected: State, kind: type) -> None:
    for index, layer in enumerate(weights.layers):
        at = {name.split(".")[-1]: w for name, w in expected.items() if f".{index}." in name}
        assert_computes(layer.qkv, at["q_proj"], at["k_proj"], at["v_proj"])
        assert_computes(layer.attention_out, at["o_proj"])
        assert_computes(layer.gate_up, at["gate_proj"], at["up_proj"])
        assert_computes(layer.down, at["down_proj"])
        for linear in (layer.qkv, layer.attention_out, layer.gate_up, layer.down):
            assert type(linear) is kind


def test_awq_weights_are_read(tmp_path: Path) -> None:
    expected = quantized(tmp_path, awq, quant_method="awq", bits=4, group_size=GROUP)
    weights = load(tmp_path)
    assert_computes_all(weights, expected, Int4Linear)
    qkv = weights.layers[0].qkv
    assert isinstance(qkv, Int4Linear)
    assert (qkv.packed.dtype, qkv.packed.shape) == (torch.uint8, (128, 32))
    assert (qkv.grid.dtype, qkv.grid.shape) == (torch.float16, (128, 4, 2))
    # the first input is the low half of the first byte
    column = (qkv.packed[:64, 0] & 15).double() - qkv.grid[:64, 0, 1].double()
    wanted = expected["model.layers.0.self_attn.q_proj"][:, 0]
    assert torch.equal(column * qkv.grid[:64, 0, 0].double(), wanted)
    assert isinstance(weights.head, DenseLinear)


def test_the_memory_of_int4_weights_is_known_before_they_are_loaded(tmp_path: Path) -> None:
    quantized(tmp_path, awq, quant_method="awq", bits=4, group_size=GROUP)
    expected = read_weight_sizes(model_folder(tmp_path), None).size_bytes
    assert load(tmp_path).num_bytes == expected


@pytest.mark.parametrize(("layout", "offset"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq_weights_are_read(layout: str, offset: int, tmp_path: Path) -> None:
    expected = quantized(
        tmp_path,
        lambda ins, outs: gptq(ins, outs, offset=offset),
        quant_method="gptq",
        bits=4,
        group_size=GROUP,
        checkpoint_format=layout,
    )
    weights = load(tmp_path)
    assert_computes_all(weights, expected, Int4Linear)
    assert all(layer.attention_out.input_order is None for layer in weights.layers)  # type: ignore[attr-defined]


def test_gptq_without_groups(tmp_path: Path) -> None:
    def quantize(ins: int, outs: int) -> tuple[State, Tensor]:
        tensors, weight = gptq(ins, outs, group=ins)
        del tensors["g_idx"]
        return tensors, weight

    expected = quantized(tmp_path, quantize, quant_method="gptq", bits=4, group_size=-1)
    assert_computes_all(load(tmp_path), expected, Int4Linear)


def test_gptq_in_order_of_activation(tmp_path: Path) -> None:
    orders = {ins: torch.randperm(ins) // GROUP for ins in (48, 64)}
    expected = quantized(
        tmp_path,
        lambda ins, outs: gptq(ins, outs, g_idx=orders[ins]),
        quant_method="gptq",
        bits=4,
        group_size=GROUP,
        desc_act=True,
    )
    assert_computes_all(load(tmp_path), expected, Int4Linear)


def test_parts_in_orders_of_their_own_stay_apart(tmp_path: Path) -> None:
    expected = quantized(
        tmp_path,
        lambda ins, outs: gptq(ins, outs, g_idx=torch.randperm(ins) // GROUP),
        quant_method="gptq",
        bits=4,
        group_size=GROUP,
        desc_act=True,
    )
    layer, at = load(tmp_path).layers[0], "model.layers.0.self_attn."
    assert isinstance(layer.qkv, MergedLinear)
    assert_computes(layer.qkv, *(expected[f"{at}{part}_proj"] for part in "qkv"))


@pytest.mark.parametrize("zero_points", [True, False])
def test_pack_quantized_weights_are_read(zero_points: bool, tmp_path: Path) -> None:
    expected = quantized(
        tmp_path,
        lambda ins, outs: packed(ins, outs, zero_points=zero_points),
        **packed_config(symmetric=not zero_points),
    )
    weights = load(tmp_path)
    assert_computes_all(weights, expected, Int4Linear)
    assert weights.num_bytes == read_weight_sizes(model_folder(tmp_path), None).size_bytes


def test_pack_quantized_weights_of_another_shape_are_rejected(tmp_path: Path) -> None:
    """Old versions of compressed-tensors leave bits of words unused."""
    quantized(tmp_path, packed, **packed_config(symmetric=False, num_bits=3))
    assert_one_line(tmp_path, "q_proj.weight_packed is of shape [64, 8], not [64, 6]")


@pytest.mark.parametrize("per_row", [True, False])
def test_fp8_weights_are_read(per_row: bool, tmp_path: Path) -> None:
    expected = quantized(
        tmp_path, lambda ins, outs: fp8(ins, outs, per_row=per_row), quant_method="fbgemm_fp8"
    )
    weights = load(tmp_path)
    assert_computes_all(weights, expected, Fp8Linear)
    qkv = weights.layers[0].qkv
    assert isinstance(qkv, Fp8Linear)
    assert (qkv.weight.dtype, qkv.scale.shape) == (torch.float8_e4m3fn, (128,))


def test_unquantized_linears_and_extra_biases_are_read(tmp_path: Path) -> None:
    """Files leave some linears unquantized; GPTQ tools write biases where the model has none."""
    expected = quantized(tmp_path, awq, quant_method="awq", bits=4, group_size=GROUP)
    path, at = tmp_path / "model.safetensors", "model.layers.1.self_attn."
    tensors = load_file(path)
    for part in ("qweight", "qzeros", "scales"):
        del tensors[f"{at}v_proj.{part}"]
    tensors[f"{at}v_proj.weight"] = expected[f"{at}v_proj"].float().contiguous()
    tensors["model.layers.0.self_attn.k_proj.bias"] = torch.ones(32)
    save_file(tensors, path)
    weights = load(tmp_path)
    mixed, x = weights.layers[1].qkv, torch.randn(5, 64)
    assert isinstance(mixed, MergedLinear)
    weight = torch.cat([expected[f"{at}{part}_proj"] for part in "qkv"])
    torch.testing.assert_close(mixed(x).double(), x.double() @ weight.T, atol=1e-4, rtol=1e-4)
    bias = weights.layers[0].qkv(torch.zeros(1, 64))[0]
    assert bias.tolist() == [0.0] * 64 + [1.0] * 32 + [0.0] * 32


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qweight", lambda t: t[:, :-1].contiguous(), "is of shape [64, 7], not [64, 8]"),
        ("qweight", lambda t: t.long(), "is of type I64, not I32"),
        ("qzeros", lambda t: t[:-1].contiguous(), "is of shape [3, 8], not [4, 8]"),
        ("scales", lambda t: t.to(torch.int8), "is of type I8"),
    ],
)
def test_int4_tensors_of_wrong_shape_are_rejected(
    part: str, change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    quantized(tmp_path, awq, quant_method="awq", bits=4, group_size=GROUP)
    name = f"model.layers.1.self_attn.o_proj.{part}"
    rewrite(tmp_path, lambda tensors: tensors.update({name: change(tensors[name])}))
    assert_one_line(tmp_path, f"{name} {message}")


def test_group_size_that_does_not_divide_is_rejected(tmp_path: Path) -> None:
    quantized(tmp_path, awq, quant_method="awq", bits=4, group_size=40)
    assert_one_line(tmp_path, "q_proj.qweight of 64 inputs", "does not fit 4 bits in groups of 40")


@pytest.mark.parametrize("value", [0, -1, 4, 99])
def test_invalid_activation_order_is_rejected(value: int, tmp_path: Path) -> None:
    quantized(tmp_path, gptq, quant_method="gptq", bits=4, group_size=GROUP, desc_act=True)
    name = "model.layers.0.self_attn.q_proj.g_idx"
    wrong = torch.full((64,), value, dtype=torch.int32)
    rewrite(tmp_path, lambda tensors: tensors.update({name: wrong}))
    assert_one_line(tmp_path, f"{name} does not assign 16 inputs to each of 4 groups")


def test_fp8_scales_of_wrong_shape_are_rejected(tmp_path: Path) -> None:
    quantized(tmp_path, fp8, quant_method="fbgemm_fp8")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(2, 1)}))
    assert_one_line(tmp_path, f"{name} is of shape [2, 1], not [48, 1]")


@pytest.mark.parametrize(
    ("quantize", "quantization"),
    [
        (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
        (fp8, {"quant_method": "fbgemm_fp8"}),
    ],
)
def test_random_weights_have_the_same_quantization(
    quantize: Quantize, quantization: dict[str, Any], tmp_path: Path
) -> None:
    quantized(tmp_path, quantize, **quantization)
    spec = read_hf_config(tmp_path)
    made_up = random_weights(spec, device="cpu", dtype=torch.bfloat16, seed=1)
    assert shapes(made_up) == shapes(load(tmp_path, torch.bfloat16))
    out = made_up.layers[0].attention_out
    assert isinstance(out, Int4Linear | Fp8Linear)
    assert out.dequantize(torch.float32).std().item() == pytest.approx(0.02, rel=0.05)
