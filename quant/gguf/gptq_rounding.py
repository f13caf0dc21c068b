"""GPTQ on the grids of a GGUF file's types: llama.cpp chooses types and scales, GPTQ the codes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.gguf.reader import GgufReader, GgufTensor
from localgen.quant.calibrate.importance import InputImportance
from localgen.quant.calibrate.layer_forward import CalibrationLayer
from localgen.quant.files.layerwise_checkpoint import read_tensor_at, stored_tensors
from localgen.quant.files.packing import GGUF_ROWS, GgufWeight
from localgen.quant.gguf.code_bits import (
    Bytes,
    group_grids,
    num_bits,
    with_codes,
)
from localgen.quant.gguf.ggml_rounding import UNWEIGHED_TYPES, Array, pack, unpack
from localgen.quant.gguf.names import GgufNameMap
from localgen.quant.gguf.tensors import from_gguf_rows, to_gguf_rows
from localgen.quant.methods.gptq import HessianFactor, compensate_errors
from localgen.quant.methods.grid import QuantGrid, split_groups
from localgen.quant.methods.layer import (
    GptqTarget,
    QuantizedLayer,
    gptq_targets,
    unquantized_tensors,
)
from localgen.quant.request.gguf_types import CODE_TYPES
from localgen.quant.request.recipe import Recipe

# in place of the step of a group whose values are all the same: each rounds to code 0
_NO_STEP = 1e30


class GgufRounding:
    """Rounds the linears of a model in the types that they have in a GGUF file.

    make_file: writes llama.cpp's file to `path`, unless it is there. Tensors of types without codes
    of single weights are rounded by ggml, with the importance of their inputs.
    """

    def __init__(
        self, spec: ModelSpec, file_type: str, path: Path, make_file: Callable[[Path], None]
    ) -> None:
        self.file_type, self.path = file_type, path
        self._spec, self._names, self._make_file = spec, GgufNameMap(spec), make_file

    def prepare(self) -> None:
        """Have llama.cpp write the file. Raises as make_file."""
        if not self.path.exists():
            self._make_file(self.path)

    def round_layer(self, layer: CalibrationLayer, recipe: Recipe) -> QuantizedLayer:
        """Round all linears, after `prepare`. Raises as gptq_targets."""
        weights = {
            one.linear: self._round(layer.full_name(one.linear), one)
            for one in gptq_targets(layer, recipe)
        }
        return QuantizedLayer(unquantized_tensors(layer.tensors, weights), dict(weights))

    def publish(self, layer_files: Iterable[Path], output: Path) -> None:
        """Put rounded layers into the file, from files of their packed rows, and move it.

        Raises LoadFailed if they are of another file.
        """
        with self.path.open("r+b") as file:
            for path in layer_files:
                for name, stored in stored_tensors(path).items():
                    rows = read_tensor_at(stored).numpy()
                    data, offset = self._place(name.removesuffix(f".{GGUF_ROWS}"))
                    if rows.shape != data.shape:
                        raise LoadFailed(f"{path} is of another run: remove {path.parent}")
                    file.seek(offset)
                    file.write(rows.tobytes())
            file.flush()
            os.fsync(file.fileno())
        self.path.replace(output)

    @cached_property
    def _tensors(self) -> dict[str, GgufTensor]:
        return {tensor.name: tensor for tensor in GgufReader(self.path).tensors}

    def _place(self, linear: str) -> tuple[Bytes, int]:
        """The packed rows of a linear, mapped, and the byte of the file at which they begin."""
        tensor, expert = self._tensor(linear)
        if expert is None:
            return tensor.data, tensor.offset
        data = tensor.data[expert]
        return data, tensor.offset + expert * data.nbytes

    def _tensor(self, linear: str) -> tuple[GgufTensor, int | None]:
        """The tensor of a linear, and the number of the expert in it."""
        place = self._names.gguf_name(linear)
        return self._tensors[f"{place.name}.weight"], place.expert

    def _round(self, name: str, one: GptqTarget) -> GgufWeight:
        kind, linear = self._tensor(name)[0].type_name, name.rpartition(".")[2]
        rows = to_gguf_rows(self._spec, linear, _numpy(one.target))
        if kind in CODE_TYPES:
            packed = _pack_by_gptq(rows, kind, one.importance, one.factor)
        elif kind in UNWEIGHED_TYPES:
            packed = pack(rows, kind, _mean_squares(one.importance))
        else:
            packed = np.array(self._place(name)[0])
        values = from_gguf_rows(self._spec, linear, unpack(packed, kind))
        device = one.target.device
        return GgufWeight(torch.from_numpy(packed), torch.from_numpy(values).to(device))


def _pack_by_gptq(
    rows: Array, kind: str, importance: InputImportance, factor: HessianFactor
) -> Bytes:
    """Rows [out, in] in a type: ggml's scales for them, and GPTQ's codes."""
    packed = pack(rows, kind, _mean_squares(importance))
    base, step = (torch.from_numpy(each) for each in group_grids(packed, kind))
    device = factor.inverse_upper.device
    weight = torch.from_numpy(rows).to(device)
    size = weight.shape[1] // base.shape[1]
    # without the values of code 0, so that all grids begin at 0
    shifted = split_groups(weight, size) - base[..., None].to(device)
    scales = torch.where(step == 0, _NO_STEP, step)[..., None].to(device)
    grid = QuantGrid(scales, torch.zeros_like(scales), num_bits(kind))
    compensated = compensate_errors(shifted.flatten(1), grid, factor)
    codes = grid.quantize(split_groups(compensated, size)).flatten(1).to(torch.uint8)
    return with_codes(packed, codes.cpu().numpy(), kind)


def _mean_squares(importance: InputImportance) -> Array | None:
    """None for an expert without tokens."""
    if not importance.num_tokens:
        return None
    return _numpy(importance.sum_squares / importance.num_tokens)


def _numpy(tensor: Tensor) -> Array:
    return np.ascontiguousarray(tensor.float().cpu().numpy())
