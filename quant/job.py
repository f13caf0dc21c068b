"""QuantizeJob: a model quantized layer by layer and written to a folder, resumable at any layer."""

from __future__ import annotations

import itertools
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from localgen.backends.errors import DiskFull, OutOfMemory
from localgen.backends.formats.hf.tensor_names import LayerTensors
from localgen.backends.memory.system import (
    available_memory_bytes,
    peak_memory_bytes,
    total_memory_bytes,
)
from localgen.backends.units import format_size
from localgen.quant.calibrate.activations import ActivationFiles
from localgen.quant.calibrate.importance import (
    collect_importance,
    read_importance,
    write_importance,
)
from localgen.quant.calibrate.input_stats import calibration_dtype
from localgen.quant.calibrate.layer_forward import (
    CalibrationLayer,
    LayerForward,
    LayerInputs,
    embed_windows,
)
from localgen.quant.calibrate.passes import iter_layer_stats
from localgen.quant.estimate import ResourceEstimate, estimate_resources
from localgen.quant.files.packing import pack_linear, packing_layout
from localgen.quant.files.safetensors_writer import streamed_tensor, write_safetensors
from localgen.quant.files.work_folder import WorkFolder
from localgen.quant.gguf.gptq_rounding import GgufRounding
from localgen.quant.layer_trial import TRIAL_STEPS, estimate_layer_s
from localgen.quant.methods.layer import QuantizedLayer, fold_layer, quantize_layer
from localgen.quant.preflight import PreparedQuantization, check_finite_and_checksum
from localgen.quant.request.events import (
    EstimateEvent,
    FinishedEvent,
    LayersEstimateEvent,
    NoteEvent,
    OnEvent,
    ProgressEvent,
    StoppedEvent,
    UnfinishedEvent,
)
from localgen.quant.request.recipe import LayerMode, Recipe
from localgen.quant.result_folder import (
    describe_learning,
    describe_recipe,
    write_sidecar_files,
)

# a trial takes too large a part of the time of fewer
_MIN_TIMED_LAYERS = 4
_MODE_DESCRIPTIONS = {
    "fold": "awq's scales folded in, and an importance matrix for llama.cpp",
    "observe": "an importance matrix for llama.cpp",
    "gguf": "codes chosen by gptq, for a GGUF file",
}


class QuantizeJob:
    """One quantization. model: name of the original. output: folder to write.

    mode: `fold` folds AWQ's scales and rounds nothing, `observe` changes nothing, `gguf` rounds as
    `rounding` does; these leave their files in the work folder, for a GGUF file.
    """

    def __init__(
        self,
        model: str,
        prepared: PreparedQuantization,
        output: Path,
        *,
        mode: LayerMode = "round",
        rounding: GgufRounding | None = None,
    ) -> None:
        self.model, self.prepared, self.mode = model, prepared, mode
        self._rounding = rounding
        self.estimate: ResourceEstimate = estimate_resources(prepared, mode)
        self.num_layers = prepared.source.spec.num_layers
        self.work_folder = WorkFolder(output, self.num_layers + 1)
        self._layout = packing_layout(prepared.recipe)

    def check_disk_space(self, *, resume: bool) -> None:
        """Raise InvalidRequest if the output exists or has an unfinished run that is not to be
        resumed, DiskFull if the files do not fit."""
        self.work_folder.check_startable(resume=resume)
        free, there = self._free_disk()
        if self.estimate.disk_bytes > free + self.work_folder.num_bytes:
            raise DiskFull(
                f"the result and its temporary files take "
                f"{format_size(self.estimate.disk_bytes)}, {there} has {format_size(free)} free: "
                "make room, or give an --out on another disk"
            )

    def report_estimate(self, on_event: OnEvent) -> None:
        """Emit an EstimateEvent. Raises OutOfMemory if the machine has less memory."""
        estimate, recipe = self.estimate, self.prepared.recipe
        description = _MODE_DESCRIPTIONS.get(self.mode) or describe_recipe(recipe)
        if self.mode == "gguf":
            description += describe_learning(recipe)
        on_event(
            EstimateEvent(
                model=self.model,
                description=description,
                output=str(self.work_folder.out),
                source_bytes=self.prepared.source.size_bytes,
                output_bytes=estimate.output_bytes if self.mode == "round" else None,
                states_bytes=estimate.states_bytes,
                memory_bytes=estimate.peak_bytes,
                free_bytes=available_memory_bytes(),
                disk_bytes=estimate.disk_bytes,
                disk_free_bytes=self._free_disk()[0],
            )
        )
        if estimate.peak_bytes > total_memory_bytes():
            raise OutOfMemory(
                f"one layer with its statistics takes about {format_size(estimate.peak_bytes)}, "
                f"this machine has {format_size(total_memory_bytes())}: "
                f"{self._smaller_choice()}, or a smaller --seq-len"
            )

    def _smaller_choice(self) -> str:
        """Options that take less memory, for an error."""
        if self.prepared.recipe.rounding_steps and self.mode in ("round", "gguf"):
            return "--rounding-steps 0 needs less"
        return "--rtn or --fp8 need less" if self.mode == "round" else "use --gguf Q4_K_M alone"

    def report_unfinished(self, on_event: OnEvent) -> None:
        """Emit an UnfinishedEvent if there is a run to resume.

        Raises InvalidRequest if it has another manifest. The checksum of the weights is not
        compared, because they are not read.
        """
        manifest = self.work_folder.read_manifest()
        if manifest is None or not self.work_folder.has_finished_layers:
            return
        model = manifest.get("model")
        checksum = model.get("checksum", 0) if isinstance(model, dict) else 0
        self.work_folder.check_same_manifest(self._resume_manifest(checksum))
        on_event(UnfinishedEvent(self.work_folder.num_done_layers, self.num_layers))

    def run(self, on_event: OnEvent, *, resume: bool) -> FinishedEvent:
        """Open the work folder and run all layers. Raises as both."""
        with self.opened(on_event, resume=resume):
            return self.run_layers(on_event)

    @contextmanager
    def opened(
        self,
        on_event: OnEvent,
        *,
        resume: bool,
        stopped: Callable[[], StoppedEvent | None] = lambda: None,
    ) -> Iterator[None]:
        """Check the weights and open the work folder; other runs wait outside.

        stopped: emitted on Ctrl+C, by default the number of finished layers. Raises as
        check_disk_space, LoadFailed if a weight is not finite, DiskFull, and OutOfMemory if the
        GPU's memory is full.
        """
        self.check_disk_space(resume=resume)
        with self._reporting_interruption(on_event, stopped):
            checksum = check_finite_and_checksum(self.prepared.source, on_event)
            try:
                with self.work_folder.opened(self._resume_manifest(checksum), resume=resume):
                    yield
            except OSError as error:
                # numpy sets no errno for a full disk
                raise DiskFull(
                    f"cannot write to {self.work_folder.path}: {error.strerror or error}; "
                    f"{format_size(self._free_disk()[0])} are free: "
                    "make room and run again with --resume"
                ) from None

    @contextmanager
    def _reporting_interruption(
        self, on_event: OnEvent, stopped: Callable[[], StoppedEvent | None]
    ) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            if self.work_folder.path.exists():
                done = self.work_folder.num_done_layers
                on_event(stopped() or StoppedEvent(done, self.num_layers))
            raise
        except torch.OutOfMemoryError:
            raise OutOfMemory(
                "the GPU's memory is full: --device cpu, or fewer tokens at once with --seq-len; "
                f"--resume continues after {self.work_folder.num_done_layers} layers"
            ) from None

    def input_importance(self) -> dict[str, tuple[NDArray[np.float32], int]]:
        """Importance after a run in mode `fold` or `observe`, by the full name of the linear: sums
        of squared inputs [in], and the number of tokens."""
        found = {}
        for index in range(self.num_layers):
            for linear, one in read_importance(self.work_folder.importance_file(index)).items():
                found[f"model.layers.{index}.{linear}"] = (one.sum_squares.numpy(), one.num_tokens)
        return found

    def _resume_manifest(self, checksum: int) -> dict[str, Any]:
        """checksum: of all weights."""
        manifest = self.prepared.resume_manifest(checksum) | {"mode": self.mode}
        return manifest if self._rounding is None else manifest | {"gguf": self._rounding.file_type}

    def free_disk_bytes(self) -> int:
        """Free bytes on the output's disk."""
        return self._free_disk()[0]

    def _free_disk(self) -> tuple[int, Path]:
        """Free bytes on the output's disk, and the folder that was queried."""
        there = self.work_folder.path.absolute().parent
        return shutil.disk_usage(there).free, there

    def run_layers(self, on_event: OnEvent) -> FinishedEvent:
        """Process all layers that are not finished, with the work folder open."""
        resumed = self.work_folder.num_done_layers
        if self._rounding is not None:
            self._rounding.prepare()  # first, as it takes the 16-bit file's size on disk meanwhile
            if uncoded := self._rounding.describe_uncoded():
                on_event(NoteEvent(uncoded))
        if self.mode == "round" and not self.work_folder.non_layer_file.is_file():
            self._write_non_layer_tensors()
        states = self._open_activations("states")
        originals = None
        if self._compares_originals:
            originals = self._open_activations("original-states")
        step = "quantizing" if self.mode in ("round", "gguf") else "calibrating"
        estimated_s = self._report_time(step, states, on_event)
        started_s = time.monotonic()
        for index in range(resumed, self.num_layers):
            progress = ProgressEvent(step, index, self.num_layers, "layers")
            on_event(progress)
            self._process_layer(index, states, originals, self._on_steps(progress, on_event))
        seconds = time.monotonic() - started_s
        on_event(ProgressEvent(step, self.num_layers, self.num_layers, "layers"))
        if self.mode == "round":
            write_sidecar_files(self.work_folder.path, self.model, self.prepared)
            self.work_folder.publish()
        if self._rounding is not None:
            layers = map(self.work_folder.layer_file, range(self.num_layers))
            self._rounding.publish(layers, self.work_folder.out)
        return FinishedEvent(
            path=str(self.work_folder.out),
            layers=self.num_layers,
            resumed=resumed,
            seconds=seconds,
            estimated_s=estimated_s,
            layer_s=seconds / max(1, self.num_layers - resumed),
            peak_bytes=peak_memory_bytes(),
            estimated_bytes=self.estimate.peak_bytes,
        )

    @property
    def _compares_originals(self) -> bool:
        return self.prepared.recipe.needs_originals and self.mode != "observe"

    @torch.no_grad()
    def _report_time(
        self, step: str, states: ActivationFiles | None, on_event: OnEvent
    ) -> float | None:
        """Emit the seconds of all layers that are left, and return them; None for few layers."""
        index, prepared = self.work_folder.num_done_layers, self.prepared
        left = self.num_layers - index
        if left < _MIN_TIMED_LAYERS:
            return None
        on_event(ProgressEvent("timing a layer", 0, 1, "steps"))
        steps = prepared.recipe.rounding_steps
        recipe = replace(prepared.recipe, rounding_steps=min(steps, TRIAL_STEPS))

        def compute(layer: CalibrationLayer) -> None:
            found = self._compute_layer(layer, recipe)
            for weight in found.weights.values():
                weight.dequantize()
                pack_linear(weight, self._layout)

        seconds = left * estimate_layer_s(
            lambda: self._read_layer(index, states, None),
            self._collect_statistics,
            compute,
            device=prepared.device,
            num_windows=0 if prepared.windows is None else len(prepared.windows.ids),
            num_passes=2 if self._compares_originals else 1,
            num_steps=steps,
        )
        on_event(ProgressEvent("timing a layer", 1, 1, "steps"))
        on_event(LayersEstimateEvent(step, left, seconds))
        if steps and self.mode in ("round", "gguf"):
            on_event(NoteEvent("most time goes to learned rounding: --rounding-steps 0 is faster"))
        return seconds

    def _on_steps(self, progress: ProgressEvent, on_event: OnEvent) -> Callable[[], None]:
        """Returns a function for CalibrationLayer.on_learning_step that emits the progress within
        a layer, by its learning steps."""
        calls, steps = itertools.count(), self.prepared.recipe.rounding_steps

        def emit() -> None:
            if done := next(calls):
                on_event(replace(progress, current=done / (steps + 1)))

        return emit

    @torch.no_grad()
    def _process_layer(
        self,
        index: int,
        states: ActivationFiles | None,
        originals: ActivationFiles | None,
        on_learning_step: Callable[[], None],
    ) -> None:
        """originals: states of the original model; None if the recipe does not compare them."""
        prepared = self.prepared
        layer = self._read_layer(index, states, originals)
        layer = replace(layer, on_learning_step=on_learning_step)
        forward, device = layer.forward, prepared.device

        def advance(files: ActivationFiles, tensors: LayerTensors) -> None:
            files.advance(index, lambda hidden: forward.run(index, tensors, hidden.to(device)))

        is_last = index + 1 == self.num_layers
        if originals is not None and (prepared.recipe.rounding_steps or not is_last):
            advance(originals, layer.tensors)
        found = self._compute_layer(layer, prepared.recipe)
        del layer  # the original weights are freed before the next step
        # the next layer gets the output of the written weights, bit for bit
        kept = {name: tensor.to(prepared.dtype) for name, tensor in found.tensors.items()}
        if states is not None and not is_last:
            whole = {name: tensor.float() for name, tensor in kept.items()}
            whole |= {f"{name}.weight": one.dequantize() for name, one in found.weights.items()}
            advance(states, whole)
            del whole
        self._write_layer(index, kept, found)
        for files in (states, originals):
            if files is not None:
                files.delete(index)

    def _read_layer(
        self, index: int, states: ActivationFiles | None, originals: ActivationFiles | None
    ) -> CalibrationLayer:
        source, device = self.prepared.source, self.prepared.device
        dtype = calibration_dtype(device, source.spec.hidden_size)

        def inputs(files: ActivationFiles | None, at: int = index) -> LayerInputs:
            return lambda: (
                batch.to(device) for batch in (() if files is None else files.batches(at))
            )

        return CalibrationLayer(
            index,
            source.read_layer(index, device),
            inputs(states),
            LayerForward(source.spec, self.prepared.seq_len, device, dtype),
            inputs(originals),
            inputs(originals, index + 1),
        )

    def _compute_layer(self, layer: CalibrationLayer, recipe: Recipe) -> QuantizedLayer:
        match self.mode:
            case "round":
                return quantize_layer(layer, recipe)
            case "fold":
                folded = fold_layer(layer, recipe)
                return QuantizedLayer(folded.tensors, importance=folded.importance)
            case "observe":
                return QuantizedLayer(layer.tensors, importance=collect_importance(layer))
            case "gguf":
                assert self._rounding is not None
                return self._rounding.round_layer(layer, recipe)

    def _collect_statistics(self, layer: CalibrationLayer) -> None:
        """Collect the statistics of the inputs that _compute_layer needs."""
        if self.mode == "observe":
            collect_importance(layer)
        else:
            deque(iter_layer_stats(layer, self.prepared.recipe), maxlen=0)

    def _write_layer(self, index: int, unquantized: LayerTensors, layer: QuantizedLayer) -> None:
        if self.mode in ("fold", "observe"):
            write_importance(self.work_folder.importance_file(index), layer.importance)
        if self.mode in ("observe", "gguf"):
            unquantized = {}  # a file, empty or not, marks the layer as finished
        prefix = f"model.layers.{index}."
        entries = {prefix + name: streamed_tensor(tensor) for name, tensor in unquantized.items()}
        for linear, weight in layer.weights.items():
            for part, tensor in pack_linear(weight, self._layout).items():
                entries[f"{prefix}{linear}.{part}"] = streamed_tensor(tensor)
        write_safetensors(self.work_folder.layer_file(index), entries)

    def _write_non_layer_tensors(self) -> None:
        source, dtype = self.prepared.source, self.prepared.dtype
        write_safetensors(
            self.work_folder.non_layer_file,
            {name: source.streamed_tensor(name, dtype) for name in source.non_layer_names()},
        )

    def _open_activations(self, name: str) -> ActivationFiles | None:
        """Files of the inputs of layers, the first one written; None without calibration."""
        source, windows = self.prepared.source, self.prepared.windows
        if windows is None:
            return None
        states = ActivationFiles(
            self.work_folder.path,
            (*windows.ids.shape, source.spec.hidden_size),
            batch=self.estimate.batch_windows,
            name=name,
        )
        if self.work_folder.num_done_layers == 0 and not states.exists(0):
            states.write_first_layer(lambda part: embed_windows(source, windows.ids[part]))
        return states
