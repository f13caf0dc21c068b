"""A quantization from its beginning to the verdict; or only a look at what it would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from localgen.backends.cuda.device.options import resolve_device
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.model_info import LoadOptions
from localgen.hub.quant_choice import available_memory
from localgen.quant import gguf_job, layerwise_run
from localgen.quant.advice import best_method, estimate_methods
from localgen.quant.card import append_results
from localgen.quant.compare import evaluate_models, measure_tokens_per_s, unmeasured_row
from localgen.quant.events import EvalEvent, OnEvent, ProgressEvent, RecommendationEvent
from localgen.quant.job import QuantizeJob
from localgen.quant.originals import resolve_any_format, resolve_original
from localgen.quant.preflight import prepare_quantization
from localgen.quant.report import EvalRow, eval_markdown
from localgen.quant.request.request import EvalSet, QuantizeRequest, default_output


def run_quantization(request: QuantizeRequest, on_event: OnEvent) -> None:
    """Quantize, measure, and tell the verdict. Errors: as prepare_quantization, make_gguf and
    QuantizeJob.run."""
    device = _resolve_device(request.device)
    name, folder = resolve_original(request.model)
    if request.gguf is not None:
        plan = gguf_job.prepare_gguf_job(request, name, folder, device, on_event)
        out = gguf_job.run_gguf_job(plan, on_event, resume=request.resume)
    else:
        job = _prepare_job(request, name, folder, device, on_event)
        outcome = layerwise_run.run_job(job, on_event, resume=request.resume)
        layerwise_run.report_result(job, outcome, on_event)
        out = outcome.folder
    models = [(name, folder), (out.name, out)]
    found = [unmeasured_row(*one) for one in models]
    if request.eval_set is not None:
        found = _measure(models, request.eval_set, device, on_event)
        if out.is_dir():
            append_results(out, eval_markdown(found))
    on_event(EvalEvent(tuple(found)))


def dry_run_quantization(request: QuantizeRequest, on_event: OnEvent) -> None:
    """Tell what it would take, what lies there unfinished, and which ways suit this machine. The
    weights are not read. Errors: as run_quantization."""
    device = _resolve_device(request.device)
    name, folder = resolve_original(request.model)
    _report_recommendation(folder, on_event)
    request = replace(request, resume=True)
    if request.gguf is not None:
        job = gguf_job.prepare_gguf_job(request, name, folder, device, on_event).calibration_job
    else:
        job = _prepare_job(request, name, folder, device, on_event)
    if job is not None:
        layerwise_run.report_unfinished(job, on_event)


def compare_models(
    names: Sequence[str], eval_set: EvalSet, device: str | None, on_event: OnEvent
) -> None:
    """The same verdict on models that are here."""
    if not names:
        raise InvalidRequest("--compare: name the models, the original first", param="model")
    models = [resolve_any_format(name) for name in names]
    on_event(EvalEvent(tuple(_measure(models, eval_set, _resolve_device(device), on_event))))


def _prepare_job(
    request: QuantizeRequest, name: str, folder: Path, device: str, on_event: OnEvent
) -> QuantizeJob:
    """What is to be run, once nothing is to be refused and what it takes is told."""
    assert request.recipe is not None
    ready = prepare_quantization(folder, request.recipe, request.calibration, device)
    job = QuantizeJob(name, ready, request.output or default_output(name, request.recipe, None))
    job.check_disk_space(resume=request.resume)
    layerwise_run.report_estimate(job, on_event)
    return job


def _measure(
    models: Sequence[tuple[str, Path]], eval_set: EvalSet, device: str, on_event: OnEvent
) -> list[EvalRow]:
    def on_step(name: str, done: int, total: int) -> None:
        on_event(ProgressEvent(f"measuring {name}", done, total, "steps"))

    found = evaluate_models(models, eval_set, device, on_step)
    return [replace(row, tokens_per_s=measure_tokens_per_s(Path(row.path))) for row in found]


def _report_recommendation(folder: Path, on_event: OnEvent) -> None:
    """A model of which too little is known for advice is refused for better reasons later."""
    try:
        found = estimate_methods(folder, available_memory())
    except LocalgenError:
        return
    best = best_method(found)
    on_event(RecommendationEvent(tuple(found), None if best is None else best.option))


def _resolve_device(requested: str | None) -> str:
    if requested is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidRequest(
            "--device: there is no NVIDIA GPU that this build of torch can use: leave it out, or "
            "--device cpu",
            param="device",
        )
    return str(resolve_device(LoadOptions(device=requested)))
