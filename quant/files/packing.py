"""Quantized weights, and their file layouts: AutoAWQ and compressed-tensors; GPTQ's is read only.

Sources: AutoAWQ's GEMM layout (awq/utils/packing_utils.py), compressed-tensors (pack-quantized,
int-quantized and float-quantized), AutoGPTQ's QuantLinear.pack for 3, 4 and 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any, Literal

import torch
from torch import Tensor

from localgen.backends.formats.architecture.model_spec import QuantizationConfig
from localgen.backends.formats.hf.quantization_config import AWQ_ORDER
from localgen.quant.request.recipe import Recipe

# rows: compressed-tensors of 8 bits with a scale per output, which are not packed into words
PackingLayout = Literal["awq", "pack-quantized", "rows"]

_WORD_BITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """Integer codes with a scale and a zero point per group of inputs: (code - zero) * scale.

    codes: uint8 [out, in], below 2 ** bits. scales: float32 [out, groups], values that float16
    can hold. zeros: uint8 [out, groups]. group_index: int32 [in], the group of each input; None if
    groups follow the order of the inputs.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group_index: Tensor | None = None

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        at = _group_index(self).long()
        return (self.codes.float() - self.zeros.float()[:, at]) * self.scales[:, at]


@dataclass(frozen=True, slots=True, eq=False)
class RowWeight:
    """values * scales. values: int8 or float8_e4m3fn [out, in]. scales: float32 [out, 1]."""

    values: Tensor
    scales: Tensor

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        return self.values.float() * self.scales


@dataclass(frozen=True, slots=True, eq=False)
class GgufWeight:
    """Rows of a tensor of a GGUF file. packed: uint8 [out, bytes], in the file's row order.
    values: what they stand for, float32 [out, in], in the checkpoint's."""

    packed: Tensor
    values: Tensor

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        return self.values


QuantizedWeight = GroupedWeight | RowWeight | GgufWeight
# part of the name of a GgufWeight's tensor
GGUF_ROWS = "gguf_rows"


def packing_layout(recipe: Recipe) -> PackingLayout:
    """File layout of a recipe's weights.

    Four bits go to AutoAWQ's layout, which the most readers support and which stores zero points
    unchanged. It has no other widths; these go to pack-quantized of compressed-tensors.
    """
    if not recipe.has_groups:
        return "rows"
    return "awq" if recipe.bits == 4 else "pack-quantized"


def is_symmetric(bits: int) -> bool:
    """Zero points of this width are the middle of the range, 2 ** (bits - 1), and are not stored.

    transformers 5 does not load packed zero points, and vLLM's Marlin kernel, which runs on most
    GPUs, has none in 8 bits.
    """
    return bits in (3, 8)


def packing_multiple(recipe: Recipe) -> int:
    """Number that divides the inputs and outputs of every weight that can be packed."""
    return 1 if not recipe.has_groups else _packing_period(recipe.bits)[0]


def pack_linear(weight: QuantizedWeight, layout: PackingLayout) -> dict[str, Tensor]:
    """Tensors of one linear by the last part of their names, on the CPU."""
    if isinstance(weight, GgufWeight):
        return {GGUF_ROWS: _to_cpu_contiguous(weight.packed)}
    if isinstance(weight, RowWeight):
        return {
            "weight": _to_cpu_contiguous(weight.values),
            "weight_scale": _to_cpu_contiguous(weight.scales.float()),
        }
    if layout == "awq":
        places = torch.tensor(AWQ_ORDER).argsort()
        return {
            "qweight": _pack_words(_permute_columns(weight.codes.T, places), weight.bits, 1),
            "qzeros": _pack_words(_permute_columns(weight.zeros.T, places), weight.bits, 1),
            "scales": _to_cpu_contiguous(weight.scales.T.half()),
        }
    parts = {
        "weight_packed": _pack_words(weight.codes, weight.bits, 1),
        "weight_scale": _to_cpu_contiguous(weight.scales.half()),
        "weight_shape": torch.tensor(weight.codes.shape),
    }
    if is_symmetric(weight.bits):
        assert bool((weight.zeros == 2 ** (weight.bits - 1)).all())
    else:
        parts["weight_zero_point"] = _pack_words(weight.zeros, weight.bits, 0)
    return parts


def unpack_linear(parts: dict[str, Tensor], quant: QuantizationConfig) -> QuantizedWeight:
    """The weight of a linear's tensors, in any layout that localgen reads."""
    bits = quant.bits
    match quant.method:
        case "fp8" | "int8":
            return RowWeight(parts["weight"], parts["weight_scale"].float().reshape(-1, 1))
        case "awq":
            places = torch.tensor(AWQ_ORDER)
            codes = _permute_columns(_unpack_words(parts["qweight"], bits, 1), places)
            zeros = _permute_columns(_unpack_words(parts["qzeros"], bits, 1), places)
            return GroupedWeight(codes.T, parts["scales"].float().T, zeros.T, bits)
        case "gptq":
            zeros = _unpack_words(parts["qzeros"], bits, 1).int() + quant.zero_offset
            zeros = (zeros & (2**bits - 1)).byte()
            codes = _unpack_words(parts["qweight"], bits, 0).T
            scales = parts["scales"].float().T
            return GroupedWeight(codes, scales, zeros.T, bits, parts.get("g_idx"))
        case "pack-quantized":
            scales = parts["weight_scale"].float()
            zeros = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.uint8)
            if "weight_zero_point" in parts:
                zeros = _unpack_words(parts["weight_zero_point"], bits, 0)
            codes = _unpack_words(parts["weight_packed"], bits, 1)
            return GroupedWeight(codes, scales, zeros, bits)


def quantization_config(recipe: Recipe, unquantized: list[str]) -> dict[str, Any]:
    """The quantization_config of config.json. unquantized: last name parts of linears within the
    layers that stay unquantized."""
    if packing_layout(recipe) == "awq":
        return {
            "quant_method": "awq",
            "bits": recipe.bits,
            "group_size": -1 if recipe.group_size is None else recipe.group_size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": unquantized or None,
        }
    file_format, group = _compressed_tensors_group(recipe)
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "ignore": ["lm_head", *(f"re:.*\\.{name}$" for name in unquantized)],
        "config_groups": {"group_0": {"targets": ["Linear"], **group}},
    }


def _compressed_tensors_group(recipe: Recipe) -> tuple[str, dict[str, Any]]:
    """Name of the format, and the arguments of weights and activations."""
    if not recipe.has_groups:
        kind = "float" if recipe.method == "fp8" else "int"
        common = {"num_bits": 8, "type": kind, "symmetric": True}
        return f"{kind}-quantized", {
            "weights": {**common, "strategy": "channel", "dynamic": False},
            "input_activations": {**common, "strategy": "token", "dynamic": True},
        }
    return "pack-quantized", {
        "weights": {
            "num_bits": recipe.bits,
            "type": "int",
            "symmetric": is_symmetric(recipe.bits),
            # gptq rounds in another order of inputs, but leaves the groups in place
            "strategy": "channel" if recipe.group_size is None else "group",
            "group_size": recipe.group_size,
            "dynamic": False,
        },
        "input_activations": None,
    }


def _group_index(weight: GroupedWeight) -> Tensor:
    """int32 [in]."""
    if weight.group_index is not None:
        return weight.group_index.int()
    ins, groups = weight.codes.shape[1], weight.scales.shape[1]
    return torch.arange(ins, dtype=torch.int32, device=weight.codes.device) // (ins // groups)


def _permute_columns(rows: Tensor, order: Tensor) -> Tensor:
    """[rows, outs] with every eight columns reordered."""
    return rows.reshape(rows.shape[0], -1, 8)[..., order.to(rows.device)].flatten(1)


def _packing_period(bits: int) -> tuple[int, int]:
    """Smallest numbers of codes and of 32-bit words that have the same number of bits."""
    together = lcm(_WORD_BITS, bits)
    return together // bits, together // _WORD_BITS


def _pack_words(codes: Tensor, bits: int, axis: int) -> Tensor:
    """Codes of a matrix packed along an axis as a bit stream, lowest bits first, in int32."""
    if axis == 1:
        return _to_cpu_contiguous(_pack_words(codes.T, bits, 0).T)
    every, words = _packing_period(bits)
    parts = codes.reshape(-1, every, codes.shape[1])
    out = parts.new_zeros((len(parts), words, parts.shape[2]), dtype=torch.int32)
    for index in range(every):
        code = parts[:, index].int()
        word, at = divmod(index * bits, _WORD_BITS)
        out[:, word] |= code << at
        if at + bits > _WORD_BITS:
            out[:, word + 1] |= code >> (_WORD_BITS - at)
    return _to_cpu_contiguous(out.flatten(0, 1))


def _unpack_words(words: Tensor, bits: int, axis: int) -> Tensor:
    """Inverse of `_pack_words`: uint8."""
    if axis == 1:
        return _unpack_words(words.T, bits, 0).T
    every, count = _packing_period(bits)
    parts = words.reshape(-1, count, words.shape[1]).long() & (2**_WORD_BITS - 1)
    out = words.new_empty((len(parts), every, words.shape[1]), dtype=torch.uint8)
    for index in range(every):
        word, at = divmod(index * bits, _WORD_BITS)
        code = parts[:, word] >> at
        if at + bits > _WORD_BITS:
            code = code | (parts[:, word + 1] << (_WORD_BITS - at))
        out[:, index] = (code & (2**bits - 1)).byte()
    return out.flatten(0, 1)


def _to_cpu_contiguous(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
