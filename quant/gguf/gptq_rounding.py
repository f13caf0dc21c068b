"""GPTQ on the grids of a GGUF file's types: llama.cpp chooses types and scales, GPTQ the codes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.gguf.reader import GgufReader, GgufTensor
from localgen.backends.formats.hf.tensor_names import linear_shapes
from localgen.quant.calibrate.importance import InputImportance
from localgen.quant.calibrate.layer_forward import CalibrationLayer
from localgen.quant.files.layerwise_checkpoint import read_tensor_at, stored_tensors
from localgen.quant.files.packing import GGUF_ROWS, GgufWeight, QuantizedWeight
from localgen.quant.gguf.code_bits import Bytes
from localgen.quant.gguf.coded_weight import CodedWeight, to_array
from localgen.quant.gguf.ggml_rounding import UNWEIGHED_TYPES, Array, pack, unpack
from localgen.quant.gguf.names import GgufNameMap
from localgen.quant.gguf.tensors import from_gguf_rows, to_gguf_rows
from localgen.quant.methods.layer import (
    GptqTarget,
    QuantizedLayer,
    gptq_targets,
    unquantized_tensors,
)
from localgen.quant.methods.learned_rounding import learn_rounding
from localgen.quant.request.gguf_types import CODE_TYPES
from localgen.quant.request.recipe import Recipe


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

    def describe_uncoded(self) -> str:
        """Which linears GPTQ leaves to ggml, after `prepare`; empty if there are none."""
        kinds = Counter(
            self._kind(f"model.layers.{index}.{linear}")
            for index in range(self._spec.num_layers)
            for linear in linear_shapes(self._spec)
        )
        uncoded = sorted(kinds.keys() - set(CODE_TYPES))
        if not uncoded:
            return ""
        count, types = sum(kinds[kind] for kind in uncoded), ", ".join(uncoded)
        return f"GPTQ leaves {count} of {kinds.total()} linears, in {types} without codes, to ggml"

    def round_layer(self, layer: CalibrationLayer, recipe: Recipe) -> QuantizedLayer:
        """Round all linears, after `prepare`. Raises as gptq_targets."""
        weights: dict[str, QuantizedWeight] = {}
        coded: dict[str, CodedWeight] = {}
        for one in gptq_targets(layer, recipe):
            name = layer.full_name(one.linear)
            if self._kind(name) not in CODE_TYPES:
                weights[one.linear] = self._round_without_codes(name, one)
                continue
            weight = self._coded(name, one)
            if recipe.rounding_steps:
                coded[one.linear] = weight
            else:
                weights[one.linear] = weight.round()
        del one  # learning needs the memory of its factor
        if coded:
            rounded = {f"{linear}.weight": one.dequantize() for linear, one in weights.items()}
            others = replace(layer, tensors=layer.tensors | rounded)
            weights |= learn_rounding(others, coded, recipe.rounding_steps)
        return QuantizedLayer(unquantized_tensors(layer.tensors, weights), weights)

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

    def _kind(self, name: str) -> str:
        return self._tensor(name)[0].type_name

    def _coded(self, name: str, one: GptqTarget) -> CodedWeight:
        return CodedWeight(
            self._spec,
            name.rpartition(".")[2],
            self._kind(name),
            one.target,
            mean_squares=_mean_squares(one.importance),
            factor=one.factor,
        )

    def _round_without_codes(self, name: str, one: GptqTarget) -> GgufWeight:
        kind, linear = self._kind(name), name.rpartition(".")[2]
        if kind in UNWEIGHED_TYPES:
            rows = to_gguf_rows(self._spec, linear, to_array(one.target))
            packed = pack(rows, kind, _mean_squares(one.importance))
        else:
            packed = np.array(self._place(name)[0])
        values = from_gguf_rows(self._spec, linear, unpack(packed, kind))
        return GgufWeight(torch.from_numpy(packed), torch.from_numpy(values).to(one.target.device))


def _mean_squares(importance: InputImportance) -> Array | None:
    """None for an expert without tokens."""
    if not importance.num_tokens:
        return None
    return to_array(importance.sum_squares / importance.num_tokens)
