"""What `localgen quantize` does, step by step, and what it says on the way."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import typer

from localgen.backends.cuda.options import device_of
from localgen.backends.cuda.spec import read_config
from localgen.backends.cuda.widening import notes
from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.backends.memory.available import available_bytes, total_bytes
from localgen.backends.types import LoadOptions
from localgen.cli import quantize_gguf, quantize_report, tables
from localgen.cli.quantize_report import Steps, tell
from localgen.placement import this_machine
from localgen.quant.card import add_table, in_words
from localgen.quant.job import Job, Outcome, Progress
from localgen.quant.preflight import prepare
from localgen.quant.recipe import METHODS, Recipe, bits_of
from localgen.quantizing.asked import Asked
from localgen.quantizing.original import any_form, original
from localgen.quantizing.speed import tokens_per_s
from localgen.quantizing.verdict import HeldOut, Row, rows, size_row
from localgen.repl.report import size


def recipe(
    flags: Mapping[str, bool],
    gguf: str | None,
    bits: int | None,
    group_size: int | None,
    act_order: bool | None,
) -> Recipe | None:
    """The method that was asked for. InvalidRequest: none, or several that exclude each other."""
    chosen = [method for method in METHODS if flags[method]]
    if not chosen and gguf is None:
        raise InvalidRequest("say how: --awq, --gptq, --rtn, --fp8, --smoothquant or --gguf TYPE")
    if len(chosen) > 1:
        raise InvalidRequest(f"--{chosen[0]} and --{chosen[1]} exclude each other")
    if act_order is not None and chosen != ["gptq"]:
        raise InvalidRequest("--act-order and --no-act-order go with --gptq")
    if group_size is not None and (not chosen or chosen[0] in ("fp8", "smoothquant")):
        raise InvalidRequest("--group-size goes with --awq, --gptq and --rtn")
    if not chosen:
        if bits is not None:
            raise InvalidRequest("--bits: a GGUF file's are in its type, such as --gguf Q4_K_M")
        return None
    if gguf is not None and chosen != ["awq"]:
        raise InvalidRequest(f"--{chosen[0]} and --gguf exclude each other; --awq goes with it")
    return Recipe(
        method=chosen[0],
        bits=bits_of(chosen[0]) if bits is None else bits,
        group_size=128 if group_size is None else group_size if group_size > 0 else None,
        desc_act=act_order is not False,
    )


def make(asked: Asked, *, as_json: bool) -> None:
    """Quantize, measure, and print the verdict."""
    device = _device(asked.device)
    name, folder = original(asked.model)
    taken: dict[str, float] = {}
    if asked.gguf is not None:
        out = quantize_gguf.make(asked, name, folder)
    else:
        out, taken = _make_folder(asked, name, folder, device)
    models = [(name, folder), (out.name, out)]
    found = [size_row(*one) for one in models]
    if asked.held_out is not None:
        found = _measured(models, asked.held_out, device)
        if out.is_dir():
            add_table(out, quantize_report.markdown(found))
    _show(found, as_json, **taken)


def _make_folder(
    asked: Asked, name: str, folder: Path, device: str
) -> tuple[Path, dict[str, float]]:
    """The folder, and what making it took, for programs."""
    assert asked.recipe is not None
    ready = prepare(folder, asked.recipe, asked.calibration, device)
    out = asked.out or Path(_usual_name(folder, asked.recipe))
    job = Job(name, ready, out, memory_bytes=available_bytes())
    job.check_room(resume=asked.resume)
    _state_needs(job, name)
    outcome = _run(job, asked)
    _state_results(job, outcome)
    peaks = {"peak_bytes": peak_bytes(), "estimated_bytes": job.estimate.peak_bytes}
    return out, {"layers": outcome.layers, "layer_s": outcome.layer_s, **peaks}


def compare(names: Sequence[str], held_out: HeldOut, device: str | None, *, as_json: bool) -> None:
    """The same table for models that are here."""
    if not names:
        raise InvalidRequest("--compare: name the models, the original first", param="model")
    models = [any_form(name) for name in names]
    _show(_measured(models, held_out, _device(device)), as_json)


def _run(job: Job, asked: Asked) -> Outcome:
    with Steps() as steps:

        def on_progress(progress: Progress) -> None:
            if progress.stage == "checking":
                steps.at("checking weights", progress.done, progress.total, "bytes")
            else:
                steps.at("quantizing", progress.done, progress.total)

        try:
            return job.run(resume=asked.resume, on_progress=on_progress)
        except KeyboardInterrupt:
            layers = job.ready.source.spec.layers
            if job.work.path.exists():
                tell(
                    f"stopped after {job.work.done} of {layers} layers: "
                    "the same command with --resume goes on from there"
                )
            raise
        except torch.OutOfMemoryError:
            raise OutOfMemory(
                f"the GPU's memory is full: --device cpu, or fewer tokens at once with --seq-len; "
                f"--resume goes on after {job.work.done} layers"
            ) from None


def _measured(models: Sequence[tuple[str, Path]], text: HeldOut, device: str) -> list[Row]:
    with Steps() as steps:
        found = rows(
            models,
            text,
            device,
            lambda name, done, total: steps.at(f"measuring {name}", done, total, "steps"),
        )
    return [replace(row, tokens_per_s=tokens_per_s(Path(row.path))) for row in found]


def _state_needs(job: Job, name: str) -> None:
    estimate, ready = job.estimate, job.ready
    where = (
        ""
        if not estimate.states_bytes
        else (
            f", activations of {size(estimate.states_bytes)} "
            f"{'in memory' if estimate.kept else 'on disk'}"
        )
    )
    tell(
        f"{name}: {in_words(ready.recipe)}, {size(ready.source.size_bytes)} become about "
        f"{size(estimate.output_bytes)}{where}"
    )
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


def _state_results(job: Job, outcome: Outcome) -> None:
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


def _show(found: Sequence[Row], as_json: bool, **more: float) -> None:
    if as_json:
        typer.echo(quantize_report.as_json(found, **more))
        return
    for line in tables.aligned(quantize_report.table(found)):
        typer.echo(line)


def _device(asked: str | None) -> str:
    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(device_of(LoadOptions(device=asked)))


def _usual_name(folder: Path, recipe: Recipe) -> str:
    bits = f"-{recipe.bits}bit" if recipe.grouped else ""
    return f"{folder.resolve().name}-{recipe.method}{bits}"


def peak_bytes() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
