"""What `localgen quantize` does, step by step, and what it says on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import typer

from localgen.backends.cuda.options import device_of
from localgen.backends.errors import InvalidRequest
from localgen.backends.models import LoadOptions
from localgen.cli import quantize_gguf, quantize_report, quantize_run, tables
from localgen.cli.quantize_report import Steps, tell
from localgen.quant.card import add_table
from localgen.quant.gguf_types import TYPES, type_name
from localgen.quant.job import Job
from localgen.quant.preflight import prepare
from localgen.quant.recipe import METHODS, Recipe, bits_of
from localgen.quantizing.asked import Asked
from localgen.quantizing.original import any_form, original
from localgen.quantizing.speed import tokens_per_s
from localgen.quantizing.verdict import HeldOut, Row, rows, size_row


def recipe(
    flags: Mapping[str, bool],
    gguf: str | None,
    bits: int | None,
    group_size: int | None,
    act_order: bool | None,
    calibrated: bool,
) -> Recipe | None:
    """The method that was asked for; None: a GGUF file without calibration. InvalidRequest: none,
    or several that exclude each other."""
    chosen = [method for method in METHODS if flags[method]]
    if not chosen and gguf is None:
        raise InvalidRequest("say how: --awq, --gptq, --rtn, --fp8, --smoothquant or --gguf TYPE")
    if len(chosen) > 1:
        raise InvalidRequest(f"--{chosen[0]} and --{chosen[1]} exclude each other")
    if act_order is not None and chosen != ["gptq"]:
        raise InvalidRequest("--act-order and --no-act-order go with --gptq")
    if group_size is not None and (gguf is not None or chosen[0] in ("fp8", "smoothquant")):
        raise InvalidRequest("--group-size goes with --awq, --gptq and --rtn")
    if gguf is not None and bits is not None:
        raise InvalidRequest("--bits: a GGUF file's are in its type, such as --gguf Q4_K_M")
    if not chosen and not calibrated:
        return None
    if gguf is not None and chosen not in ([], ["awq"]):
        raise InvalidRequest(f"--{chosen[0]} and --gguf exclude each other; --awq goes with it")
    if gguf is not None:
        return _for_gguf(gguf)
    return Recipe(
        method=chosen[0],
        bits=bits_of(chosen[0]) if bits is None else bits,
        group_size=128 if group_size is None else group_size if group_size > 0 else None,
        desc_act=act_order is not False,
    )


def _for_gguf(gguf: str) -> Recipe:
    """What the search for scales rounds with in place of the type: its groups are of 32 or less."""
    few = TYPES[type_name(gguf)].bits < 4
    return Recipe(method="awq", bits=3 if few else 4, group_size=32)


def make(asked: Asked, *, as_json: bool) -> None:
    """Quantize, measure, and print the verdict."""
    device = _device(asked.device)
    name, folder = original(asked.model)
    taken: dict[str, float] = {}
    if asked.gguf is not None:
        out = quantize_gguf.make(asked, name, folder, device)
    else:
        out, taken = _make_folder(asked, name, folder, device)
    models = [(name, folder), (out.name, out)]
    found = [size_row(*one) for one in models]
    if asked.held_out is not None:
        try:
            found = _measured(models, asked.held_out, device)
        except KeyboardInterrupt:
            tell(f"{out} is whole, only not measured: localgen quantize --compare does that too")
            raise
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
    job = Job(name, ready, out)
    job.check_room(resume=asked.resume)
    quantize_run.state_needs(job, name)
    outcome = quantize_run.run(job, asked.resume)
    quantize_run.state_results(job, outcome)
    peaks = {"peak_bytes": quantize_run.peak_bytes(), "estimated_bytes": job.estimate.peak_bytes}
    return out, {"layers": outcome.layers, "layer_s": outcome.layer_s, **peaks}


def compare(names: Sequence[str], held_out: HeldOut, device: str | None, *, as_json: bool) -> None:
    """The same table for models that are here."""
    if not names:
        raise InvalidRequest("--compare: name the models, the original first", param="model")
    models = [any_form(name) for name in names]
    _show(_measured(models, held_out, _device(device)), as_json)


def _measured(models: Sequence[tuple[str, Path]], text: HeldOut, device: str) -> list[Row]:
    with Steps() as steps:
        found = rows(
            models,
            text,
            device,
            lambda name, done, total: steps.at(f"measuring {name}", done, total, "steps"),
        )
    return [replace(row, tokens_per_s=tokens_per_s(Path(row.path))) for row in found]


def _show(found: Sequence[Row], as_json: bool, **more: float) -> None:
    if as_json:
        typer.echo(quantize_report.as_json(found, **more))
        return
    for line in tables.aligned(quantize_report.table(found)):
        typer.echo(line)


def _device(asked: str | None) -> str:
    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidRequest(
            "--device: there is no NVIDIA GPU that this build of torch can use: leave it out, or "
            "--device cpu",
            param="device",
        )
    return str(device_of(LoadOptions(device=asked)))


def _usual_name(folder: Path, recipe: Recipe) -> str:
    bits = f"-{recipe.bits}bit" if recipe.grouped else ""
    return f"{folder.resolve().name}-{recipe.method}{bits}"
