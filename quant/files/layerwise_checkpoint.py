"""A model folder read a layer at a time, whatever its weights are stored as."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.formats.hf.safetensors import read_checked_header, weight_files
from localgen.backends.formats.hf.tensor_names import (
    LayerTensors,
    linear_shapes,
    split_fused_experts,
)
from localgen.quant.files.packing import PackingLayout, unpack_linear
from localgen.quant.files.safetensors_writer import TORCH_DTYPES, StreamedTensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK_BYTES = 32 << 20
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}
_PACKED_PARTS = ("qweight", "qzeros", "scales", "g_idx", "weight_scale")
# what a quantized linear has, by which it is known
_QUANTIZED_PARTS = ("qweight", "weight_scale")
# tables that old files keep beside the weights, and scales of activations and of the KV cache
_NOT_WEIGHTS = ("rotary_emb.inv_freq", "put_scale", "put_scale_ub", ".k_scale", ".v_scale")


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a tensor lies: bytes from `start` of a file."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


class LayerwiseCheckpoint:
    """The tensors of a folder in Hugging Face's format. Nothing is mapped: what has been read and
    forgotten takes no memory.

    Every reader raises LoadFailed naming the file and the tensor.
    """

    def __init__(self, folder: Path) -> None:
        """LoadFailed, ModelNotFound: no such model, one of an unknown kind, or files damaged."""
        self.folder = folder
        self.spec: ModelSpec = read_hf_config(folder)
        self._locations: dict[str, TensorLocation] = {}
        for path in weight_files(folder):
            self._locations.update(read_safetensors_header(path))

    def __contains__(self, name: str) -> bool:
        return name in self._locations

    def names(self) -> list[str]:
        """Of all tensors, in the order of files and places, which is the fastest to read."""
        place = {name: (str(one.path), one.start) for name, one in self._locations.items()}
        return sorted(place, key=lambda name: place[name])

    def location(self, name: str) -> TensorLocation:
        """Where and what a tensor is."""
        if name not in self._locations:
            raise LoadFailed(f"{self.folder} has no tensor {name}: download the whole model")
        return self._locations[name]

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        return sum(stored.num_bytes for stored in self._locations.values())

    @property
    def dtype(self) -> torch.dtype:
        """That of what is not quantized, by the embedding."""
        return self.location("model.embed_tokens.weight").dtype

    def layer_tensor_names(self, index: int) -> list[str]:
        """Of a layer's tensors, without the layer's own name."""
        at = f"model.layers.{index}."
        found = [name.removeprefix(at) for name in self._locations if name.startswith(at)]
        return [name for name in found if not name.endswith(_NOT_WEIGHTS)]

    def non_layer_names(self) -> list[str]:
        """Of tensors outside layers; a head that is the embedding once more is left out."""
        tied = "lm_head.weight" if self.spec.tied_embeddings else ""
        return [name for name in self._locations if ".layers." not in name and name != tied]

    def read_layer(self, index: int, device: torch.device | str = "cpu") -> LayerTensors:
        """A layer in float32, by name within it: quantized weights as the numbers they stand for,
        experts one by one. LoadFailed: a linear is missing or of another shape."""
        at = f"model.layers.{index}."
        found: LayerTensors = {}
        for name in self.layer_tensor_names(index):
            linear, _, part = name.rpartition(".")
            packed = any(f"{at}{linear}.{one}" in self._locations for one in _QUANTIZED_PARTS)
            if not packed or part == "bias":
                found[name] = self.read(at + name).to(device).float()
            elif part in ("qweight", "weight"):
                found[f"{linear}.weight"] = self._read_quantized_linear(at + linear).to(device)
        found = split_fused_experts(self.spec, found)
        self._check_linear_shapes(at, found)
        return found

    def read(self, name: str) -> Tensor:
        """A tensor as the file has it."""
        return read_tensor_at(self.location(name))

    def read_rows(self, name: str, first: int, end: int) -> Tensor:
        """Rows first to end of a tensor, as the file has them."""
        stored = self.location(name)
        width = prod(stored.shape[1:])
        start = stored.start + first * width * stored.dtype.itemsize
        part = TensorLocation(stored.path, start, stored.dtype, (end - first, *stored.shape[1:]))
        return next(iter(_read_chunks(part, end - first)))

    def gather_rows(self, name: str, rows: Tensor) -> Tensor:
        """Some rows, read one by one. rows: int64 [n]."""
        return torch.cat([self.read_rows(name, row, row + 1) for row in rows.tolist()])

    def streamed_tensor(self, name: str, dtype: torch.dtype) -> StreamedTensor:
        """A tensor to be copied piece by piece to a file, floats of more bits as `dtype`."""
        stored = self.location(name)
        target = dtype if stored.dtype in FLOAT_DTYPES else stored.dtype

        def pieces() -> Iterator[Tensor]:
            for piece in self.iter_chunks(name):
                yield piece.to(target)

        return StreamedTensor(target, stored.shape, pieces)

    def iter_chunks(self, name: str) -> Iterable[Tensor]:
        """A tensor's rows in order, some megabytes at a time, as the file has them."""
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
        layout: PackingLayout = "compressed-tensors"
        if quant.method in ("awq", "gptq"):
            layout = "awq" if quant.method == "awq" else "gptq"
        weight = unpack_linear(parts, layout, quant.bits, zero_offset=quant.zero_offset)
        return weight.dequantize()

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


def iter_checked_chunks(source: LayerwiseCheckpoint) -> Iterator[tuple[int, int]]:
    """Read all of a plain model once; yields bytes read so far and the checksum of them.

    LoadFailed: a tensor has a value that is not finite, or is no float.
    """
    done, checksum = 0, 0
    for name in source.names():
        if source.location(name).dtype not in FLOAT_DTYPES:
            raise LoadFailed(f"{source.folder}: {name} is no plain weight")
        for piece in source.iter_chunks(name):
            if not bool(piece.isfinite().all()):
                raise LoadFailed(
                    f"{source.location(name).path}: {name} has NaN or infinite values: "
                    "the file is damaged, download it again"
                )
            checksum = zlib.crc32(piece.view(torch.uint8).numpy().data, checksum)
            done += piece.nbytes
            yield done, checksum


def _read_chunks(stored: TensorLocation, rows: int) -> Iterator[Tensor]:
    """Rows of a tensor, so many at a time."""
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
            yield torch.from_numpy(raw).view(stored.dtype).view(shape)


def read_tensor_at(stored: TensorLocation) -> Tensor:
    """A whole tensor of a file."""
    whole = next(iter(_read_chunks(stored, stored.shape[0] if stored.shape else 1)))
    return whole.view(stored.shape)


def read_safetensors_header(path: Path) -> dict[str, TensorLocation]:
    """Where each tensor of a safetensors file lies. LoadFailed: the file is damaged."""
    tensors = read_checked_header(path, _ITEM_BYTES)
    return {
        name: TensorLocation(path, tensor.start, TORCH_DTYPES[tensor.dtype], tensor.shape)
        for name, tensor in tensors.items()
    }
