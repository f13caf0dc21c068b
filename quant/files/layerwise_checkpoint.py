"""A model folder read layer by layer, with plain or quantized weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.families import conversion_obstacle
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.safetensors import (
    FLOAT_DTYPES,
    StoredTensor,
    read_checked_header,
    weight_files,
)
from localgen.backends.formats.hf.tensor_names import (
    LayerTensors,
    linear_shapes,
    split_fused_experts,
)
from localgen.quant.files.packing import unpack_linear
from localgen.quant.files.safetensors_writer import TORCH_DTYPES, StreamedTensor

_CHUNK_BYTES = 32 << 20
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}
_PACKED_PARTS = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_zero_point", "weight_scale"),
)
# a linear that has one of these is quantized
_QUANTIZED_PARTS = ("qweight", "weight_scale")
# rotary tables of old files, and scales of activations and of the KV cache
_NOT_WEIGHTS = ("rotary_emb.inv_freq", "put_scale", "put_scale_ub", ".k_scale", ".v_scale")


class LayerwiseCheckpoint:
    """Tensors of a folder in Hugging Face's format. Files are read, not mapped, so released
    tensors take no memory.

    Every method that reads raises LoadFailed naming the file and the tensor.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ModelNotFound if files are missing, LoadFailed if they are damaged or the
        architecture is unknown or cannot be quantized."""
        self.folder = folder
        self.spec: ModelSpec = read_hf_config(folder)
        obstacle = conversion_obstacle(self.spec)
        if obstacle is not None:
            raise LoadFailed(f"{folder}: localgen cannot quantize {obstacle}")
        self._locations: dict[str, StoredTensor] = {}
        for path in weight_files(folder):
            self._locations.update(stored_tensors(path))

    def names(self) -> list[str]:
        """Names of all tensors in the order of files and offsets, the fastest to read."""
        place = {name: (str(one.path), one.start) for name, one in self._locations.items()}
        return sorted(place, key=place.__getitem__)

    def location(self, name: str) -> StoredTensor:
        if name not in self._locations:
            raise LoadFailed(f"{self.folder} has no tensor {name}: download the whole model")
        return self._locations[name]

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return sum(stored.num_bytes for stored in self._locations.values())

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding, taken as that of all unquantized tensors."""
        return TORCH_DTYPES[self.location("model.embed_tokens.weight").dtype]

    def layer_tensor_names(self, index: int) -> list[str]:
        """Names of a layer's tensors within the layer."""
        at = f"model.layers.{index}."
        found = [name.removeprefix(at) for name in self._locations if name.startswith(at)]
        return [name for name in found if not name.endswith(_NOT_WEIGHTS)]

    def non_layer_names(self) -> list[str]:
        """Names of the tensors outside layers, without a tied head."""
        tied = "lm_head.weight" if self.spec.tied_embeddings else ""
        return [name for name in self._locations if ".layers." not in name and name != tied]

    def read_layer(self, index: int, device: torch.device | str = "cpu") -> LayerTensors:
        """Load a layer in float32 by names within it, dequantized and with fused experts split.

        Raises LoadFailed if a linear is missing or has another shape.
        """
        at = f"model.layers.{index}."
        found: LayerTensors = {}
        for name in self.layer_tensor_names(index):
            linear, _, part = name.rpartition(".")
            packed = any(f"{at}{linear}.{one}" in self._locations for one in _QUANTIZED_PARTS)
            if not packed or part == "bias":
                found[name] = self.read(at + name).to(device).float()
            elif part in ("qweight", "weight_packed", "weight"):
                found[f"{linear}.weight"] = self._read_quantized_linear(at + linear).to(device)
        found = split_fused_experts(self.spec, found)
        self._check_linear_shapes(at, found)
        return found

    def read(self, name: str) -> Tensor:
        """Load a tensor in the file's dtype."""
        return read_tensor_at(self.location(name))

    def read_rows(self, name: str, first: int, end: int) -> Tensor:
        """Load rows first to end of a tensor in the file's dtype."""
        stored = self.location(name)
        row_bytes = _ITEM_BYTES[stored.dtype] * prod(stored.shape[1:])
        part = replace(
            stored,
            start=stored.start + first * row_bytes,
            num_bytes=(end - first) * row_bytes,
            shape=(end - first, *stored.shape[1:]),
        )
        return next(iter(_read_chunks(part, end - first)))

    def gather_rows(self, name: str, rows: Tensor) -> Tensor:
        """Load rows one by one. rows: int64 [n]."""
        return torch.cat([self.read_rows(name, row, row + 1) for row in rows.tolist()])

    def streamed_tensor(self, name: str, dtype: torch.dtype) -> StreamedTensor:
        """A tensor to be copied to a file in chunks, floats converted to `dtype`."""
        stored = self.location(name)
        target = dtype if stored.dtype in FLOAT_DTYPES else TORCH_DTYPES[stored.dtype]

        def chunks() -> Iterator[Tensor]:
            for chunk in self.iter_chunks(name):
                yield chunk.to(target)

        return StreamedTensor(target, stored.shape, chunks)

    def iter_chunks(self, name: str) -> Iterable[Tensor]:
        """Rows of a tensor in chunks of some megabytes, in the file's dtype."""
        stored = self.location(name)
        row_bytes = max(1, stored.num_bytes // (stored.shape[0] if stored.shape else 1))
        return _read_chunks(stored, max(1, _CHUNK_BYTES // row_bytes))

    def _read_quantized_linear(self, linear: str) -> Tensor:
        parts = {
            part: self.read(f"{linear}.{part}")
            for part in ("weight", *_PACKED_PARTS)
            if f"{linear}.{part}" in self._locations
        }
        quant = self.spec.quant
        if quant is None:
            raise LoadFailed(
                f"{self.folder}: {linear} is quantized, config.json has no quantization_config"
            )
        return unpack_linear(parts, quant).dequantize()

    def _check_linear_shapes(self, layer: str, found: LayerTensors) -> None:
        for name, shape in linear_shapes(self.spec).items():
            weight = found.get(f"{name}.weight")
            if weight is None:
                raise LoadFailed(
                    f"{self.folder} has no tensor {layer}{name}.weight: download the whole model"
                )
            if tuple(weight.shape) != shape:
                raise LoadFailed(
                    f"{self.folder}: {layer}{name}.weight is of shape {list(weight.shape)}, "
                    f"not {list(shape)}"
                )


def _read_chunks(stored: StoredTensor, rows: int) -> Iterator[Tensor]:
    """Rows of a tensor in chunks of `rows`."""
    if not prod(stored.shape):
        raise LoadFailed(f"{stored.path}: a tensor of shape {list(stored.shape)} has no values")
    length = stored.shape[0] if stored.shape else 1
    row_bytes = stored.num_bytes // length
    with stored.path.open("rb") as file:
        file.seek(stored.start)
        for first in range(0, length, rows):
            count = min(rows, length - first)
            raw = np.fromfile(file, np.uint8, count * row_bytes)
            if raw.size != count * row_bytes:
                raise LoadFailed(f"{stored.path} is cut short: download it again")
            shape = (count, *stored.shape[1:]) if stored.shape else (1,)
            yield torch.from_numpy(raw).view(TORCH_DTYPES[stored.dtype]).view(shape)


def read_tensor_at(stored: StoredTensor) -> Tensor:
    """Load a whole tensor."""
    whole = next(iter(_read_chunks(stored, stored.shape[0] if stored.shape else 1)))
    return whole.view(stored.shape)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file. Raises LoadFailed if it is damaged."""
    return read_checked_header(path, _ITEM_BYTES)
