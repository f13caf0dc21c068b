"""Making a GGUF file, with or without AWQ's scales folded in before."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from localgen.backends.errors import DiskFull, InvalidRequest
from localgen.backends.memory.system import available_bytes
from localgen.backends.units import size
from localgen.quant import layerwise_run
from localgen.quant.events import At, Made, Needs, Tell
from localgen.quant.files.layerwise_checkpoint import Source
from localgen.quant.gguf.requantize import GgufProgress, Step, estimated_bytes, make_gguf
from localgen.quant.job import Job
from localgen.quant.preflight import check_weights, prepare, refuse_quantized
from localgen.quant.request.gguf_types import TYPES, type_name
from localgen.quant.request.request import Asked, usual_out

_WORDS: dict[Step, str] = {"converting": "converting to GGUF", "quantizing": "rounding"}


@dataclass(frozen=True, slots=True, eq=False)
class GgufPlan:
    """A file that can be made. job: what calibrates it before; None: nothing."""

    source: Source
    out: Path
    file_type: str
    job: Job | None


def plan(asked: Asked, name: str, folder: Path, device: str, tell: Tell) -> GgufPlan:
    """Refuse what can be refused beforehand, and tell what it takes. Errors: as prepare and
    Job.check_room."""
    assert asked.gguf is not None
    file_type = type_name(asked.gguf)
    if TYPES[file_type].needs_importance and asked.recipe is None:
        raise InvalidRequest(
            f"{file_type} is garbage without an importance matrix: --calib builtin makes one, "
            "or use Q2_K, IQ3_S or more bits"
        )
    refuse_quantized(folder)
    source = Source(folder)
    out = asked.out or usual_out(name, None, file_type)
    _check_out(out)
    _tell_needs(asked, name, source, out, file_type, tell)
    job = None
    if asked.recipe is not None:
        few = TYPES[file_type].bits < 4
        recipe = replace(asked.recipe, bits=3 if few else 4)
        ready = prepare(folder, recipe, asked.calibration, device)
        job = Job(name, ready, out, mode=asked.mode)
        job.check_room(resume=asked.resume)
        layerwise_run.tell_needs(job, tell)
    return GgufPlan(source, out, file_type, job)


def make(plan: GgufPlan, tell: Tell, *, resume: bool) -> Path:
    """Write the file; where it is. Errors: as make_gguf and Job.run."""
    folder, job = plan.source.folder, plan.job
    if job is None:
        total = plan.source.size_bytes
        check_weights(plan.source, lambda done: tell(At("checking weights", done, total, "bytes")))
        make_gguf(folder, plan.out, plan.file_type, progress=_progress(tell))
    else:
        layerwise_run.run(job, tell, resume=resume)
        windows = job.ready.windows
        with layerwise_run.resumable(job, tell):
            make_gguf(
                folder,
                plan.out,
                plan.file_type,
                changed=job.work.path,
                importance=job.importance(),
                dataset="" if windows is None else windows.source,
                progress=_progress(tell),
            )
        job.work.remove()
    tell(Made(str(plan.out)))
    return plan.out


def _tell_needs(
    asked: Asked, name: str, source: Source, out: Path, file_type: str, tell: Tell
) -> None:
    """DiskFull: it does not fit."""
    result, half = estimated_bytes(source.spec, file_type), estimated_bytes(source.spec, "F16")
    needed = result + half
    if asked.mode == "fold":  # the folded layers
        needed += half
    free = shutil.disk_usage(out.absolute().parent).free
    if needed > free:
        raise DiskFull(
            f"{out} takes {size(needed)} while it is made, {size(free)} are free: make room, or "
            "give an --out on another disk"
        )
    tell(
        Needs(
            model=name,
            what=file_type,
            out=str(out),
            source_bytes=source.size_bytes,
            output_bytes=result,
            states_bytes=0,
            memory_bytes=None,
            free_bytes=available_bytes(),
            disk_bytes=needed,
            disk_free_bytes=free,
        )
    )


def _progress(tell: Tell) -> GgufProgress:
    def progress(step: Step, done: int, total: int) -> None:
        tell(At(_WORDS[step], done, total, "bytes" if step == "converting" else "tensors"))

    return progress


def _check_out(out: Path) -> None:
    if out.suffix.lower() != ".gguf":
        raise InvalidRequest(f"--out {out}: a GGUF file's name ends in .gguf", param="out")
    if out.exists():
        raise InvalidRequest(f"{out} is there already: remove it, or give another --out")
    if not out.absolute().parent.is_dir():
        raise InvalidRequest(f"--out {out}: there is no folder {out.parent}", param="out")
