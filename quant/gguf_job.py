"""Making a GGUF file, with or without AWQ's scales folded in before."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from localgen.backends.errors import DiskFull, InvalidRequest
from localgen.backends.memory.system import available_memory_bytes
from localgen.backends.units import format_size
from localgen.quant import layerwise_run
from localgen.quant.events import EstimateEvent, FinishedEvent, OnEvent, ProgressEvent
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.gguf.requantize import GgufProgress, GgufStep, estimate_gguf_bytes, make_gguf
from localgen.quant.job import QuantizeJob
from localgen.quant.preflight import (
    check_finite_and_checksum,
    prepare_quantization,
    require_unquantized,
)
from localgen.quant.request.gguf_types import GGUF_TYPES, resolve_gguf_type
from localgen.quant.request.request import QuantizeRequest, default_output

_STEP_NAMES: dict[GgufStep, str] = {"converting": "converting to GGUF", "quantizing": "rounding"}


@dataclass(frozen=True, slots=True, eq=False)
class GgufJob:
    """A file that can be made. calibration_job: what calibrates it before; None: nothing."""

    source: LayerwiseCheckpoint
    output: Path
    file_type: str
    calibration_job: QuantizeJob | None


def prepare_gguf_job(
    request: QuantizeRequest, name: str, folder: Path, device: str, on_event: OnEvent
) -> GgufJob:
    """Refuse what can be refused beforehand, and tell what it takes. Errors: as
    prepare_quantization and QuantizeJob.check_disk_space."""
    assert request.gguf is not None
    file_type = resolve_gguf_type(request.gguf)
    if GGUF_TYPES[file_type].needs_imatrix and request.recipe is None:
        raise InvalidRequest(
            f"{file_type} is garbage without an importance matrix: --calib builtin makes one, "
            "or use Q2_K, IQ3_S or more bits"
        )
    require_unquantized(folder)
    source = LayerwiseCheckpoint(folder)
    out = request.output or default_output(name, None, file_type)
    _check_output(out)
    _report_estimate(request, name, source, out, file_type, on_event)
    job = None
    if request.recipe is not None:
        few = GGUF_TYPES[file_type].bits_per_weight < 4
        recipe = replace(request.recipe, bits=3 if few else 4)
        ready = prepare_quantization(folder, recipe, request.calibration, device)
        job = QuantizeJob(name, ready, out, mode=request.mode)
        job.check_disk_space(resume=request.resume)
        layerwise_run.report_estimate(job, on_event)
    return GgufJob(source, out, file_type, job)


def run_gguf_job(gguf_job: GgufJob, on_event: OnEvent, *, resume: bool) -> Path:
    """Write the file; where it is. Errors: as make_gguf and QuantizeJob.run."""
    folder, job = gguf_job.source.folder, gguf_job.calibration_job
    if job is None:
        total = gguf_job.source.size_bytes
        check_finite_and_checksum(
            gguf_job.source,
            lambda done: on_event(ProgressEvent("checking weights", done, total, "bytes")),
        )
        make_gguf(folder, gguf_job.output, gguf_job.file_type, progress=_step_progress(on_event))
    else:
        layerwise_run.run_job(job, on_event, resume=resume)
        windows = job.prepared.windows
        with layerwise_run.reporting_interruption(job, on_event):
            make_gguf(
                folder,
                gguf_job.output,
                gguf_job.file_type,
                override_folder=job.work_folder.path,
                imatrix=job.input_importance(),
                dataset_name="" if windows is None else windows.source,
                progress=_step_progress(on_event),
            )
        job.work_folder.remove()
    on_event(FinishedEvent(str(gguf_job.output)))
    return gguf_job.output


def _report_estimate(
    request: QuantizeRequest,
    name: str,
    source: LayerwiseCheckpoint,
    out: Path,
    file_type: str,
    on_event: OnEvent,
) -> None:
    """DiskFull: it does not fit."""
    result, half = (
        estimate_gguf_bytes(source.spec, file_type),
        estimate_gguf_bytes(source.spec, "F16"),
    )
    needed = result + half
    if request.mode == "fold":  # the folded layers
        needed += half
    free = shutil.disk_usage(out.absolute().parent).free
    if needed > free:
        raise DiskFull(
            f"{out} takes {format_size(needed)} while it is made, {format_size(free)} are free: "
            "make room, or give an --out on another disk"
        )
    on_event(
        EstimateEvent(
            model=name,
            description=file_type,
            output=str(out),
            source_bytes=source.size_bytes,
            output_bytes=result,
            states_bytes=0,
            memory_bytes=None,
            free_bytes=available_memory_bytes(),
            disk_bytes=needed,
            disk_free_bytes=free,
        )
    )


def _step_progress(on_event: OnEvent) -> GgufProgress:
    def progress(step: GgufStep, done: int, total: int) -> None:
        on_event(
            ProgressEvent(
                _STEP_NAMES[step], done, total, "bytes" if step == "converting" else "tensors"
            )
        )

    return progress


def _check_output(out: Path) -> None:
    if out.suffix.lower() != ".gguf":
        raise InvalidRequest(f"--out {out}: a GGUF file's name ends in .gguf", param="out")
    if out.exists():
        raise InvalidRequest(f"{out} is there already: remove it, or give another --out")
    if not out.absolute().parent.is_dir():
        raise InvalidRequest(f"--out {out}: there is no folder {out.parent}", param="out")
