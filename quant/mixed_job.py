"""MixedGgufJob: a GGUF file with the type of each tensor chosen by measured loss."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
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
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.gguf.metadata import check_convertible
from localgen.quant.gguf.requantize import estimate_gguf_bytes, make_gguf
from localgen.quant.gguf_job import check_gguf_output, report_window
from localgen.quant.job import QuantizeJob
from localgen.quant.mixed.groups import FileShape, plan_file
from localgen.quant.mixed.search import (
    Mixture,
    Options,
    fit_bytes,
    fit_kl,
    total_bytes,
    total_kl,
)
from localgen.quant.mixed.sensitivity import SensitivityProbes
from localgen.quant.preflight import prepare_quantization, require_unquantized
from localgen.quant.request.events import (
    EstimateEvent,
    FinishedEvent,
    MixtureEvent,
    NoteEvent,
    OnEvent,
    StoppedEvent,
)
from localgen.quant.request.gguf_types import GGUF_TYPES
from localgen.quant.request.request import QuantizeRequest, default_output
from localgen.quant.request.target import AUTO, GgufTarget

# files measured for one target of loss; each takes a quantization and an evaluation
_MAX_FILES = 3
# a measured loss from here to the target is close enough
_CLOSE = 0.9
# the next file aims at this part of the target
_AIM = 0.96


@dataclass(frozen=True, slots=True)
class _MeasuredFile:
    mixture: Mixture
    kl: float


class MixedGgufJob:
    """calibration: in mode `observe`, with the output of this job."""

    def __init__(self, target: GgufTarget, shape: FileShape, calibration: QuantizeJob) -> None:
        """Raises InvalidRequest if no file is as small as the target."""
        prepared = calibration.prepared
        self.target, self.calibration = target, calibration
        self.output = calibration.work_folder.out
        self._source: LayerwiseCheckpoint = prepared.source
        self.shape = shape
        self._budget = _tensor_budget(self.shape, target)
        assert prepared.windows is not None
        self._windows = prepared.windows
        self._probes = SensitivityProbes(
            self._source,
            self.shape.groups,
            self._windows.ids,
            calibration.work_folder,
            prepared.device,
        )
        self._options: Options = {}
        self._mixture: Mixture = {}
        self._measured: list[_MeasuredFile] = []
        self._estimated_bytes = 0
        self._estimated_s = self._probes_s = 0.0

    def report_estimate(self, on_event: OnEvent) -> None:
        """Emit the estimates of memory, disk and time. Raises DiskFull and OutOfMemory."""
        spec = self._source.spec
        output = None if self._budget is None else self.shape.header_bytes + self._budget
        needed = estimate_gguf_bytes(spec, "F16") + (output or estimate_gguf_bytes(spec, "Q8_0"))
        free = self.calibration.free_disk_bytes()
        if needed > free:
            raise DiskFull(
                f"{self.output} takes {format_size(needed)} while it is made, {format_size(free)} "
                "are free: make room, or give an --out on another disk"
            )
        self.calibration.report_estimate(on_event)
        probes = psutil.Process().memory_info().rss + self._probes.peak_bytes()
        self._estimated_bytes = max(probes, self.calibration.estimate.peak_bytes)
        on_event(
            EstimateEvent(
                model=self.calibration.model,
                description=f"types chosen by loss for {self.target}",
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
            raise OutOfMemory(
                f"the probes take about {format_size(self._estimated_bytes)}, this machine has "
                f"{format_size(total_memory_bytes())}: use a type instead, such as --gguf Q4_K_M"
            )
        self._report_time(on_event)

    def _report_time(self, on_event: OnEvent) -> None:
        self._estimated_s, pass_s = self._probes.estimate_s()
        passes = 2 * self._source.spec.num_layers  # once for the statistics
        calibration_s = passes * pass_s * self._windows.ids.numel() / self._probes.num_probe_tokens
        on_event(
            NoteEvent(
                f"about {format_elapsed(calibration_s)} for the importance matrix and "
                f"{format_elapsed(self._estimated_s)} to measure {self._probes.num_groups} groups "
                f"of tensors on {self._probes.num_probe_tokens:,} tokens"
            )
        )

    def run(self, on_event: OnEvent, *, resume: bool) -> FinishedEvent:
        """Calibrate, measure all groups, choose the types and write the file.

        Finished layers and groups survive any interruption; `resume` continues. Raises as
        QuantizeJob.run and make_gguf.
        """
        job = self.calibration
        job.run(on_event, resume=resume)
        started_s = time.monotonic()
        with job.reporting_interruption(on_event, self._stopped_event):
            losses = self._probes.run(on_event)
            self._probes_s = time.monotonic() - started_s
            self._options = {
                group.name: losses[group.name].options(group) for group in self.shape.groups
            }
            self._mixture = self._choose_mixture(self.target.kl)
            self._write(on_event)
        on_event(self._mixture_event())
        if self.target.kl is None:
            job.work_folder.remove()
        return FinishedEvent(str(self.output))

    def report_measured(self, kl: float, on_event: OnEvent) -> None:
        """Emit the loss of the file on the evaluation text beside the prediction."""
        on_event(
            NoteEvent(
                f"KL divergence: predicted {total_kl(self._mixture):.4f} on the calibration text, "
                f"measured {kl:.4f} on the evaluation text"
            )
        )

    def correct(self, measured_kl: float, on_event: OnEvent) -> bool:
        """Compare the measured loss of the file with the target of loss, and write another file if
        it is worthwhile. Returns True if the file is to be measured again."""
        assert self.target.kl is not None
        self._measured.append(_MeasuredFile(self._mixture, measured_kl))
        following = self._next_mixture(self.target.kl)
        if following is not None:
            self._mixture = following
            self._write(on_event)
            on_event(self._mixture_event())
            return True
        self.calibration.work_folder.remove()
        if measured_kl > self.target.kl:
            on_event(
                NoteEvent(
                    f"{self.target} is missed: this is the best of {len(self._measured)} files; "
                    "give a larger --target-kl, or use --gguf Q8_0"
                )
            )
        return False

    def _next_mixture(self, target: float) -> Mixture | None:
        """Mixture of the next file; None to keep the current one."""
        last = self._measured[-1]
        met = [one for one in self._measured if one.kl <= target]
        best = min(met, key=lambda one: total_bytes(one.mixture), default=None)
        if best is None:
            best = min(self._measured, key=lambda one: one.kl)
        if len(self._measured) < _MAX_FILES and not _CLOSE * target <= last.kl <= target:
            limit = total_kl(last.mixture) * _AIM * target / last.kl
            following = self._choose_mixture(limit)
            known = [one.mixture for one in self._measured]
            if following not in known:
                return following
        return None if best.mixture == last.mixture else best.mixture

    def _choose_mixture(self, max_kl: float | None) -> Mixture:
        if max_kl is not None:
            return fit_kl(self._options, max_kl)
        assert self._budget is not None
        return fit_bytes(self._options, self._budget - self.shape.other_bytes)

    def _write(self, on_event: OnEvent) -> None:
        types = {
            tensor: self._mixture[group.name].type_name
            for group in self.shape.groups
            for tensor, _, _ in group.tensors
        }
        make_gguf(
            self._source.folder,
            self.output,
            _file_type(self._mixture),
            types=types,
            imatrix=self.calibration.input_importance(),
            dataset_name=self._windows.source,
            chunk_tokens=self._windows.ids.shape[1],
            on_event=on_event,
        )
        size, most = self.output.stat().st_size, self.target.size_bytes
        if most is not None and size > most:
            raise LoadFailed(f"{self.output} has {size:,} bytes, more than the {most:,} asked for")

    def _mixture_event(self) -> MixtureEvent:
        types: dict[str, list[str]] = {}
        for group in self.shape.groups:
            types.setdefault(group.role, []).append(self._mixture[group.name].type_name)
        return MixtureEvent(
            target=str(self.target),
            size_bytes=self.output.stat().st_size,
            predicted_kl=total_kl(self._mixture),
            types=types,
            probes_s=self._probes_s,
            estimated_s=self._estimated_s,
            peak_bytes=peak_memory_bytes(),
            estimated_bytes=self._estimated_bytes,
        )

    def _stopped_event(self) -> StoppedEvent:
        return StoppedEvent(self._probes.num_done, self._probes.num_groups, "groups of tensors")


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
    shape = plan_file(folder, spec)
    prepared = prepare_quantization(folder, request.recipe, request.calibration, device)
    output = request.output or default_output(name, None, f"{AUTO}-{request.target.label}")
    check_gguf_output(output)
    calibration = QuantizeJob(name, prepared, output, mode=request.mode)
    job = MixedGgufJob(request.target, shape, calibration)
    calibration.check_disk_space(resume=request.resume)
    job.report_estimate(on_event)
    report_window(spec, on_event)
    return job


def _tensor_budget(shape: FileShape, target: GgufTarget) -> int | None:
    """Most bytes of all tensors; None for a target of loss. Raises InvalidRequest if no file is as
    small."""
    if target.kl is not None:
        return None
    least = shape.other_bytes + sum(
        min(map(group.num_bytes, group.types)) for group in shape.groups
    )
    if target.size_bytes is not None:
        header = shape.header_bytes
        if target.size_bytes < header + least:
            raise InvalidRequest(
                f"--target-size: the smallest file of this model has {header + least:,} bytes, "
                f"{target.size_bytes:,} are too few",
                param="target-size",
            )
        return target.size_bytes - header
    assert target.bits_per_weight is not None
    budget = int(target.bits_per_weight * shape.num_weights / 8)
    if budget < least:
        raise InvalidRequest(
            f"--target-bpw: the smallest file of this model has {8 * least / shape.num_weights:.2f}"
            f" bits per weight, {target.bits_per_weight:g} are too few",
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
