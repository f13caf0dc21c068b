"""How quantized weights lie in files that others read: AutoAWQ, GPTQ and compressed-tensors.

Sources: AutoAWQ's GEMM layout (awq/utils/packing_utils.py), AutoGPTQ's QuantLinear.pack for 2, 3,
4 and 8 bits, Neural Magic's compressed-tensors (naive-quantized and float-quantized).
"""

from __future__ import annotations

from math import lcm
from typing import Any, Literal

import torch
from torch import Tensor

from localgen.quant.files.quantized_weight import GroupedWeight, QuantizedWeight, RowWeight
from localgen.quant.request.recipe import Recipe

Layout = Literal["awq", "gptq", "compressed-tensors"]

# where the outputs 0 to 7 of an int32 lie in AutoAWQ's GEMM layout, counted in digits
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_WORD_BITS = 32


def layout_of(recipe: Recipe) -> Layout:
    """Where a recipe's weights go.

    Four bits in the inputs' order are AutoAWQ's, rtn's too: everything that reads 4 bits reads it,
    and its zeros are stored as they are. It has no other widths; these go to GPTQ's layout.
    """
    if not recipe.grouped:
        return "compressed-tensors"
    return "awq" if recipe.bits == 4 and recipe.method in ("awq", "rtn") else "gptq"


def fitting(recipe: Recipe) -> int:
    """Inputs and outputs of a weight must be multiples of this to be packed."""
    return 1 if not recipe.grouped else _period(recipe.bits)[0]


def pack(weight: QuantizedWeight, layout: Layout) -> dict[str, Tensor]:
    """The tensors of one linear, by the last part of their names; on the CPU."""
    if isinstance(weight, RowWeight):
        return {"weight": _own(weight.values), "weight_scale": _own(weight.scales.float())}
    scales = _own(weight.scales.T.half())
    if layout == "awq":
        places = torch.tensor(_AWQ_PLACES).argsort()
        return {
            "qweight": _words(_interleaved(weight.digits.T, places), weight.bits, 1),
            "qzeros": _words(_interleaved(weight.zeros.T, places), weight.bits, 1),
            "scales": scales,
        }
    stored = (weight.zeros.T.int() - 1) & (2**weight.bits - 1)
    return {
        "qweight": _words(weight.digits.T, weight.bits, 0),
        "qzeros": _words(stored, weight.bits, 1),
        "scales": scales,
        "g_idx": _own(_groups(weight)),
    }


def unpack(
    parts: dict[str, Tensor], layout: Layout, bits: int, *, zero_offset: int = 1
) -> QuantizedWeight:
    """The weight that `pack` made these tensors of.

    zero_offset: added to a zero in GPTQ's layout; the second version of it has none.
    """
    if layout == "compressed-tensors":
        return RowWeight(parts["weight"], parts["weight_scale"].float().reshape(-1, 1))
    scales = parts["scales"].float().T
    if layout == "awq":
        places = torch.tensor(_AWQ_PLACES)
        digits = _interleaved(_digits(parts["qweight"], bits, 1), places)
        zeros = _interleaved(_digits(parts["qzeros"], bits, 1), places)
        return GroupedWeight(digits.T, scales, zeros.T, bits)
    zeros = (_digits(parts["qzeros"], bits, 1).int() + zero_offset) & (2**bits - 1)
    digits = _digits(parts["qweight"], bits, 0).T
    return GroupedWeight(digits, scales, zeros.T.byte(), bits, parts.get("g_idx"))


def quantization_config(recipe: Recipe, kept: list[str]) -> dict[str, Any]:
    """What config.json says of such weights. kept: the last parts of the names of linears in the
    layers that are left as they were."""
    layout = layout_of(recipe)
    size = -1 if recipe.group_size is None else recipe.group_size
    if layout == "awq":
        return {
            "quant_method": "awq",
            "bits": recipe.bits,
            "group_size": size,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": kept or None,
        }
    if layout == "gptq":
        return {
            "quant_method": "gptq",
            "bits": recipe.bits,
            "group_size": size,
            # groups lie in the inputs' order even where gptq went through them in another
            "desc_act": False,
            "static_groups": True,
            "sym": False,
            "damp_percent": recipe.damping,
            "checkpoint_format": "gptq",
            "lm_head": False,
        }
    kind = "float" if recipe.method == "fp8" else "int"
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", *(f"re:.*\\.{name}$" for name in kept)],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _numbers(kind, "channel", dynamic=False),
                "input_activations": _numbers(kind, "token", dynamic=True),
            }
        },
    }


def _numbers(kind: str, strategy: str, *, dynamic: bool) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": dynamic,
    }


def _groups(weight: GroupedWeight) -> Tensor:
    """int32 [in]."""
    if weight.groups is not None:
        return weight.groups.int()
    ins, groups = weight.digits.shape[1], weight.scales.shape[1]
    return (torch.arange(ins) // (ins // groups)).int()


def _interleaved(rows: Tensor, places: Tensor) -> Tensor:
    """[rows, outs], every eight columns in another order."""
    return rows.reshape(rows.shape[0], -1, 8)[..., places.to(rows.device)].flatten(1)


def _period(bits: int) -> tuple[int, int]:
    """After how many digits, and words, digits of so many bits end where a word does."""
    together = lcm(_WORD_BITS, bits)
    return together // bits, together // _WORD_BITS


def _words(digits: Tensor, bits: int, axis: int) -> Tensor:
    """Digits along an axis of two as a stream of bits, lowest first, in int32."""
    if axis == 1:
        return _own(_words(digits.T, bits, 0).T)
    every, words = _period(bits)
    parts = digits.reshape(-1, every, digits.shape[1])
    out = parts.new_zeros((len(parts), words, parts.shape[2]), dtype=torch.int32)
    for index in range(every):
        digit = parts[:, index].int()
        word, at = divmod(index * bits, _WORD_BITS)
        out[:, word] |= digit << at
        if at + bits > _WORD_BITS:
            out[:, word + 1] |= digit >> (_WORD_BITS - at)
    return _own(out.flatten(0, 1))


def _digits(words: Tensor, bits: int, axis: int) -> Tensor:
    """uint8: what `_words` made words of."""
    if axis == 1:
        return _digits(words.T, bits, 0).T
    every, count = _period(bits)
    parts = words.reshape(-1, count, words.shape[1]).long() & (2**_WORD_BITS - 1)
    out = words.new_empty((len(parts), every, words.shape[1]), dtype=torch.uint8)
    for index in range(every):
        word, at = divmod(index * bits, _WORD_BITS)
        digit = parts[:, word] >> at
        if at + bits > _WORD_BITS:
            digit = digit | (parts[:, word + 1] << (_WORD_BITS - at))
        out[:, index] = (digit & (2**bits - 1)).byte()
    return out.flatten(0, 1)


def _own(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, as files need it."""
    return tensor.detach().cpu().contiguous()
