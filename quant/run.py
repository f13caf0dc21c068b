"""A quantization from its beginning to the verdict; or only a look at what it would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from localgen.backends.cuda.device.options import device_of
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.model_info import LoadOptions
from localgen.hub.quant_choice import room_here
from localgen.quant import gguf_job, layerwise_run
from localgen.quant.advice import advice, recommended
from localgen.quant.card import add_table
from localgen.quant.compare import rows, size_row, tokens_per_s
from localgen.quant.events import Advised, At, Tell, Verdict
from localgen.quant.job import Job
from localgen.quant.originals import any_form, original
from localgen.quant.preflight import prepare
from localgen.quant.report import Row, markdown
from localgen.quant.request.request import Asked, HeldOut, usual_out


def make(asked: Asked, tell: Tell) -> None:
    """Quantize, measure, and tell the verdict. Errors: as prepare, make_gguf and Job.run."""
    device = _device(asked.device)
    name, folder = original(asked.model)
    if asked.gguf is not None:
        plan = gguf_job.plan(asked, name, folder, device, tell)
        out = gguf_job.make(plan, tell, resume=asked.resume)
    else:
        job = _folder_job(asked, name, folder, device, tell)
        outcome = layerwise_run.run(job, tell, resume=asked.resume)
        layerwise_run.tell_made(job, outcome, tell)
        out = outcome.folder
    models = [(name, folder), (out.name, out)]
    found = [size_row(*one) for one in models]
    if asked.held_out is not None:
        found = _measured(models, asked.held_out, device, tell)
        if out.is_dir():
            add_table(out, markdown(found))
    tell(Verdict(tuple(found)))


def look(asked: Asked, tell: Tell) -> None:
    """Tell what it would take, what lies there unfinished, and which ways suit this machine. The
    weights are not read. Errors: as make."""
    device = _device(asked.device)
    name, folder = original(asked.model)
    _advise(folder, tell)
    asked = replace(asked, resume=True)
    if asked.gguf is not None:
        job = gguf_job.plan(asked, name, folder, device, tell).job
    else:
        job = _folder_job(asked, name, folder, device, tell)
    if job is not None:
        layerwise_run.tell_unfinished(job, tell)


def compare(names: Sequence[str], held_out: HeldOut, device: str | None, tell: Tell) -> None:
    """The same verdict on models that are here."""
    if not names:
        raise InvalidRequest("--compare: name the models, the original first", param="model")
    models = [any_form(name) for name in names]
    tell(Verdict(tuple(_measured(models, held_out, _device(device), tell))))


def _folder_job(asked: Asked, name: str, folder: Path, device: str, tell: Tell) -> Job:
    """What is to be run, once nothing is to be refused and what it takes is told."""
    assert asked.recipe is not None
    ready = prepare(folder, asked.recipe, asked.calibration, device)
    job = Job(name, ready, asked.out or usual_out(name, asked.recipe, None))
    job.check_room(resume=asked.resume)
    layerwise_run.tell_needs(job, tell)
    return job


def _measured(
    models: Sequence[tuple[str, Path]], text: HeldOut, device: str, tell: Tell
) -> list[Row]:
    def on_step(name: str, done: int, total: int) -> None:
        tell(At(f"measuring {name}", done, total, "steps"))

    found = rows(models, text, device, on_step)
    return [replace(row, tokens_per_s=tokens_per_s(Path(row.path))) for row in found]


def _advise(folder: Path, tell: Tell) -> None:
    """A model of which too little is known for advice is refused for better reasons later."""
    try:
        found = advice(folder, room_here())
    except LocalgenError:
        return
    best = recommended(found)
    tell(Advised(tuple(found), None if best is None else best.option))


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
