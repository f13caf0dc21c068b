"""The load of a model: its request to the engine, and a second try after a native crash."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import LoadOptions, ModelInfo, ModelLoadRequest
from localgen.config import ServerSettings
from localgen.hub.packaged import packaged_sampling
from localgen.placement.backend_choice import Placement
from localgen.server.models.draft_choice import DraftChoice
from localgen.server.models.engine_client import EngineClient, LoadCrashed
from localgen.server.models.resident import ResidentModel

_log = logging.getLogger("localgen.server")


def build_load_request(
    file: ModelFile,
    placement: Placement,
    options: LoadOptions,
    draft_choice: DraftChoice,
    settings: ServerSettings,
    limit_bytes: int | None,
) -> ModelLoadRequest:
    """Complete the options of a load. limit_bytes: RAM left for it under the memory limit."""
    options = replace(options, draft=draft_choice.effective_option)
    if len(placement.gpus) == 1:  # with several GPUs, each rank selects its own
        options = replace(options, device=f"cuda:{placement.gpus[0].index}")
    for name in ("max_queue", "parallel"):
        if getattr(options, name) is None:
            options = replace(options, **{name: getattr(settings, name)})
    return ModelLoadRequest(
        file.name,
        str(file.path),
        options,
        limit_bytes,
        draft_choice.draft_model,
        packaged_sampling(file),
        str(settings.kv_dir),
        settings.kv_share,
    )


async def load_model(
    request: ModelLoadRequest,
    resident: ResidentModel,
    start_engine: Callable[[], EngineClient],
    is_resident: Callable[[], bool],
) -> ModelInfo:
    """Load a model in its engine; if llama.cpp crashes, retry once without repacked weights.

    is_resident: False if the model was unloaded meanwhile.
    """
    placement = resident.placement
    try:
        info = await resident.engine.load(request)
    except LoadCrashed as crash:
        tried = request.options.repack is not None or placement.backend != "llamacpp"
        if tried or not is_resident():
            raise
        _log.warning("%s: retrying without repacking", crash)
        options = replace(request.options, repack=False)
        resident.engine = start_engine()
        info = await resident.engine.load(replace(request, options=options))
        note = (
            "this build of llama.cpp crashes with weights repacked for this CPU: loaded "
            "without repacking, which is slower; rebuild it with `make clean` and `make chat`"
        )
        info = replace(info, notes=(*info.notes, note))
    return replace(info, backend_reason=placement.reason)
