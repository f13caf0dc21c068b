"""Dequantize weights for which there is no kernel.

These are GPTQ and pack-quantized weights of other widths than 4 bits, int8 weights with a scale per
output, and quantized expert weights.
"""

from __future__ import annotations

from math import lcm

import torch
from torch import Tensor

from localgen.backends.cuda.model.linear import DenseLinear, Fp8Linear, Int4Linear, Linear
from localgen.backends.formats.architecture.model_spec import QuantizationConfig

_WORD_BITS = 32


def num_packed_words(count: int, bits: int) -> int | None:
    """Number of 32-bit words that hold `count` values; None if they do not fill whole words."""
    whole = count * bits
    return None if whole % lcm(_WORD_BITS, bits) else whole // _WORD_BITS


def dequantize_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor, *, bits: int, zero_offset: int
) -> Tensor:
    """Dequantize a GPTQ weight to float32 [out, in].

    qweight: int32 [in * bits / 32, out].
    qzeros: int32 [groups, out * bits / 32].
    scales: [groups, out].
    g_idx: [in], the group of each input.
    zero_offset: added to a stored zero point, modulo 2 ** bits.
    """
    zeros = _unpack_bits(qzeros.T, bits)  # [out, groups]
    zeros = (zeros + zero_offset) & (2**bits - 1)
    at = g_idx.long()
    weight = _unpack_bits(qweight, bits).T.float()
    weight -= zeros.float()[:, at]
    return weight.mul_(scales.float().T[:, at])


def dequantize_packed(
    weight: Tensor, zero_points: Tensor | None, scales: Tensor, *, bits: int
) -> Tensor:
    """Dequantize a pack-quantized weight of compressed-tensors to float32 [out, in].

    weight: int32 [out, in * bits / 32].
    zero_points: int32 [out * bits / 32, groups]; None if all are 2 ** (bits - 1).
    scales: [out, groups].
    """
    outs, groups = scales.shape
    codes = _unpack_bits(weight.T, bits).T.float().reshape(outs, groups, -1)
    zeros: Tensor | int = 2 ** (bits - 1)
    if zero_points is not None:
        zeros = _unpack_bits(zero_points, bits)[..., None]
    return codes.sub_(zeros).mul_(scales.float()[..., None]).flatten(1)


def dense_weight(linear: Linear, dtype: torch.dtype) -> Tensor:
    """The weight of a linear as a dense tensor, [out, in], with inputs in their original order."""
    match linear:
        case DenseLinear():
            return linear.weight
        case Fp8Linear():
            return linear.dequantize(dtype)
        case Int4Linear():
            weight = linear.dequantize(dtype)
            return weight if linear.input_order is None else weight[:, linear.input_order.argsort()]
    raise AssertionError(linear)


def dequantization_notes(quant: QuantizationConfig | None, *, has_experts: bool) -> tuple[str, ...]:
    """Notes for the user if the loaded weights take more memory than their files."""
    if quant is None or not (quant.dequantized_on_load or has_experts):
        return ()
    method = quant.method if quant.method == "pack-quantized" else quant.method.upper()
    what = f"{method} weights of {quant.bits} bits"
    if not quant.dequantized_on_load:
        what = f"expert {what}"
    return (f"{what} are dequantized on load and take as much memory as unquantized weights",)


def _unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Unpack a bit stream along each column: int32 [a, b] to int32 [a * 32 / bits, b]."""
    together = lcm(_WORD_BITS, bits)
    every, count = together // bits, together // _WORD_BITS
    parts = words.reshape(-1, count, words.shape[1])
    out = words.new_empty((len(parts), every, words.shape[1]))
    for index in range(every):
        word, at = divmod(index * bits, _WORD_BITS)
        left = min(bits, _WORD_BITS - at)
        # >> is an arithmetic shift: mask off the sign bits
        digit = (parts[:, word] >> at) & (2**left - 1)
        if left < bits:
            digit |= (parts[:, word + 1] & (2 ** (bits - left) - 1)) << left
        out[:, index] = digit
    return out.flatten(0, 1)
