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
from localgen.backends.formats.hf.tensor_names import Tensors, names_of
from localgen.backends.units import as_gb
from localgen.quant.calibrate.activations import Activations
from localgen.quant.calibrate.importance import observed, read_importance, write_importance
from localgen.quant.calibrate.input_stats import Inputs, multiplied_in
from localgen.quant.calibrate.layer_forward import LayerForward, embed
from localgen.quant.card import card_text, write_card
from localgen.quant.estimate import Estimate, estimate
from localgen.quant.files.config_files import copy_files, write_config
from localgen.quant.files.layerwise_checkpoint import Source
from localgen.quant.files.packing import layout_of, pack, quantization_config
from localgen.quant.files.safetensors_writer import entry_of, write
from localgen.quant.files.work_folder import WorkFolder
from localgen.quant.methods.folding import fold_layer
from localgen.quant.methods.layer import QuantizedLayer, quantize_layer
from localgen.quant.preflight import Ready, check_weights
from localgen.quant.request.recipe import Mode


@dataclass(frozen=True, slots=True)
class Progress:
    """stage: `checking` (of bytes) or `layers`. layer_s: what one took, by those done here."""

    stage: str
    done: int
    total: int
    layer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """folder: the result. seconds: of this process, of layers only. resumed: layers that were
    there."""

    folder: Path
    size_bytes: int
    layers: int
    resumed: int
    seconds: float

    @property
    def layer_s(self) -> float:
        """Seconds a layer."""
        return self.seconds / max(1, self.layers - self.resumed)


class Job:
    """One quantization. model: what the original is called. out: the folder to be.

    mode: `fold` folds awq's scales and rounds nothing, `observe` changes nothing; what they leave
    stays in the work folder, for a GGUF file.
    """

    def __init__(self, model: str, ready: Ready, out: Path, *, mode: Mode = "round") -> None:
        self.model, self.ready, self.mode = model, ready, mode
        self.estimate: Estimate = estimate(ready, mode)
        self.work = WorkFolder(out, ready.source.spec.layers + 1)
        self._layout = layout_of(ready.recipe)

    def check_room(self, *, resume: bool) -> None:
        """InvalidRequest: the result is there, or an unfinished one that is not to be resumed.
        DiskFull: the files would not fit."""
        self.work.check(resume=resume)
        free, there = self._free()
        taken = sum(path.stat().st_size for path in self.work.path.glob("*") if path.is_file())
        if self.estimate.disk_bytes > free + taken:
            raise DiskFull(
                f"the result and what lies beside it until then take "
                f"{as_gb(self.estimate.disk_bytes)}, {there} has {as_gb(free)} free: "
                "make room, or give an --out on another disk"
            )

    def run(self, *, resume: bool, on_progress: Callable[[Progress], None]) -> Outcome:
        """Do it. What is written so far stays whatever happens, and is gone on with by `resume`.

        Errors: as check_room. LoadFailed: a weight is not finite.
        """
        self.check_room(resume=resume)
        source = self.ready.source
        checksum = check_weights(
            source, lambda done: on_progress(Progress("checking", done, source.size_bytes))
        )
        try:
            self.work.open(self.plan(checksum), resume=resume)
            return self._run(on_progress)
        except OSError as error:
            # numpy has no errno for a disk that is full
            raise DiskFull(
                f"cannot write to {self.work.path}: {error.strerror or error}; "
                f"{as_gb(self._free()[0])} are free: make room and run again with --resume"
            ) from None

    def plan(self, checksum: int) -> dict[str, Any]:
        """What decides the files. checksum: of all weights."""
        return self.ready.plan(checksum) | {"mode": self.mode}

    def begun(self) -> bool:
        """Whether an unfinished run lies there, which can be gone on with as far as can be known
        before all weights were read. InvalidRequest: it cannot."""
        begun = self.work.begun()
        if begun is None:
            return False
        model = begun.get("model")
        self.work.compare(self.plan(model.get("checksum", 0) if isinstance(model, dict) else 0))
        return True

    def free_bytes(self) -> int:
        """Of the disk where the result will be."""
        return self._free()[0]

    def _free(self) -> tuple[int, Path]:
        """Bytes free where the result will be, and the folder that was asked."""
        there = self.work.path.absolute().parent
        while not there.exists():
            there = there.parent
        return shutil.disk_usage(there).free, there

    def _run(self, on_progress: Callable[[Progress], None]) -> Outcome:
        layers, resumed = self.ready.source.spec.layers, self.work.done
        if self.mode == "round" and not self.work.others_file.is_file():
            self._write_others()
        states = self._states(resumed)
        started_s = time.monotonic()
        for index in range(resumed, layers):
            taken_s = (time.monotonic() - started_s) / max(1, index - resumed)
            on_progress(Progress("layers", index, layers, taken_s))
            self._layer(index, states)
        seconds = time.monotonic() - started_s
        on_progress(Progress("layers", layers, layers))
        size = self._finish() if self.mode == "round" else 0
        return Outcome(self.work.out, size, layers, resumed, seconds)

    def _finish(self) -> int:
        """Bytes of the weights of the result, which is whole from now on."""
        ready, folder = self.ready, self.work.path
        copy_files(ready.source.folder, folder)
        write_config(
            ready.source.folder,
            folder,
            dtype=ready.dtype,
            quantization=quantization_config(ready.recipe, _kept_linears(ready)),
        )
        write_card(folder, card_text(self.model, ready))
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        self.work.finish()
        return size

    @torch.no_grad()
    def _layer(self, index: int, states: Activations | None) -> None:
        ready = self.ready
        spec, device = ready.source.spec, ready.device
        dtype = multiplied_in(device, spec.hidden)
        forward = LayerForward(spec, ready.length, device, dtype)

        def inputs() -> Iterator[Tensor]:
            if states is not None:
                for batch in states.batches():
                    yield batch.to(ready.device)

        layer = self._computed(index, inputs, forward)
        # what goes on is what is written, to the last bit
        kept = {name: tensor.to(ready.dtype) for name, tensor in layer.tensors.items()}
        if states is not None and index + 1 < ready.source.spec.layers:
            whole = {name: tensor.float() for name, tensor in kept.items()}
            whole |= {f"{name}.weight": one.dequantized() for name, one in layer.weights.items()}
            states.advance(lambda hidden: forward.run(index, whole, hidden.to(ready.device)))
            del whole
        self._write_layer(index, kept, layer)
        if states is not None:
            states.drop(index)

    def _computed(self, index: int, inputs: Inputs, forward: LayerForward) -> QuantizedLayer:
        ready = self.ready
        spec, tensors = ready.source.spec, ready.source.layer(index, ready.device)
        match self.mode:
            case "round":
                return quantize_layer(spec, index, tensors, inputs, forward, ready.recipe)
            case "fold":
                folded = fold_layer(spec, index, tensors, inputs, forward, ready.recipe)
                return QuantizedLayer(folded.tensors, {}, folded.importance)
            case "observe":
                return QuantizedLayer(tensors, {}, observed(index, tensors, inputs, forward))

    def _write_layer(self, index: int, kept: Tensors, layer: QuantizedLayer) -> None:
        if self.mode != "round":
            write_importance(self.work.importance_file(index), layer.importance)
        if self.mode == "observe":
            kept = {}  # the file says that the layer is done
        at = f"model.layers.{index}."
        entries = {f"{at}{name}": entry_of(tensor) for name, tensor in kept.items()}
        for linear, weight in layer.weights.items():
            for part, tensor in pack(weight, self._layout).items():
                entries[f"{at}{linear}.{part}"] = entry_of(tensor)
        write(self.work.layer_file(index), entries)

    def importance(self) -> dict[str, tuple[NDArray[np.float32], int]]:
        """After a run that does not round: of every linear by its whole name, sums of squares of
        its inputs [in], and over how many tokens."""
        found = {}
        for index in range(self.ready.source.spec.layers):
            for linear, one in read_importance(self.work.importance_file(index)).items():
                found[f"model.layers.{index}.{linear}"] = (one.squares.numpy(), one.count)
        return found

    def _write_others(self) -> None:
        source, dtype = self.ready.source, self.ready.dtype
        write(
            self.work.others_file,
            {name: source.entry(name, dtype) for name in source.other_names()},
        )

    def _states(self, done: int) -> Activations | None:
        ready = self.ready
        if ready.windows is None:
            return None
        ids = ready.windows.ids
        states = Activations(
            self.work.path,
            (*ids.shape, ready.source.spec.hidden),
            layer=done,
            batch=self.estimate.batch,
        )
        if done == 0 and not states.is_there:
            states.begin(lambda part: embedded(ready.source, ids[part]))
        return states


def embedded(source: Source, ids: Tensor) -> Tensor:
    """The first layer's input for some windows, of the rows of the embedding that they have.

    ids: int64 [windows, length].
    """
    rows, places = torch.unique(ids, return_inverse=True)
    weight = source.picked_rows("model.embed_tokens.weight", rows)
    return embed(source.spec, weight, places)


def _kept_linears(ready: Ready) -> list[str]:
    router = names_of(ready.source.spec).router
    return [] if router is None else [router.rpartition(".")[2]]
