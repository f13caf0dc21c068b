"""One run of a streamed job: what it will take, how far it is, what it took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from localgen.backends.cuda.model.dequantize import dequantization_notes
from localgen.backends.errors import OutOfMemory
from localgen.backends.formats.hf.config import read_hf_config
from localgen.backends.memory.system import (
    available_memory_bytes,
    peak_memory_bytes,
    total_memory_bytes,
)
from localgen.backends.units import format_size
from localgen.placement.backend_choice import detect_hardware
from localgen.quant.card import describe_recipe
from localgen.quant.events import (
    EstimateEvent,
    FinishedEvent,
    NoteEvent,
    OnEvent,
    ProgressEvent,
    StoppedEvent,
    UnfinishedEvent,
)
from localgen.quant.job import QuantizeJob, QuantizeProgress, QuantizeResult

_MODE_DESCRIPTIONS = {
    "fold": "awq's scales folded in, and what llama.cpp is to weigh inputs by",
    "observe": "what llama.cpp is to weigh inputs by",
}


def report_estimate(job: QuantizeJob, on_event: OnEvent) -> None:
    """What it will take. OutOfMemory: more than this machine has."""
    estimate, ready = job.estimate, job.prepared
    on_event(
        EstimateEvent(
            model=job.model,
            description=_MODE_DESCRIPTIONS.get(job.mode) or describe_recipe(ready.recipe),
            output=str(job.work_folder.out),
            source_bytes=ready.source.size_bytes,
            output_bytes=estimate.output_bytes if job.mode == "round" else None,
            states_bytes=estimate.states_bytes,
            memory_bytes=estimate.peak_bytes,
            free_bytes=available_memory_bytes(),
            disk_bytes=estimate.disk_bytes,
            disk_free_bytes=job.free_disk_bytes(),
        )
    )
    if estimate.peak_bytes > total_memory_bytes():
        raise OutOfMemory(
            f"one layer with its statistics takes about {format_size(estimate.peak_bytes)}, "
            f"this machine has {format_size(total_memory_bytes())}: "
            "--rtn or --fp8 need less, or a smaller --seq-len"
        )


def report_unfinished(job: QuantizeJob, on_event: OnEvent) -> None:
    """Of a run that could be gone on with. InvalidRequest: of one that cannot."""
    if job.has_resumable_run():
        on_event(
            UnfinishedEvent(job.work_folder.num_done_layers, job.prepared.source.spec.num_layers)
        )


def report_result(job: QuantizeJob, outcome: QuantizeResult, on_event: OnEvent) -> None:
    """What it took, and where the result runs."""
    on_event(
        FinishedEvent(
            str(outcome.folder),
            outcome.num_layers,
            outcome.num_resumed,
            outcome.seconds,
            outcome.layer_s,
            peak_memory_bytes(),
            job.estimate.peak_bytes,
        )
    )
    why_not = detect_hardware().cuda_unavailable_reason
    if why_not is not None:
        on_event(
            NoteEvent(
                f"it runs on GPUs ({why_not} here); --backend cuda --device cpu runs it slowly"
            )
        )
    spec = read_hf_config(outcome.folder)
    for note in dequantization_notes(spec.quant, has_experts=spec.moe is not None):
        on_event(NoteEvent(f"in localgen's engine {note}"))


def run_job(job: QuantizeJob, on_event: OnEvent, *, resume: bool) -> QuantizeResult:
    """Do it. OutOfMemory: the GPU's is full; else as QuantizeJob.run."""
    doing = "quantizing" if job.mode == "round" else "calibrating"

    def on_progress(progress: QuantizeProgress) -> None:
        if progress.stage == "checking":
            on_event(ProgressEvent("checking weights", progress.done, progress.total, "bytes"))
        else:
            on_event(ProgressEvent(doing, progress.done, progress.total, "layers"))

    with reporting_interruption(job, on_event):
        return job.run(resume=resume, on_progress=on_progress)


@contextmanager
def reporting_interruption(job: QuantizeJob, on_event: OnEvent) -> Iterator[None]:
    """Tells how much is done where Ctrl+C ends it. OutOfMemory: the GPU's is full."""
    try:
        yield
    except KeyboardInterrupt:
        if job.work_folder.path.exists():
            on_event(
                StoppedEvent(job.work_folder.num_done_layers, job.prepared.source.spec.num_layers)
            )
        raise
    except torch.OutOfMemoryError:
        raise OutOfMemory(
            "the GPU's memory is full: --device cpu, or fewer tokens at once with --seq-len; "
            f"--resume goes on after {job.work_folder.num_done_layers} layers"
        ) from None
