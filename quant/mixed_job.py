"""MixedGgufJob: a GGUF file with the type of each tensor chosen by measured loss."""

from __future__ import annotations

import math
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from localgen.backends.errors import DiskFull, InvalidRequest, LoadFailed, OutOfMemory
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.memory.system import (
    available_memory_bytes,
    peak_memory_bytes,
    total_memory_bytes,
)
from localgen.backends.units import format_elapsed, format_size
from localgen.quant.calibrate.text_windows import CALIBRATION_TEXT
from localgen.quant.compare import evaluate_models
from localgen.quant.estimate import estimate_resources
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.gguf.ggml_rounding import WEIGHED_TYPES
from localgen.quant.gguf.gptq_rounding import GgufRounding
from localgen.quant.gguf.metadata import check_convertible
from localgen.quant.gguf.requantize import estimate_gguf_bytes, make_gguf
from localgen.quant.gguf_job import check_gguf_output, report_window, unfinished_file
from localgen.quant.job import QuantizeJob
from localgen.quant.mixed.groups import GPTQ_LAYER_TYPES, FileShape, plan_file
from localgen.quant.mixed.loss_search import LossSearch
from localgen.quant.mixed.search import Mixture, Options, fit_bytes, total_bytes, total_kl
from localgen.quant.mixed.sensitivity import SensitivityProbes
from localgen.quant.preflight import prepare_quantization, require_unquantized
from localgen.quant.request.events import (
    EstimateEvent,
    FinishedEvent,
    MixtureEvent,
    NoteEvent,
    OnEvent,
    ProgressEvent,
    QuantizeEvent,
    StoppedEvent,
)
from localgen.quant.request.gguf_types import GGUF_TYPES
from localgen.quant.request.request import EvalSet, QuantizeRequest, default_output
from localgen.quant.request.target import GgufTarget
from localgen.quant.result_folder import describe_learning

# KL divergence of a file from the original on the text that the target is checked with, in nats
MeasureKl = Callable[[Path, OnEvent], float]


class MixedGgufJob:
    """calibration: in mode `observe`, with the output of this job; with GPTQ's recipe, GPTQ chooses
    the codes of the files. measure_kl: for a target of loss."""

    def __init__(
        self,
        target: GgufTarget,
        shape: FileShape,
        calibration: QuantizeJob,
        measure_kl: MeasureKl,
    ) -> None:
        """Raises InvalidRequest for a size that no file has."""
        prepared = calibration.prepared
        self.target, self.calibration, self._measure_kl = target, calibration, measure_kl
        self.output = calibration.work_folder.out
        self._source: LayerwiseCheckpoint = prepared.source
        self.shape = shape
        self._budget = _tensor_budget(self.shape, target)
        assert prepared.windows is not None
        self._windows = prepared.windows
        self._by_gptq = prepared.recipe.method == "gptq"
        self._probes = SensitivityProbes(
            self._source,
            self.shape.groups,
            self._windows.ids,
            calibration.work_folder,
            prepared.device,
        )
        self._options: Options = {}
        self._mixture: Mixture = {}
        self._estimated_bytes = 0
        self._estimated_s = self._probes_s = 0.0
        self._stopped: StoppedEvent | None = None  # in GPTQ

    def report_estimate(self, on_event: OnEvent) -> None:
        """Emit the estimates of memory, disk and time. Raises DiskFull and OutOfMemory."""
        spec = self._source.spec
        output = None if self._budget is None else self.shape.header_bytes + self._budget
        most = output or estimate_gguf_bytes(spec, "Q8_0")
        needed, rounding_bytes = estimate_gguf_bytes(spec, "F16") + most, 0
        if self._by_gptq:
            rounding = estimate_resources(self.calibration.prepared, "gguf")
            rounding_bytes = rounding.peak_bytes
            # then llama.cpp's file, the rows for it, and activations
            needed = max(needed, 2 * most + 2 * rounding.states_bytes)
        free = self.calibration.free_disk_bytes() + self.calibration.work_folder.num_bytes
        if needed > free:
            raise DiskFull(
                f"{self.output} takes {format_size(needed)} while it is made, {format_size(free)} "
                "are free: make room, or give an --out on another disk"
            )
        self.calibration.report_estimate(on_event)
        probes = psutil.Process().memory_info().rss + self._probes.peak_bytes()
        self._estimated_bytes = max(probes, rounding_bytes, self.calibration.estimate.peak_bytes)
        on_event(
            EstimateEvent(
                model=self.calibration.model,
                description=f"types chosen by loss for {self.target}{self._describe_codes()}",
                output=str(self.output),
                source_bytes=self._source.size_bytes,
                output_bytes=output,
                states_bytes=0,
                memory_bytes=self._estimated_bytes,
                free_bytes=available_memory_bytes(),
                disk_bytes=needed,
                disk_free_bytes=free,
            )
        )
        if self._estimated_bytes > total_memory_bytes():
            what = "GPTQ takes" if self._estimated_bytes == rounding_bytes else "the probes take"
            raise OutOfMemory(
                f"{what} about {format_size(self._estimated_bytes)}, this machine has "
                f"{format_size(total_memory_bytes())}: use --gguf Q4_K_M instead"
            )

    def _describe_codes(self) -> str:
        if not self._by_gptq:
            return ""
        return f", codes by gptq{describe_learning(self.calibration.prepared.recipe)}"

    def _report_time(self, on_event: OnEvent) -> None:
        done, total = self._probes.num_done, self._probes.num_groups
        if done == total:
            return
        on_event(ProgressEvent("timing a group", 0, 1, "steps"))
        self._estimated_s = self._probes.estimate_s()
        on_event(ProgressEvent("timing a group", 1, 1, "steps"))
        groups = f"the other {total - done} of {total}" if done else str(total)
        on_event(
            NoteEvent(
                f"measuring {groups} groups of tensors on "
                f"{self._probes.num_probe_tokens:,} tokens takes about "
                f"{format_elapsed(self._estimated_s)}, after the importance matrix"
                + (" and before GPTQ" if self._by_gptq else "")
            )
        )

    def run(self, on_event: OnEvent, *, resume: bool) -> FinishedEvent:
        """Calibrate, measure all groups, choose the types and write the file.

        Emits the time of the probes first. Finished layers, groups and measured files survive any
        interruption; `resume` continues. Raises as QuantizeJob.run and make_gguf.
        """
        job = self.calibration
        self._report_time(on_event)
        with job.opened(on_event, resume=resume, stopped=self._stopped_event):
            job.run_layers(on_event)
            started_s = time.monotonic()
            losses = self._probes.run(on_event)
            self._probes_s = time.monotonic() - started_s
            self._options = {
                group.name: losses[group.name].options(group) for group in self.shape.groups
            }
            if self.target.kl is not None:
                written = self._write_within(self.target.kl, on_event)
            else:
                assert self._budget is not None
                budget = self._budget - self.shape.other_bytes
                written = self._write(fit_bytes(self._options, budget), on_event)
            written.replace(self.output)
            job.work_folder.remove()
        return FinishedEvent(str(self.output))

    def report_measured(self, kl: float, on_event: OnEvent) -> None:
        """Emit a note with the predicted and the measured KL divergence of the file, in nats."""
        on_event(
            NoteEvent(
                f"KL divergence: predicted {total_kl(self._mixture):.4f} on the calibration text"
                f"{' before GPTQ' if self._by_gptq else ''}, "
                f"measured {kl:.4f} on the evaluation text"
            )
        )

    def _write_within(self, max_kl: float, on_event: OnEvent) -> Path:
        """Write and measure candidates until one meets the target of loss, or all are tried;
        returns the best one."""
        folder = self.calibration.work_folder.path
        search = LossSearch(self._options, max_kl, folder / f"measured-{self.target.label}.json")
        while search.candidate is not None:
            kl = self._measure_kl(self._write(search.candidate, on_event), on_event)
            search.add(kl)
            another = "; a better size is tried" if search.candidate is not None else ""
            on_event(NoteEvent(f"KL divergence {kl:.4f} on the calibration text{another}"))
        best = search.best
        if best.mixture != self._mixture:
            self._write(best.mixture, on_event)
        if best.kl > max_kl:
            on_event(
                NoteEvent(
                    f"{self.target} is missed by the best of {len(search.measured)} files, with "
                    f"{best.kl:.4f}: give a larger --target-kl, or use --gguf F16"
                )
            )
        return self._candidate(best.mixture)

    def _candidate(self, mixture: Mixture) -> Path:
        """The file with these types, whole or absent, until it is the output."""
        types = sorted((name, option.type_name) for name, option in mixture.items())
        digest = zlib.crc32(repr(types).encode())
        return self.calibration.work_folder.path / f"candidate-{digest:08x}.gguf"

    def _write(self, mixture: Mixture, on_event: OnEvent) -> Path:
        """Write a candidate in place of others, unless it is there, and emit a MixtureEvent."""
        path = self._candidate(mixture)
        for other in path.parent.glob("candidate-*"):
            if not other.name.startswith(path.name):
                shutil.rmtree(other) if other.is_dir() else other.unlink()
        if not path.exists():
            write = self._write_by_gptq if self._by_gptq else self._make_file
            write(mixture, path, on_event)
        self._mixture = mixture
        on_event(self._mixture_event(path.stat().st_size))
        return path

    def _write_by_gptq(self, mixture: Mixture, path: Path, on_event: OnEvent) -> None:
        """Write a candidate whose codes GPTQ chooses; an interrupted one is continued."""
        job = self.calibration
        rounding = GgufRounding(
            self._source.spec,
            path.stem,
            unfinished_file(path),
            lambda to: self._make_file(mixture, to, on_event),
        )
        # for the estimates only
        bits = 4 if 8 * total_bytes(mixture) <= 4.5 * self.shape.num_weights else 8
        prepared = replace(job.prepared, recipe=replace(job.prepared.recipe, bits=bits))
        layers = QuantizeJob(job.model, prepared, path, mode="gguf", rounding=rounding)

        def report(event: QuantizeEvent) -> None:
            if isinstance(event, StoppedEvent):
                self._stopped = event  # emitted by run()
            else:
                on_event(event)

        layers.run(report, resume=True)
        layers.work_folder.remove()

    def _make_file(self, mixture: Mixture, path: Path, on_event: OnEvent) -> None:
        """Have llama.cpp write a file with these types. Raises LoadFailed if it is too large."""
        types = {
            tensor: mixture[group.name].type_name
            for group in self.shape.groups
            for tensor, _, _ in group.tensors
        }
        make_gguf(
            self._source.folder,
            path,
            _file_type(mixture),
            types=types,
            imatrix=self.calibration.input_importance(),
            dataset_name=self._windows.source,
            chunk_tokens=self._windows.ids.shape[1],
            on_event=on_event,
        )
        size, most = path.stat().st_size, self.target.size_bytes
        if most is not None and size > most:
            path.unlink()
            raise LoadFailed(f"the file has {size:,} bytes, more than the {most:,} asked for")

    def _mixture_event(self, size_bytes: int) -> MixtureEvent:
        types: dict[str, list[str]] = {}
        for group in self.shape.groups:
            types.setdefault(group.role, []).append(self._mixture[group.name].type_name)
        return MixtureEvent(
            target=str(self.target),
            size_bytes=size_bytes,
            predicted_kl=total_kl(self._mixture),
            by_gptq=self._by_gptq,
            types=types,
            probes_s=self._probes_s,
            estimated_s=self._estimated_s,
            peak_bytes=peak_memory_bytes(),
            estimated_bytes=self._estimated_bytes,
        )

    def _stopped_event(self) -> StoppedEvent | None:
        if self.calibration.work_folder.num_done_layers < self.calibration.num_layers:
            return None
        groups = self._probes.num_done, self._probes.num_groups
        if self._stopped is not None and self._stopped.can_resume:
            return self._stopped
        return StoppedEvent(*groups, "groups of tensors")


def prepare_mixed_job(
    request: QuantizeRequest, name: str, folder: Path, device: str, on_event: OnEvent
) -> MixedGgufJob:
    """Validate the request and emit its estimates. Raises as prepare_quantization,
    QuantizeJob.check_disk_space and MixedGgufJob."""
    assert request.target is not None
    assert request.recipe is not None
    require_unquantized(folder)
    spec = read_hf_config(folder)
    check_convertible(folder / "config.json", spec)
    by_gptq = request.mode == "gguf"
    shape = plan_file(folder, spec, GPTQ_LAYER_TYPES if by_gptq else WEIGHED_TYPES)
    prepared = prepare_quantization(folder, request.recipe, request.calibration, device)
    output = request.output or default_output(name, None, request.file_type)
    check_gguf_output(output)
    calibration = QuantizeJob(name, prepared, output, mode="observe")

    def measure_kl(path: Path, on_event: OnEvent) -> float:
        # not by the evaluation text, which must take no part in a choice
        text = request.calibration.path or CALIBRATION_TEXT
        choosing = EvalSet(text, seq_len=request.calibration.seq_len)
        models = [(name, folder), (output.name, path)]
        kl = evaluate_models(models, choosing, device, on_event).rows[-1].kl
        assert kl is not None
        return kl

    job = MixedGgufJob(request.target, shape, calibration, measure_kl)
    calibration.check_disk_space(resume=request.resume)
    job.report_estimate(on_event)
    report_window(spec, on_event)
    return job


def _tensor_budget(shape: FileShape, target: GgufTarget) -> int | None:
    """Most bytes of all tensors; None for a target of loss. Raises InvalidRequest for a size below
    that of the smallest file, or above that of the largest."""
    if target.kl is not None:
        return None
    least, most = (
        shape.other_bytes + sum(end(map(group.num_bytes, group.types)) for group in shape.groups)
        for end in (min, max)
    )
    if target.size_bytes is not None:
        header = shape.header_bytes
        if not header + least <= target.size_bytes <= header + most:
            raise InvalidRequest(
                f"--target-size: files of this model have {header + least:,} to {header + most:,} "
                f"bytes, not {target.size_bytes:,}",
                param="target-size",
            )
        return target.size_bytes - header
    assert target.bits_per_weight is not None
    budget = int(target.bits_per_weight * shape.num_weights / 8)
    if not least <= budget <= most:
        # bounds that are accepted themselves
        low = math.ceil(800 * least / shape.num_weights) / 100
        high = math.floor(800 * most / shape.num_weights) / 100
        found = f"{low:.2f} to {high:.2f}" if low <= high else f"about {high:.2f}"
        raise InvalidRequest(
            f"--target-bpw: files of this model have {found} bits per weight, "
            f"not {target.bits_per_weight:g}",
            param="target-bpw",
        )
    return budget


def _file_type(mixture: Mixture) -> str:
    """File type whose main weight type has most of the file, which llama.cpp shows for it."""
    sizes: Counter[str] = Counter()
    for option in mixture.values():
        sizes[option.type_name] += option.num_bytes
    most = max(sizes, key=lambda name: (sizes[name], name))
    if most in GGUF_TYPES:
        return most
    return next(name for name, kind in GGUF_TYPES.items() if kind.weight_type_name == most)
