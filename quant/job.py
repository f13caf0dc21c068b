"""A model quantized layer by layer: read, calibrated, rounded, written, forgotten."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localgen.backends.errors import DiskFull
from localgen.backends.formats.hf.tensor_names import LayerTensors, layer_names
from localgen.backends.units import format_gb
from localgen.quant.calibrate.activations import ActivationFile
from localgen.quant.calibrate.importance import (
    collect_importance,
    read_importance,
    write_importance,
)
from localgen.quant.calibrate.input_stats import LayerInputs, calibration_dtype
from localgen.quant.calibrate.layer_forward import LayerForward, embed_tokens
from localgen.quant.card import render_model_card, write_model_card
from localgen.quant.estimate import ResourceEstimate, estimate_resources
from localgen.quant.files.config_files import copy_tokenizer_and_config_files, write_config
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.files.packing import pack_linear, packing_layout, quantization_config
from localgen.quant.files.safetensors_writer import streamed_tensor, write_safetensors
from localgen.quant.files.work_folder import WorkFolder
from localgen.quant.methods.folding import fold_layer
from localgen.quant.methods.layer import QuantizedLayer, quantize_layer
from localgen.quant.preflight import PreparedQuantization, check_finite_and_checksum
from localgen.quant.request.recipe import LayerMode


@dataclass(frozen=True, slots=True)
class QuantizeProgress:
    """stage: `checking` (of bytes) or `layers`. layer_s: what one took, by those done here."""

    stage: str
    done: int
    total: int
    layer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """folder: the result. seconds: of this process, of layers only. num_resumed: layers that were
    there."""

    folder: Path
    size_bytes: int
    num_layers: int
    num_resumed: int
    seconds: float

    @property
    def layer_s(self) -> float:
        """Seconds a layer."""
        return self.seconds / max(1, self.num_layers - self.num_resumed)


class QuantizeJob:
    """One quantization. model: what the original is called. output: the folder to be.

    mode: `fold` folds awq's scales and rounds nothing, `observe` changes nothing; what they leave
    stays in the work folder, for a GGUF file.
    """

    def __init__(
        self, model: str, prepared: PreparedQuantization, output: Path, *, mode: LayerMode = "round"
    ) -> None:
        self.model, self.prepared, self.mode = model, prepared, mode
        self.estimate: ResourceEstimate = estimate_resources(prepared, mode)
        self.work_folder = WorkFolder(output, prepared.source.spec.num_layers + 1)
        self._layout = packing_layout(prepared.recipe)

    def check_disk_space(self, *, resume: bool) -> None:
        """InvalidRequest: the result is there, or an unfinished one that is not to be resumed.
        DiskFull: the files would not fit."""
        self.work_folder.check_startable(resume=resume)
        free, there = self._free_disk()
        taken = sum(
            path.stat().st_size for path in self.work_folder.path.glob("*") if path.is_file()
        )
        if self.estimate.disk_bytes > free + taken:
            raise DiskFull(
                f"the result and what lies beside it until then take "
                f"{format_gb(self.estimate.disk_bytes)}, {there} has {format_gb(free)} free: "
                "make room, or give an --out on another disk"
            )

    def run(
        self, *, resume: bool, on_progress: Callable[[QuantizeProgress], None]
    ) -> QuantizeResult:
        """Do it. What is written so far stays whatever happens, and is gone on with by `resume`.

        Errors: as check_disk_space. LoadFailed: a weight is not finite.
        """
        self.check_disk_space(resume=resume)
        source = self.prepared.source
        checksum = check_finite_and_checksum(
            source, lambda done: on_progress(QuantizeProgress("checking", done, source.size_bytes))
        )
        try:
            self.work_folder.open(self.resume_manifest(checksum), resume=resume)
            return self._run(on_progress)
        except OSError as error:
            # numpy has no errno for a disk that is full
            raise DiskFull(
                f"cannot write to {self.work_folder.path}: {error.strerror or error}; "
                f"{format_gb(self._free_disk()[0])} are free: make room and run again with --resume"
            ) from None

    def resume_manifest(self, checksum: int) -> dict[str, Any]:
        """What decides the files. checksum: of all weights."""
        return self.prepared.resume_manifest(checksum) | {"mode": self.mode}

    def has_resumable_run(self) -> bool:
        """Whether an unfinished run lies there, which can be gone on with as far as can be known
        before all weights were read. InvalidRequest: it cannot."""
        begun = self.work_folder.read_manifest()
        if begun is None:
            return False
        model = begun.get("model")
        self.work_folder.check_same_manifest(
            self.resume_manifest(model.get("checksum", 0) if isinstance(model, dict) else 0)
        )
        return True

    def free_disk_bytes(self) -> int:
        """Of the disk where the result will be."""
        return self._free_disk()[0]

    def _free_disk(self) -> tuple[int, Path]:
        """Bytes free where the result will be, and the folder that was asked."""
        there = self.work_folder.path.absolute().parent
        while not there.exists():
            there = there.parent
        return shutil.disk_usage(there).free, there

    def _run(self, on_progress: Callable[[QuantizeProgress], None]) -> QuantizeResult:
        layers, resumed = self.prepared.source.spec.num_layers, self.work_folder.num_done_layers
        if self.mode == "round" and not self.work_folder.non_layer_file.is_file():
            self._write_non_layer_tensors()
        states = self._open_activations(resumed)
        started_s = time.monotonic()
        for index in range(resumed, layers):
            taken_s = (time.monotonic() - started_s) / max(1, index - resumed)
            on_progress(QuantizeProgress("layers", index, layers, taken_s))
            self._process_layer(index, states)
        seconds = time.monotonic() - started_s
        on_progress(QuantizeProgress("layers", layers, layers))
        size = self._finish() if self.mode == "round" else 0
        return QuantizeResult(self.work_folder.out, size, layers, resumed, seconds)

    def _finish(self) -> int:
        """Bytes of the weights of the result, which is whole from now on."""
        ready, folder = self.prepared, self.work_folder.path
        copy_tokenizer_and_config_files(ready.source.folder, folder)
        write_config(
            ready.source.folder,
            folder,
            dtype=ready.dtype,
            quantization=quantization_config(ready.recipe, _unquantized_linears(ready)),
        )
        write_model_card(folder, render_model_card(self.model, ready))
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        self.work_folder.publish()
        return size

    @torch.no_grad()
    def _process_layer(self, index: int, states: ActivationFile | None) -> None:
        ready = self.prepared
        spec, device = ready.source.spec, ready.device
        dtype = calibration_dtype(device, spec.hidden_size)
        forward = LayerForward(spec, ready.seq_len, device, dtype)

        def inputs() -> Iterator[Tensor]:
            if states is not None:
                for batch in states.batches():
                    yield batch.to(ready.device)

        layer = self._compute_layer(index, inputs, forward)
        # what goes on is what is written, to the last bit
        kept = {name: tensor.to(ready.dtype) for name, tensor in layer.tensors.items()}
        if states is not None and index + 1 < ready.source.spec.num_layers:
            whole = {name: tensor.float() for name, tensor in kept.items()}
            whole |= {f"{name}.weight": one.dequantize() for name, one in layer.weights.items()}
            states.advance(lambda hidden: forward.run(index, whole, hidden.to(ready.device)))
            del whole
        self._write_layer(index, kept, layer)
        if states is not None:
            states.delete(index)

    def _compute_layer(
        self, index: int, inputs: LayerInputs, forward: LayerForward
    ) -> QuantizedLayer:
        ready = self.prepared
        spec, tensors = ready.source.spec, ready.source.read_layer(index, ready.device)
        match self.mode:
            case "round":
                return quantize_layer(spec, index, tensors, inputs, forward, ready.recipe)
            case "fold":
                folded = fold_layer(spec, index, tensors, inputs, forward, ready.recipe)
                return QuantizedLayer(folded.tensors, {}, folded.importance)
            case "observe":
                return QuantizedLayer(
                    tensors, {}, collect_importance(index, tensors, inputs, forward)
                )

    def _write_layer(self, index: int, unquantized: LayerTensors, layer: QuantizedLayer) -> None:
        if self.mode != "round":
            write_importance(self.work_folder.importance_file(index), layer.importance)
        if self.mode == "observe":
            unquantized = {}  # the file says that the layer is done
        at = f"model.layers.{index}."
        entries = {f"{at}{name}": streamed_tensor(tensor) for name, tensor in unquantized.items()}
        for linear, weight in layer.weights.items():
            for part, tensor in pack_linear(weight, self._layout).items():
                entries[f"{at}{linear}.{part}"] = streamed_tensor(tensor)
        write_safetensors(self.work_folder.layer_file(index), entries)

    def input_importance(self) -> dict[str, tuple[NDArray[np.float32], int]]:
        """After a run that does not round: of every linear by its whole name, sums of squares of
        its inputs [in], and over how many tokens."""
        found = {}
        for index in range(self.prepared.source.spec.num_layers):
            for linear, one in read_importance(self.work_folder.importance_file(index)).items():
                found[f"model.layers.{index}.{linear}"] = (one.sum_squares.numpy(), one.num_tokens)
        return found

    def _write_non_layer_tensors(self) -> None:
        source, dtype = self.prepared.source, self.prepared.dtype
        write_safetensors(
            self.work_folder.non_layer_file,
            {name: source.streamed_tensor(name, dtype) for name in source.non_layer_names()},
        )

    def _open_activations(self, num_done: int) -> ActivationFile | None:
        ready = self.prepared
        if ready.windows is None:
            return None
        ids = ready.windows.ids
        states = ActivationFile(
            self.work_folder.path,
            (*ids.shape, ready.source.spec.hidden_size),
            layer=num_done,
            batch=self.estimate.batch_windows,
        )
        if num_done == 0 and not states.exists:
            states.write_first_layer(lambda part: embed_windows(ready.source, ids[part]))
        return states


def embed_windows(source: LayerwiseCheckpoint, ids: Tensor) -> Tensor:
    """The first layer's input for some windows, of the rows of the embedding that they have.

    ids: int64 [windows, length].
    """
    rows, places = torch.unique(ids, return_inverse=True)
    weight = source.gather_rows("model.embed_tokens.weight", rows)
    return embed_tokens(source.spec, weight, places)


def _unquantized_linears(ready: PreparedQuantization) -> list[str]:
    router = layer_names(ready.source.spec).router
    return [] if router is None else [router.rpartition(".")[2]]
