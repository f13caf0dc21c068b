"""`localgen quantize --gguf TYPE`, with or without AWQ's scales folded in before."""

from __future__ import annotations

import shutil
from pathlib import Path

from localgen.backends.errors import DiskFull, InvalidRequest
from localgen.chats.report import size
from localgen.cli import quantize_run
from localgen.cli.quantize_report import Steps, tell
from localgen.quant.gguf_types import TYPES, type_name
from localgen.quant.job import Job
from localgen.quant.preflight import check_weights, prepare, refuse_quantized
from localgen.quant.recipe import Recipe
from localgen.quant.requantize import GgufProgress, Step, estimated_bytes, make_gguf
from localgen.quant.source import Source
from localgen.quantizing.asked import Asked

_WORDS: dict[Step, str] = {"converting": "converting to GGUF", "quantizing": "rounding"}


def make(asked: Asked, name: str, folder: Path, device: str) -> Path:
    """Write the file; where it is. Errors: as prepare, make_gguf and Job.run."""
    assert asked.gguf is not None
    file_type = type_name(asked.gguf)
    if TYPES[file_type].needs_importance and asked.recipe is None:
        raise InvalidRequest(
            f"{file_type} is garbage without an importance matrix: --calib builtin makes one, "
            "or use Q2_K, IQ3_S or more bits"
        )
    refuse_quantized(folder)
    source = Source(folder)
    out = asked.out or Path(f"{folder.resolve().name}-{file_type}.gguf")
    _check_out(out)
    needed = estimated_bytes(source.spec, file_type) + estimated_bytes(source.spec, "F16")
    if asked.mode == "fold":  # the folded layers
        needed += estimated_bytes(source.spec, "F16")
    free = shutil.disk_usage(out.absolute().parent).free
    if needed > free:
        raise DiskFull(
            f"{out} takes {size(needed)} while it is made, {size(free)} are free: make room, or "
            "give an --out on another disk"
        )
    tell(
        f"{name}: {file_type}, {size(source.size_bytes)} become about "
        f"{size(estimated_bytes(source.spec, file_type))}; up to {size(needed)} of disk meanwhile"
    )
    if asked.recipe is None:
        with Steps() as steps:
            check_weights(
                source, lambda done: steps.at("checking weights", done, source.size_bytes, "bytes")
            )
            make_gguf(folder, out, file_type, progress=_progress(steps))
        return out
    job = _folded(asked, asked.recipe, name, folder, out, device)
    windows = job.ready.windows
    with quantize_run.resumable(job), Steps() as steps:
        make_gguf(
            folder,
            out,
            file_type,
            changed=job.work.path,
            importance=job.importance(),
            dataset="" if windows is None else windows.source,
            progress=_progress(steps),
        )
    job.work.remove()
    return out


def _progress(steps: Steps) -> GgufProgress:
    def progress(step: Step, done: int, total: int) -> None:
        steps.at(_WORDS[step], done, total, "bytes" if step == "converting" else "tensors")

    return progress


def _folded(asked: Asked, recipe: Recipe, name: str, folder: Path, out: Path, device: str) -> Job:
    """What calibration leaves in the work folder of the job: importance, and folded layers."""
    ready = prepare(folder, recipe, asked.calibration, device)
    job = Job(name, ready, out, mode=asked.mode)
    job.check_room(resume=asked.resume)
    quantize_run.state_needs(job, name)
    quantize_run.run(job, asked.resume)
    return job


def _check_out(out: Path) -> None:
    if out.suffix.lower() != ".gguf":
        raise InvalidRequest(f"--out {out}: a GGUF file's name ends in .gguf", param="out")
    if out.exists():
        raise InvalidRequest(f"{out} is there already: remove it, or give another --out")
    if not out.absolute().parent.is_dir():
        raise InvalidRequest(f"--out {out}: there is no folder {out.parent}", param="out")
