"""GgufJob: a model written as a GGUF file, optionally calibrated by a QuantizeJob first."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from localgen.backends.errors import DiskFull, InvalidRequest
from localgen.backends.formats.architecture.llama_cpp_windows import spec_window_note
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.memory.system import available_memory_bytes
from localgen.backends.units import format_size
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.files.work_folder import WorkFolder, require_parent_folder
from localgen.quant.gguf.code_bits import num_bits
from localgen.quant.gguf.gptq_rounding import GgufRounding
from localgen.quant.gguf.imatrix import gptq_imatrix_keys
from localgen.quant.gguf.requantize import estimate_gguf_bytes, make_gguf
from localgen.quant.job import QuantizeJob
from localgen.quant.preflight import (
    check_finite_and_checksum,
    prepare_quantization,
    require_unquantized,
)
from localgen.quant.request.events import EstimateEvent, FinishedEvent, NoteEvent, OnEvent
from localgen.quant.request.gguf_types import GGUF_TYPES, GPTQ_TYPES, resolve_gguf_type
from localgen.quant.request.request import QuantizeRequest, default_output


@dataclass(frozen=True, slots=True, eq=False)
class GgufJob:
    """calibration: None for a file without calibration; in mode `gguf` it writes the file."""

    source: LayerwiseCheckpoint
    output: Path
    file_type: str
    calibration: QuantizeJob | None

    def run(self, on_event: OnEvent, *, resume: bool) -> FinishedEvent:
        """Write the file. Raises as make_gguf and QuantizeJob.run."""
        folder, job = self.source.folder, self.calibration
        if job is None:
            check_finite_and_checksum(self.source, on_event)
            make_gguf(folder, self.output, self.file_type, on_event=on_event)
            return FinishedEvent(str(self.output))
        with job.opened(on_event, resume=resume):
            finished = job.run_layers(on_event)
            if job.mode != "gguf":
                finished = FinishedEvent(str(self.output))
                windows = job.prepared.windows
                make_gguf(
                    folder,
                    self.output,
                    self.file_type,
                    override_folder=job.work_folder.path,
                    imatrix=job.input_importance(),
                    dataset_name="" if windows is None else windows.source,
                    chunk_tokens=None if windows is None else windows.ids.shape[1],
                    on_event=on_event,
                )
            job.work_folder.remove()
        return finished


def prepare_gguf_job(
    request: QuantizeRequest, name: str, folder: Path, device: str, on_event: OnEvent
) -> GgufJob:
    """Validate the request and emit its estimates. Raises as prepare_quantization and
    QuantizeJob.check_disk_space."""
    assert request.gguf is not None
    file_type = resolve_gguf_type(request.gguf)
    if GGUF_TYPES[file_type].needs_imatrix and request.recipe is None:
        raise InvalidRequest(
            f"{file_type} needs an importance matrix: add --calib builtin, "
            "or use Q2_K, IQ3_S or more bits"
        )
    if request.mode == "gguf" and file_type not in GPTQ_TYPES:
        raise InvalidRequest(
            f"--gptq cannot choose the codes of {file_type}: use --calib or --awq with it, "
            f"or one of {', '.join(GPTQ_TYPES)}",
            param="type",
        )
    require_unquantized(folder)
    source = LayerwiseCheckpoint(folder)
    output = request.output or default_output(name, None, request.file_type)
    check_gguf_output(output)
    job = GgufJob(source, output, file_type, None)
    # the folded layers take as much as the 16-bit file; that of an unfinished run is made already
    num_wide_copies = 2 if request.mode == "fold" else 0 if unfinished_file(output).exists() else 1
    _report_estimate(job, name, on_event, num_wide_copies=num_wide_copies)
    report_window(source.spec, on_event)
    if request.recipe is None:
        return job
    if request.mode == "gguf":
        return _with_gptq(job, request, name, device, on_event)
    few = GGUF_TYPES[file_type].bits_per_weight < 4
    recipe = replace(request.recipe, bits=3 if few else 4)
    prepared = prepare_quantization(folder, recipe, request.calibration, device)
    calibration = QuantizeJob(name, prepared, output, mode=request.mode)
    calibration.check_disk_space(resume=request.resume)
    calibration.report_estimate(on_event)
    return replace(job, calibration=calibration)


def _with_gptq(
    job: GgufJob, request: QuantizeRequest, name: str, device: str, on_event: OnEvent
) -> GgufJob:
    """The job with layers rounded by GPTQ. Raises as prepare_gguf_job."""
    assert request.recipe is not None
    bits = num_bits(GGUF_TYPES[job.file_type].weight_type_name)
    # for the estimates only
    recipe = replace(request.recipe, bits=4 if bits <= 4 else 8)
    folder = job.source.folder
    prepared = prepare_quantization(folder, recipe, request.calibration, device)
    windows = prepared.windows
    assert windows is not None
    keys = gptq_imatrix_keys(job.source.spec, windows.source, len(windows.ids))

    def make_file(path: Path) -> None:
        make_gguf(folder, path, job.file_type, extra_keys=keys, on_event=on_event)

    unfinished = unfinished_file(job.output)
    rounding = GgufRounding(job.source.spec, job.file_type, unfinished, make_file)
    layers = QuantizeJob(name, prepared, job.output, mode="gguf", rounding=rounding)
    layers.check_disk_space(resume=request.resume)
    layers.report_estimate(on_event)
    return replace(job, calibration=layers)


def unfinished_file(output: Path) -> Path:
    """llama.cpp's file, whose codes GPTQ is to replace."""
    return WorkFolder(output, 0).path / "llama.cpp.gguf"


def report_window(spec: ModelSpec, on_event: OnEvent) -> None:
    """Emit a note if llama.cpp leaves out the model's sliding window."""
    if (note := spec_window_note(spec)) is not None:
        on_event(NoteEvent(note))


def _report_estimate(job: GgufJob, name: str, on_event: OnEvent, *, num_wide_copies: int) -> None:
    """Emit an EstimateEvent. Raises DiskFull if the files do not fit."""
    spec = job.source.spec
    result = estimate_gguf_bytes(spec, job.file_type)
    needed = result + num_wide_copies * estimate_gguf_bytes(spec, "F16")
    free = shutil.disk_usage(job.output.absolute().parent).free
    if needed > free:
        raise DiskFull(
            f"{job.output} takes {format_size(needed)} while it is made, {format_size(free)} are "
            "free: make room, or give an --out on another disk"
        )
    on_event(
        EstimateEvent(
            model=name,
            description=job.file_type,
            output=str(job.output),
            source_bytes=job.source.size_bytes,
            output_bytes=result,
            states_bytes=0,
            memory_bytes=None,
            free_bytes=available_memory_bytes(),
            disk_bytes=needed,
            disk_free_bytes=free,
        )
    )


def check_gguf_output(out: Path) -> None:
    """Raise InvalidRequest if a GGUF file cannot be written there."""
    if out.suffix.lower() != ".gguf":
        raise InvalidRequest(f"--out {out}: a GGUF file's name ends in .gguf", param="out")
    if out.exists():
        raise InvalidRequest(f"{out} already exists: remove it, or give another --out")
    require_parent_folder(out)
