"""Run a quantization with its evaluation, or a dry run that only estimates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from localgen.backends.cuda.device.options import resolve_device
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.model_info import LoadOptions
from localgen.hub.quant_choice import available_memory
from localgen.quant.advice import best_method, estimate_methods
from localgen.quant.compare import (
    eval_windows,
    evaluate_models,
    measure_tokens_per_s,
    unmeasured_row,
)
from localgen.quant.gguf_job import GgufJob, prepare_gguf_job
from localgen.quant.job import QuantizeJob
from localgen.quant.mixed_job import MixedGgufJob, prepare_mixed_job
from localgen.quant.originals import resolve_any_format, resolve_original
from localgen.quant.preflight import prepare_quantization
from localgen.quant.report import verdict_markdown
from localgen.quant.request.events import (
    EvalEvent,
    NoteEvent,
    OnEvent,
    RecommendationEvent,
)
from localgen.quant.request.request import EvalSet, QuantizeRequest, default_output
from localgen.quant.result_folder import append_results, report_backend_notes


def run_quantization(request: QuantizeRequest, on_event: OnEvent) -> None:
    """Quantize and evaluate. Raises as prepare_quantization, make_gguf and QuantizeJob.run."""
    device = _resolve_device(request.device)
    name, folder = resolve_original(request.model)
    job = _prepare_job(request, name, folder, device, on_event)
    if request.eval_set is not None:
        eval_windows(folder, request.eval_set)  # raises before hours of work
    layerwise = _layerwise_job(job)
    if request.resume and (layerwise is None or not layerwise.work_folder.has_finished_layers):
        on_event(NoteEvent("--resume: there is nothing to resume, all layers are left"))
    finished = job.run(on_event, resume=request.resume)
    on_event(finished)
    out = Path(finished.path)
    if out.is_dir():
        report_backend_notes(out, on_event)
    models = [(name, folder), (out.name, out)]
    if request.eval_set is None:
        verdict = EvalEvent(tuple(unmeasured_row(*one) for one in models))
    else:
        verdict = _measure(models, request.eval_set, device, on_event)
        if isinstance(job, MixedGgufJob):
            kl = verdict.rows[-1].kl
            assert kl is not None
            job.report_measured(kl, on_event)
        if out.is_dir():
            append_results(out, verdict_markdown(verdict))
    on_event(verdict)


def dry_run_quantization(request: QuantizeRequest, on_event: OnEvent) -> None:
    """Emit the recommendation, the estimate and any unfinished run, without reading the weights.
    Raises as run_quantization."""
    device = _resolve_device(request.device)
    name, folder = resolve_original(request.model)
    _report_recommendation(folder, on_event)
    job = _prepare_job(replace(request, resume=True), name, folder, device, on_event)
    layerwise = _layerwise_job(job)
    if layerwise is not None:
        layerwise.report_unfinished(on_event)


def compare_models(
    names: Sequence[str], eval_set: EvalSet, device: str | None, on_event: OnEvent
) -> None:
    """Evaluate existing models, the original first."""
    if not names:
        raise InvalidRequest("--compare: name the models, the original first", param="model")
    models = [resolve_any_format(name) for name in names]
    on_event(_measure(models, eval_set, _resolve_device(device), on_event))


def _prepare_job(
    request: QuantizeRequest, name: str, folder: Path, device: str, on_event: OnEvent
) -> QuantizeJob | GgufJob | MixedGgufJob:
    """Validate the request, emit its estimate, and return the job."""
    if request.target is not None:
        return prepare_mixed_job(request, name, folder, device, on_event)
    if request.gguf is not None:
        return prepare_gguf_job(request, name, folder, device, on_event)
    assert request.recipe is not None
    prepared = prepare_quantization(folder, request.recipe, request.calibration, device)
    output = request.output or default_output(name, request.recipe, None)
    if output.suffix.lower() == ".gguf":
        raise InvalidRequest(
            f"--out {output}: --{request.recipe.method} writes a folder; add --gguf TYPE for a "
            "GGUF file, or leave out .gguf",
            param="out",
        )
    job = QuantizeJob(name, prepared, output)
    job.check_disk_space(resume=request.resume)
    job.report_estimate(on_event)
    return job


def _layerwise_job(job: QuantizeJob | GgufJob | MixedGgufJob) -> QuantizeJob | None:
    """The part of a job that works layer by layer and can be resumed, or None."""
    return job if isinstance(job, QuantizeJob) else job.calibration


def _measure(
    models: Sequence[tuple[str, Path]], eval_set: EvalSet, device: str, on_event: OnEvent
) -> EvalEvent:
    verdict = evaluate_models(models, eval_set, device, on_event)
    rows = [replace(row, tokens_per_s=measure_tokens_per_s(Path(row.path))) for row in verdict.rows]
    return replace(verdict, rows=tuple(rows))


def _report_recommendation(folder: Path, on_event: OnEvent) -> None:
    """Without a readable model there is none; the errors that follow say more."""
    try:
        estimates = estimate_methods(folder, available_memory())
    except LocalgenError:
        return
    best = best_method(estimates)
    on_event(RecommendationEvent(tuple(estimates), None if best is None else best.option))


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
