"""One run of a streamed job: what it will take, how far it is, what it took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from localgen.backends.cuda.model.dequantize import notes
from localgen.backends.errors import OutOfMemory
from localgen.backends.formats.hf.config import read_config
from localgen.backends.memory.system import available_bytes, peak_bytes, total_bytes
from localgen.backends.units import size
from localgen.placement.backend_choice import this_machine
from localgen.quant.card import in_words
from localgen.quant.events import At, Made, Needs, Note, Stopped, Tell, Unfinished
from localgen.quant.job import Job, Outcome, Progress

_WHAT = {
    "fold": "awq's scales folded in, and what llama.cpp is to weigh inputs by",
    "observe": "what llama.cpp is to weigh inputs by",
}


def tell_needs(job: Job, tell: Tell) -> None:
    """What it will take. OutOfMemory: more than this machine has."""
    estimate, ready = job.estimate, job.ready
    tell(
        Needs(
            model=job.model,
            what=_WHAT.get(job.mode) or in_words(ready.recipe),
            out=str(job.work.out),
            source_bytes=ready.source.size_bytes,
            output_bytes=estimate.output_bytes if job.mode == "round" else None,
            states_bytes=estimate.states_bytes,
            memory_bytes=estimate.peak_bytes,
            free_bytes=available_bytes(),
            disk_bytes=estimate.disk_bytes,
            disk_free_bytes=job.free_bytes(),
        )
    )
    if estimate.peak_bytes > total_bytes():
        raise OutOfMemory(
            f"one layer with its statistics takes about {size(estimate.peak_bytes)}, this machine "
            f"has {size(total_bytes())}: --rtn or --fp8 need less, or a smaller --seq-len"
        )


def tell_unfinished(job: Job, tell: Tell) -> None:
    """Of a run that could be gone on with. InvalidRequest: of one that cannot."""
    if job.begun():
        tell(Unfinished(job.work.done, job.ready.source.spec.layers))


def tell_made(job: Job, outcome: Outcome, tell: Tell) -> None:
    """What it took, and where the result runs."""
    tell(
        Made(
            str(outcome.folder),
            outcome.layers,
            outcome.resumed,
            outcome.seconds,
            outcome.layer_s,
            peak_bytes(),
            job.estimate.peak_bytes,
        )
    )
    why_not = this_machine().why_no_cuda
    if why_not is not None:
        tell(Note(f"it runs on GPUs ({why_not} here); --backend cuda --device cpu runs it slowly"))
    spec = read_config(outcome.folder)
    for note in notes(spec.quant, experts=spec.moe is not None):
        tell(Note(f"in localgen's engine {note}"))


def run(job: Job, tell: Tell, *, resume: bool) -> Outcome:
    """Do it. OutOfMemory: the GPU's is full; else as Job.run."""
    doing = "quantizing" if job.mode == "round" else "calibrating"

    def on_progress(progress: Progress) -> None:
        if progress.stage == "checking":
            tell(At("checking weights", progress.done, progress.total, "bytes"))
        else:
            tell(At(doing, progress.done, progress.total, "layers"))

    with resumable(job, tell):
        return job.run(resume=resume, on_progress=on_progress)


@contextmanager
def resumable(job: Job, tell: Tell) -> Iterator[None]:
    """Tells how much is done where Ctrl+C ends it. OutOfMemory: the GPU's is full."""
    try:
        yield
    except KeyboardInterrupt:
        if job.work.path.exists():
            tell(Stopped(job.work.done, job.ready.source.spec.layers))
        raise
    except torch.OutOfMemoryError:
        raise OutOfMemory(
            "the GPU's memory is full: --device cpu, or fewer tokens at once with --seq-len; "
            f"--resume goes on after {job.work.done} layers"
        ) from None
