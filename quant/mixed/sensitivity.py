"""How much the model's output changes when the tensors of one group are rounded.

For each group the KL divergence of the whole model is measured with only that group rounded to a
probe type. At other types the group's loss is taken to be proportional to the squared error that
the importance matrix weighs.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localgen.backends.formats.hf.tensor_names import LayerTensors, linear_shapes
from localgen.quant.calibrate.importance import InputImportance, read_importance
from localgen.quant.calibrate.input_stats import calibration_dtype
from localgen.quant.calibrate.layer_forward import LayerForward, embed_tokens, embed_windows
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.files.safetensors_writer import atomic_write
from localgen.quant.files.work_folder import WorkFolder
from localgen.quant.gguf.ggml_rounding import round_trip, rounding_errors
from localgen.quant.mixed.divergence import ReferenceDistribution, head_bytes
from localgen.quant.mixed.groups import EMBEDDING, OUTPUT, TensorGroup
from localgen.quant.mixed.search import TypeOption
from localgen.quant.request.events import OnEvent, ProgressEvent

Array = NDArray[np.float32]
PROBE_TOKENS = 2048
# the first that a group's rows divide into: low enough for a clear signal, rounded fast
_PROBE_TYPES = ("Q3_K", "Q4_0")
# values of one GGUF tensor whose errors are measured
_SAMPLED_VALUES = 1 << 16
_MIN_SAMPLED_ROWS = 4
# libraries that the first probe loads, and what the allocator keeps
_OVERHEAD_BYTES = 96 << 20


@dataclass(frozen=True, slots=True)
class GroupLoss:
    """kl: of the model with the group in the probe type, in nats. errors: weighted squared error of
    each type by name, among them the probe type."""

    probe_type: str
    kl: float
    errors: dict[str, float]

    def predicted_kl(self, type_name: str) -> float:
        probe_error = self.errors[self.probe_type]
        return max(0.0, self.kl) * (self.errors[type_name] / probe_error if probe_error else 0.0)

    def options(self, group: TensorGroup) -> list[TypeOption]:
        return [
            TypeOption(name, group.num_bytes(name), self.predicted_kl(name)) for name in group.types
        ]


def probe_type(group: TensorGroup) -> str:
    return next((name for name in _PROBE_TYPES if name in group.types), group.types[0])


class SensitivityProbes:
    """Probes of all groups, one layer in memory at a time; finished layers are kept in files.

    windows: int64 [windows, length], of which num_tokens tokens are used. folder: has the
    importance of all layers.
    """

    def __init__(
        self,
        source: LayerwiseCheckpoint,
        groups: Sequence[TensorGroup],
        windows: Tensor,
        folder: WorkFolder,
        device: torch.device,
        num_tokens: int = PROBE_TOKENS,
    ) -> None:
        self._source, self._folder, self._device = source, folder, device
        self._layers: dict[int | None, list[TensorGroup]] = {}
        for group in groups:
            self._layers.setdefault(group.layer, []).append(group)
        self._ids = probe_windows(windows, num_tokens)
        spec = source.spec
        self._dtype = calibration_dtype(device, spec.hidden_size)
        self._forward = LayerForward(spec, windows.shape[1], device, self._dtype)
        self._linears = set(linear_shapes(spec))
        self.num_groups = len(groups)

    @property
    def num_done(self) -> int:
        """Groups that are measured."""
        return self.num_groups - sum(map(len, self._layers_left.values()))

    @property
    def _layers_left(self) -> dict[int | None, list[TensorGroup]]:
        """Groups that are not measured, by layer."""
        return {
            layer: groups
            for layer, groups in self._layers.items()
            if not self._record_file(layer).is_file()
        }

    @property
    def num_probe_tokens(self) -> int:
        return self._ids.numel()

    @property
    def _num_layer_passes(self) -> int:
        """Passes of the windows through one layer that all probes that are left take."""
        layers = self._source.spec.num_layers
        passes = sum(
            len(groups) * (layers if layer is None else layers - layer)
            for layer, groups in self._layers_left.items()
        )
        return passes + layers

    @torch.no_grad()
    def run(self, on_event: OnEvent) -> dict[str, GroupLoss]:
        """Measure all groups without a record; return the losses by the name of the group."""
        self._report(on_event)
        if self.num_done < self.num_groups:
            for layer in self._layers:
                if not self._record_file(layer).is_file():
                    self._write_record(layer, self._probe(layer))
                self._report(on_event)
        found: dict[str, GroupLoss] = {}
        for layer in self._layers:
            found |= self._read_record(layer)
        return found

    @torch.no_grad()
    def estimate_s(self) -> float:
        """Seconds of all probes that are left, from a trial of one window and one matrix."""
        ids = self._ids[:1]
        scale = len(self._ids) / len(ids)
        layer = self._source.read_layer(0, self._device)
        cast = self._cast(layer)
        hidden = self._run_layer(0, cast, embed_windows(self._source, ids))
        pass_s = scale * _seconds(lambda: self._run_layer(0, cast, hidden))
        states = hidden.flatten(0, 1)
        head_s = scale * _seconds(
            lambda: ReferenceDistribution(self._source, states, self._device, self._dtype)
        )
        heads = self.num_groups - self.num_done + len(self._layers_left)
        passes_s = self._num_layer_passes * pass_s + heads * head_s
        return passes_s + self._estimate_rounding_s(layer)

    def _estimate_rounding_s(self, layer: LayerTensors) -> float:
        """Seconds to round all groups that are left and to measure their errors."""
        groups = [group for some in self._layers_left.values() for group in some]
        tried = self._layers[0][0]
        weight = layer[f"{tried.linears[0]}.weight"].cpu().numpy()
        ones = np.ones(weight.shape[1], np.float32)
        # ggml computes the tables of some types when they are first used
        rounding_errors(weight[:1], tried.types, ones, ones)
        round_s = _seconds(lambda: round_trip(weight, probe_type(tried), ones)) / weight.size
        errors_s = _seconds(
            lambda: _sampled_errors(weight, tried.types, ones, ones, _SAMPLED_VALUES)
        )
        values = sum(values for group in groups for _, values, _ in group.tensors)
        return values * round_s + sum(len(group.tensors) for group in groups) * errors_s

    def peak_bytes(self) -> int:
        """Memory that the probes of one layer take."""
        spec = self._source.spec
        layer = sum(outs * ins for outs, ins in linear_shapes(spec).values())
        roles = max(map(len, self._layers.values()))
        states = 4 * self._ids.numel() * spec.hidden_size * (roles + 3)
        # original and rounded in float32, both in the dtype of the multiplications
        weights = layer * (8 + 2 * self._dtype.itemsize)
        width = spec.intermediate_size if spec.moe is None else spec.moe.intermediate_size
        forward = 4 * self._ids.numel() * 6 * (width + spec.hidden_size)
        scores = 8 * self._ids.numel() * self._ids.shape[1] * spec.num_heads
        head = head_bytes(spec)
        return weights + states + max(forward + scores, head) + _OVERHEAD_BYTES

    def _report(self, on_event: OnEvent) -> None:
        on_event(ProgressEvent("measuring sensitivity", self.num_done, self.num_groups, "steps"))

    def _probe(self, layer: int | None) -> dict[str, GroupLoss]:
        if layer is not None:
            return self._probe_layer(layer)
        return {group.name: self._probe_outer(group) for group in self._layers[None]}

    def _probe_layer(self, index: int) -> dict[str, GroupLoss]:
        importance = read_importance(self._folder.importance_file(index))
        layer = self._source.read_layer(index, self._device)
        hidden = self._layer_input(index)
        states, errors = [], []
        for group in self._layers[index]:
            rounded, measured = self._round_group(group, layer, importance)
            states.append(self._run_layer(index, self._cast(layer | rounded), hidden))
            errors.append(measured)
        kls = self._reference.divergences(self._final_states(index + 1, states))
        return {
            group.name: GroupLoss(probe_type(group), kl, measured)
            for group, kl, measured in zip(self._layers[index], kls, errors, strict=True)
        }

    def _round_group(
        self, group: TensorGroup, layer: LayerTensors, importance: dict[str, InputImportance]
    ) -> tuple[LayerTensors, dict[str, float]]:
        """The group's weights in the probe type, and its error in each type."""
        rounded: LayerTensors = {}
        errors: Counter[str] = Counter()
        values = _SAMPLED_VALUES * len(group.tensors) // len(group.linears)
        for linear in group.linears:
            weight = layer[f"{linear}.weight"].cpu().numpy()
            squares = _mean_squares(importance.get(linear), weight.shape[1])
            kept = round_trip(weight, probe_type(group), squares)
            rounded[f"{linear}.weight"] = torch.from_numpy(kept).to(self._device)
            errors.update(_sampled_errors(weight, group.types, squares, squares, values))
        return rounded, dict(errors)

    def _probe_outer(self, group: TensorGroup) -> GroupLoss:
        """Probe the embedding or the output; a tied embedding is both."""
        spec = self._source.spec
        name = "lm_head.weight" if group.name == OUTPUT else "model.embed_tokens.weight"
        rounded_type = probe_type(group)

        def rounded(rows: Tensor) -> Tensor:
            kept = round_trip(rows.cpu().float().numpy(), rounded_type, None)
            return torch.from_numpy(kept).to(rows.device)

        states = [self._final_hidden]
        if group.name == EMBEDDING:
            rows, places = torch.unique(self._ids, return_inverse=True)
            embedding = rounded(self._source.gather_rows(name, rows))
            hidden = embed_tokens(spec, embedding.to(self._source.dtype), places)
            states = self._final_states(0, [hidden])
        is_head = group.name == OUTPUT or spec.tied_embeddings
        kls = self._reference.divergences(states, rounded if is_head else lambda rows: rows)
        weight = self._sampled_rows(name, group)
        ones = np.ones(weight.shape[1], np.float32)
        errors = rounding_errors(weight, group.types, None, ones)
        return GroupLoss(rounded_type, kls[0], errors)

    def _sampled_rows(self, name: str, group: TensorGroup) -> Array:
        _, values, columns = group.tensors[0]
        rows = torch.from_numpy(_row_sample(values // columns, columns, _SAMPLED_VALUES))
        return self._source.gather_rows(name, rows).float().numpy()

    @cached_property
    def _inputs(self) -> dict[int, Tensor]:
        """Input of the next layer to be probed, and the final output by the number of layers."""
        return self._original_states(0, embed_windows(self._source, self._ids))

    def _original_states(self, first: int, hidden: Tensor) -> dict[int, Tensor]:
        layers = self._source.spec.num_layers
        missing = [
            layer
            for layer in self._layers
            if layer is not None and not self._record_file(layer).is_file()
        ]
        found = {}
        for index in range(first, layers):
            if index == min(missing, default=layers):
                found[index] = hidden
            hidden = self._run_layer(index, self._read_layer(index), hidden)
        return found | {layers: hidden}

    @cached_property
    def _reference(self) -> ReferenceDistribution:
        return ReferenceDistribution(self._source, self._final_hidden, self._device, self._dtype)

    @property
    def _final_hidden(self) -> Tensor:
        return self._inputs[self._source.spec.num_layers].flatten(0, 1)

    def _layer_input(self, index: int) -> Tensor:
        """The original's input of a layer, computed from the nearest one before that is kept."""
        inputs = self._inputs
        start = max(layer for layer in inputs if layer <= index)
        hidden = inputs[start]
        for layer in range(start, index):
            hidden = self._run_layer(layer, self._read_layer(layer), hidden)
        if start != index:
            del inputs[start]
            inputs[index] = hidden
        return hidden

    def _final_states(self, first: int, states: list[Tensor]) -> list[Tensor]:
        """Outputs of the last layer, [tokens, hidden], from inputs of layer `first`."""
        for index in range(first, self._source.spec.num_layers):
            layer = self._read_layer(index)
            states = [self._run_layer(index, layer, hidden) for hidden in states]
        return [hidden.flatten(0, 1) for hidden in states]

    def _run_layer(self, index: int, layer: LayerTensors, hidden: Tensor) -> Tensor:
        return self._forward.run(index, layer, hidden.to(self._device)).cpu()

    def _read_layer(self, index: int) -> LayerTensors:
        return self._cast(self._source.read_layer(index, self._device))

    def _cast(self, layer: LayerTensors) -> LayerTensors:
        """Linears in the dtype of the multiplications, converted once for many passes."""
        linears = {f"{name}.weight" for name in self._linears}
        return {
            name: tensor.to(self._dtype) if name in linears else tensor
            for name, tensor in layer.items()
        }

    def _record_file(self, layer: int | None) -> Path:
        number = self._source.spec.num_layers if layer is None else layer
        return self._folder.path / f"sensitivity-{number:05d}.json"

    def _write_record(self, layer: int | None, losses: dict[str, GroupLoss]) -> None:
        record = {name: asdict(loss) for name, loss in losses.items()}
        with atomic_write(self._record_file(layer)) as path:
            path.write_text(json.dumps(record), encoding="utf-8")

    def _read_record(self, layer: int | None) -> dict[str, GroupLoss]:
        record = json.loads(self._record_file(layer).read_text(encoding="utf-8"))
        return {name: GroupLoss(**loss) for name, loss in record.items()}


def probe_windows(windows: Tensor, num_tokens: int) -> Tensor:
    """Windows of num_tokens tokens at most, one at least, evenly spaced."""
    count = min(len(windows), max(1, num_tokens // windows.shape[1]))
    return windows[torch.arange(count) * len(windows) // count]


def _mean_squares(importance: InputImportance | None, columns: int) -> Array:
    """Mean squared inputs; ones for an expert without tokens, as in read_imatrix."""
    if importance is None or not importance.num_tokens:
        return np.ones(columns, np.float32)
    return (importance.sum_squares / importance.num_tokens).numpy()


def _sampled_errors(
    weight: Array, types: Iterable[str], importance: Array, error_weights: Array, values: int
) -> dict[str, float]:
    """Errors of a whole matrix, estimated from some of its rows."""
    rows = _row_sample(len(weight), weight.shape[1], values)
    found = rounding_errors(weight[rows], tuple(types), importance, error_weights)
    return {name: error * len(weight) / len(rows) for name, error in found.items()}


def _row_sample(rows: int, columns: int, values: int) -> NDArray[np.int64]:
    count = min(rows, max(_MIN_SAMPLED_ROWS, values // columns))
    return np.arange(count) * rows // count


def _seconds(action: Callable[[], object]) -> float:
    started_s = time.monotonic()
    action()
    return time.monotonic() - started_s
