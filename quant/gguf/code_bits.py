"""Codes of packed GGUF rows, of types in which a value is base + step * code.

Base and step are of a group of values. Where the bits of each code lie in a block is found by
setting them one by one and unpacking.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from localgen.quant.gguf.ggml_rounding import Array, unpack

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CodeFields:
    """start, end: bytes of a block that hold codes only. group: values that share base and step."""

    start: int
    end: int
    group: int


# of CODE_TYPES
_FIELDS = {
    "Q4_0": CodeFields(2, 18, 32),
    "Q4_1": CodeFields(4, 20, 32),
    "Q5_0": CodeFields(2, 22, 32),
    "Q5_1": CodeFields(4, 24, 32),
    "Q2_K": CodeFields(16, 80, 16),
    "Q3_K": CodeFields(0, 96, 16),
    "Q4_K": CodeFields(16, 144, 32),
    "Q5_K": CodeFields(16, 176, 32),
    "Q6_K": CodeFields(0, 192, 16),
}
# for the other bytes of a block: scales and minima of any type are not 0 with these bits
_ANY_SCALES = 0x2D


def num_bits(type_name: str) -> int:
    """Bits of a code."""
    return int(_code_bits(type_name).shape[1])


def group_grids(packed: Bytes, type_name: str) -> tuple[Array, Array]:
    """Value of code 0, and the difference to that of code 1: [rows, groups].

    packed: [rows, bytes].
    """
    zeros = np.zeros((len(packed), _num_values(packed, type_name)), np.uint8)
    base, one = (
        # copied, as a view would keep all values
        unpack(with_codes(packed, codes, type_name), type_name)[
            :, :: _FIELDS[type_name].group
        ].copy()
        for codes in (zeros, zeros + 1)
    )
    return base, one - base


def with_codes(packed: Bytes, codes: Bytes, type_name: str) -> Bytes:
    """Copy of packed rows [rows, bytes] with other codes [rows, columns], below 2 ** bits."""
    fields, places = _FIELDS[type_name], _code_bits(type_name)
    values, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    blocks, of_blocks = packed.reshape(-1, size).copy(), codes.reshape(-1, values)
    bits = np.empty((len(blocks), places.size), np.uint8)
    for power in range(places.shape[1]):
        bits[:, places[:, power]] = of_blocks >> power & 1
    blocks[:, fields.start : fields.end] = np.packbits(bits, axis=1, bitorder="little")
    return blocks.reshape(packed.shape)


def _num_values(packed: Bytes, type_name: str) -> int:
    """Columns of packed rows."""
    values, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return int(packed.shape[1] // size * values)


@functools.cache
def _code_bits(type_name: str) -> NDArray[np.intp]:
    """Number of each bit of each code within the bits of a block's codes: [values, bits], the
    lowest bit first."""
    fields = _FIELDS[type_name]
    values, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    without = np.full(size, _ANY_SCALES, np.uint8)
    without[fields.start : fields.end] = 0
    num = 8 * (fields.end - fields.start)
    blocks = np.tile(without, (num, 1))
    each = np.arange(num)
    blocks[each, fields.start + each // 8] = 1 << each % 8
    change = np.abs(unpack(blocks, type_name) - unpack(without[None], type_name))
    value, weight = change.argmax(1), change.max(1)
    # by value, then by the weight of the bit
    return np.lexsort((weight, value)).reshape(values, -1)
