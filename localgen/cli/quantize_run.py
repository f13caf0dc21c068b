"""One run of a streamed job: what it will take, how far it is, what it took."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from localgen.backends.cuda.spec import read_config
from localgen.backends.cuda.widening import notes
from localgen.backends.errors import OutOfMemory
from localgen.backends.memory.available import available_bytes, total_bytes
from localgen.chats.report import size
from localgen.cli import quantize_report
from localgen.cli.quantize_report import Steps, tell
from localgen.placement import this_machine
from localgen.quant.card import in_words
from localgen.quant.job import Job, Outcome, Progress


def state_needs(job: Job, name: str) -> None:
    """What it will take. OutOfMemory: more than this machine has."""
    estimate, ready = job.estimate, job.ready
    states = estimate.states_bytes
    where = f", activations of {size(states)} on disk" if states else ""
    match job.mode:
        case "round":
            what = f"{in_words(ready.recipe)}, {size(ready.source.size_bytes)} become about "
            what += size(estimate.output_bytes)
        case "fold":
            what = "awq's scales folded in, and what llama.cpp is to weigh inputs by"
        case "observe":
            what = "what llama.cpp is to weigh inputs by"
    tell(f"{name}: {what}{where}")
    free = available_bytes()
    tell(
        f"needs about {size(estimate.peak_bytes)} of memory ({size(free)} free) and "
        f"{size(estimate.disk_bytes)} of disk"
    )
    if estimate.peak_bytes > total_bytes():
        raise OutOfMemory(
            f"one layer with its statistics takes about {size(estimate.peak_bytes)}, this machine "
            f"has {size(total_bytes())}: --rtn or --fp8 need less, or a smaller --seq-len"
        )
    if estimate.peak_bytes > free:
        tell("that is more than is free now: end other programs, or it will swap")


def state_results(job: Job, outcome: Outcome) -> None:
    """What it took, and where the result runs."""
    took = quantize_report.minutes(outcome.seconds)
    resumed = f", {outcome.resumed} were there" if outcome.resumed else ""
    tell(
        f"{outcome.folder}: {outcome.layers} layers in {took}{resumed}, at most "
        f"{size(peak_bytes())} of memory (estimated {size(job.estimate.peak_bytes)})"
    )
    why_not = this_machine().why_no_cuda
    if why_not is not None:
        tell(f"it runs on GPUs ({why_not} here); --backend cuda --device cpu runs it slowly")
    spec = read_config(outcome.folder)
    for note in notes(spec.quant, experts=spec.moe is not None):
        tell(f"in localgen's engine {note}")


def run(job: Job, resume: bool) -> Outcome:
    """With a bar or lines on stderr. OutOfMemory: the GPU's is full; else as Job.run."""
    doing = "quantizing" if job.mode == "round" else "calibrating"
    with resumable(job), Steps() as steps:

        def on_progress(progress: Progress) -> None:
            if progress.stage == "checking":
                steps.at("checking weights", progress.done, progress.total, "bytes")
            else:
                steps.at(doing, progress.done, progress.total)

        return job.run(resume=resume, on_progress=on_progress)


@contextmanager
def resumable(job: Job) -> Iterator[None]:
    """Says how to go on where Ctrl+C ends it. OutOfMemory: the GPU's is full."""
    try:
        yield
    except KeyboardInterrupt:
        if job.work.path.exists():
            tell(
                f"stopped after {job.work.done} of {job.ready.source.spec.layers} layers: "
                "the same command with --resume goes on from there"
            )
        raise
    except torch.OutOfMemoryError:
        raise OutOfMemory(
            "the GPU's memory is full: --device cpu, or fewer tokens at once with --seq-len; "
            f"--resume goes on after {job.work.done} layers"
        ) from None


def peak_bytes() -> int:
    """Most that this process has had in memory so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
