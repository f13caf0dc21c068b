"""Matrices rounded by ggml's own quantizers, as llama.cpp rounds them when it writes a file."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from llama_cpp._ggml import libggml
from numpy.typing import NDArray

Array = NDArray[np.float32]
# types for matrices with an importance matrix, fewest bits first; left out: types for models that
# were trained in them (TQ1_0, TQ2_0, Q1_0, MXFP4)
WEIGHED_TYPES = (
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS",
    "IQ4_NL", "Q4_0", "Q4_K", "Q4_1", "Q5_0", "Q5_K", "Q5_1", "Q6_K", "Q8_0",
)  # fmt: skip
# these are unusable without an importance matrix
_NEED_IMATRIX = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")
UNWEIGHED_TYPES = tuple(name for name in WEIGHED_TYPES if name not in _NEED_IMATRIX)
# rows of one call, so that threads share a matrix
_CHUNK_VALUES = 1 << 18
_THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fits_rows(type_name: str, columns: int) -> bool:
    """Return True if rows of this length divide into the type's blocks."""
    return columns % gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][0] == 0


def packed_bytes(type_name: str, values: int) -> int:
    """Size of packed values, a multiple of the type's block."""
    block, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return values // block * size


def round_trip(weight: Array, type_name: str, importance: Array | None) -> Array:
    """The values of a matrix after it was packed in a type and unpacked. Arguments as of `pack`."""
    return unpack(pack(weight, type_name, importance), type_name)


def unpack(packed: NDArray[np.uint8], type_name: str) -> Array:
    """The values of packed rows, float32 [rows, columns]."""
    return np.asarray(gguf.dequantize(packed, GGMLQuantizationType[type_name]), np.float32)


def pack(weight: Array, type_name: str, importance: Array | None) -> NDArray[np.uint8]:
    """A matrix in a type, [rows, bytes].

    weight: float32 [rows, columns], finite; the columns fit the type. importance: mean squared
    input of each column, finite; None for types that need none.
    """
    rows, columns = weight.shape
    assert fits_rows(type_name, columns), (type_name, columns)
    assert importance is not None or type_name in UNWEIGHED_TYPES, type_name
    each = max(1, _CHUNK_VALUES // columns)
    parts = [
        np.ascontiguousarray(weight[at : at + each], np.float32) for at in range(0, rows, each)
    ]
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    assert weights is None or weights.shape == (columns,), (weights.shape, columns)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda part: _pack_part(part, type_name, weights), parts))
    return found[0] if len(found) == 1 else np.concatenate(found)


def rounding_errors(
    weight: Array, type_names: Sequence[str], importance: Array | None, error_weights: Array
) -> dict[str, float]:
    """Sum of the squared errors of a matrix in each type, weighted by column.

    error_weights: [columns], mean squared inputs: the sum is then the expected squared error of the
    matrix's outputs if its inputs are uncorrelated. The other arguments are as in `pack`.
    """

    def error(type_name: str) -> float:
        moved = unpack(_pack_part(weight, type_name, importance), type_name) - weight
        return float((np.square(moved).sum(0, dtype=np.float64) * error_weights).sum())

    weight = np.ascontiguousarray(weight, np.float32)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(type_names, pool.map(error, type_names), strict=True))


def _pack_part(part: Array, type_name: str, importance: Array | None) -> NDArray[np.uint8]:
    kind = GGMLQuantizationType[type_name]
    rows, columns = part.shape
    packed = np.empty((rows, packed_bytes(type_name, columns)), np.uint8)
    written = _quantize_chunk(
        int(kind), part.ctypes.data, packed.ctypes.data, 0, rows, columns,
        None if importance is None else importance.ctypes.data,
    )  # fmt: skip
    assert written == packed.size, (type_name, written, packed.size)
    return packed


_quantize_chunk = libggml.ggml_quantize_chunk
_quantize_chunk.restype = ctypes.c_size_t
_quantize_chunk.argtypes = [
    ctypes.c_int,  # type
    ctypes.c_void_p,  # float32 values
    ctypes.c_void_p,  # packed values
    ctypes.c_int64,  # first value
    ctypes.c_int64,  # rows
    ctypes.c_int64,  # columns
    ctypes.c_void_p,  # importance of each column, or NULL
]
