"""Importance matrices: how much each input of a matrix matters when llama.cpp rounds it.

The file format is that of llama.cpp's own tool: for each matrix the sums of its squared inputs and
the number of tokens, with experts stacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.gguf.reader import GgufReader
from localgen.backends.formats.hf.tensor_names import expected_shapes, linear_shapes
from localgen.quant.gguf.names import GgufNameMap

Array = NDArray[np.float32]
# sums of squared inputs [in] and number of tokens, by the name of a linear without `.weight`
ImatrixSource = Mapping[str, tuple[Array, int]]

_SUMS, _COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNK_COUNT = "imatrix.datasets", "imatrix.chunk_count"
_FILE_KEY, _DATASET_KEY = "quantize.imatrix.file", "quantize.imatrix.dataset"
_ENTRIES_KEY, _CHUNKS_KEY = "quantize.imatrix.entries_count", "quantize.imatrix.chunks_count"
# a data set has the name of a file
LONGEST_IMATRIX_KEYS: dict[str, str | int] = {
    _FILE_KEY: "imatrix.gguf",
    _DATASET_KEY: 255 * "x",
    _ENTRIES_KEY: 0,
    _CHUNKS_KEY: 0,
}


def write_imatrix(
    path: Path,
    spec: ModelSpec,
    importance: ImatrixSource,
    dataset_name: str,
    chunk_tokens: int | None = None,
) -> None:
    """Write the importance of a model's linears; linears without importance are left out.

    dataset_name: description of the calibration text. chunk_tokens: tokens that were read together,
    None for all. Raises LoadFailed for a linear that the
    model does not have, sums of another length or that are not finite, or if the file cannot be
    written.
    """
    stacks: dict[str, list[tuple[Array, int]]] = {}
    names, shapes = GgufNameMap(spec), expected_shapes(spec)
    for module in _ordered_linears(path, spec, importance, shapes):
        place = names.gguf_name(module)
        sums, count = importance.get(module, (np.zeros(shapes[f"{module}.weight"][1]), 0))
        stacks.setdefault(f"{place.name}.weight", []).append((sums.astype(np.float32), int(count)))
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array(_DATASETS, [dataset_name])
    tokens = max(count for _, count in importance.values())
    size = chunk_tokens or tokens
    writer.add_uint32(_CHUNK_COUNT, -(-tokens // max(1, size)))
    writer.add_uint32("imatrix.chunk_size", size)
    for name, parts in stacks.items():
        counts = np.array([[count] for _, count in parts], np.float32)
        writer.add_tensor(name + _SUMS, np.stack([sums for sums, _ in parts]))
        writer.add_tensor(name + _COUNTS, counts)
    _write_file(path, writer)


def _ordered_linears(
    path: Path, spec: ModelSpec, importance: ImatrixSource, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Linears with importance, and all experts of a stack that has any, in checkpoint order.

    Raises LoadFailed as write_imatrix.
    """
    if not importance:
        raise LoadFailed(f"{path}: no linear has an importance")
    for module, (sums, count) in importance.items():
        shape = shapes.get(f"{module}.weight", ())
        if len(shape) != 2:
            raise LoadFailed(f"{path}: {module} is not a linear of a {spec.architecture}")
        if sums.shape != shape[1:]:
            raise LoadFailed(
                f"{path}: {module} has {shape[1]} inputs, the importance is of {sums.shape}"
            )
        if not np.isfinite(sums).all() or count < 0:
            raise LoadFailed(f"{path}: the importance of {module} is not finite")
    stacks = {_without_expert_index(module) for module in importance}
    modules = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
    return [module for module in modules if _without_expert_index(module) in stacks]


def _without_expert_index(module: str) -> str:
    before, found, after = module.partition(".experts.")
    return f"{before}{found}{after.partition('.')[2]}" if found else module


def _write_file(path: Path, writer: gguf.GGUFWriter) -> None:
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        raise LoadFailed(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        writer.close()


def read_imatrix(path: Path) -> dict[str, Array]:
    """Mean squared inputs of each tensor by its GGUF name: [experts * in].

    All inputs of an expert without tokens are 1. Raises LoadFailed if the file is missing or not
    an importance matrix in GGUF format.
    """
    try:
        reader = GgufReader(path)
    except LoadFailed as error:
        raise LoadFailed(f"{path} is not an importance matrix (GGUF): {error}") from None
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    means: dict[str, Array] = {}
    for name, sums in tensors.items():
        if not name.endswith(_SUMS):
            continue
        own = name.removesuffix(_SUMS)
        if own + _COUNTS not in tensors:
            raise LoadFailed(f"{path} has no {own}{_COUNTS}")
        counts = tensors[own + _COUNTS].view(np.float32).reshape(-1, 1)
        rows = sums.view(np.float32).reshape(len(counts), -1)
        mean = np.divide(rows, counts, out=np.ones_like(rows), where=counts > 0)
        means[own] = np.ascontiguousarray(mean, np.float32).reshape(-1)
    if not means:
        raise LoadFailed(f"{path} is not an importance matrix: it has no sums of squares")
    return means


def imatrix_keys(path: Path) -> dict[str, str | int]:
    """Metadata keys about an importance matrix for the file that it calibrates, as llama-quantize
    writes them. Raises LoadFailed as read_imatrix."""
    entries = len(read_imatrix(path))
    reader = GgufReader(path)
    datasets = reader.value(_DATASETS) if _DATASETS in reader else None
    keys: dict[str, str | int] = {_FILE_KEY: path.name}
    if isinstance(datasets, list) and datasets:
        keys[_DATASET_KEY] = str(datasets[0])
    keys[_ENTRIES_KEY] = entries
    if _CHUNK_COUNT in reader:
        keys[_CHUNKS_KEY] = int(reader.value(_CHUNK_COUNT))
    return keys


def gptq_imatrix_keys(spec: ModelSpec, dataset_name: str, num_chunks: int) -> dict[str, str | int]:
    """As imatrix_keys for a file whose layers GPTQ rounds: it keeps the importance of their inputs
    in no file, so that key is missing."""
    names = GgufNameMap(spec)
    entries = {
        names.gguf_name(f"model.layers.{index}.{linear}").name
        for index in range(spec.num_layers)
        for linear in linear_shapes(spec)
    }
    return {_DATASET_KEY: dataset_name, _ENTRIES_KEY: len(entries), _CHUNKS_KEY: num_chunks}
