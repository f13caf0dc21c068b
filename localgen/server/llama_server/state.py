"""/props and /slots: a loaded model and its requests, as llama-server describes them."""

from __future__ import annotations

from typing import Any

from localgen import __version__
from localgen.backends.engine_stats import SequenceStats
from localgen.backends.errors import NotFound
from localgen.backends.model_info import ModelInfo
from localgen.server.models.manager import ModelManager
from localgen.server.models.names import answered_name
from localgen.server.models.resident import ResidentModel


async def find_loaded(
    manager: ModelManager, name: str | None, *, allow_paths: bool
) -> tuple[ResidentModel, ModelInfo]:
    """The loaded model of a name; of None the only loaded one, else the default model.

    Raises NotFound if it is not loaded, InvalidRequest if the name is ambiguous.
    """
    residents = manager.residents
    if name is None and len(residents) == 1:
        found: ResidentModel | None = residents[0]
    else:
        wanted, paths = (manager.default_name, True) if name is None else (name, allow_paths)
        found = await manager.find_loaded(wanted, paths)
    if found is None or found.info is None:
        raise NotFound(
            f"{name or 'the default model'} is not loaded: send it a request, or start the server "
            "as localgen serve MODEL",
            param="model",
        )
    return found, found.info


def props_body(resident: ResidentModel, info: ModelInfo, name: str | None) -> dict[str, Any]:
    """Build the response of /props. name: the model's name in the request, if any."""
    shown = answered_name(name, resident.file)
    return {
        "default_generation_settings": {"n_ctx": info.ctx, "params": _default_params(info)},
        "total_slots": info.max_seqs,
        "model_alias": shown,
        "model_path": shown,  # a name: paths of the disk are not for clients
        "chat_template": info.chat_template or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"localgen-{__version__}",
    }


def _default_params(info: ModelInfo) -> dict[str, Any]:
    """Samplers that the model sets itself."""
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
    values = ((name, getattr(info.sampling, name)) for name in names)
    return {name: value for name, value in values if value is not None}


def slots_body(resident: ResidentModel, info: ModelInfo) -> list[dict[str, Any]]:
    """Build the response of /slots: running requests first, without prompts and clients."""
    stats = resident.engine.stats
    running = [each for each in stats.sequences if each.state != "queued"] if stats else []
    idle = [None] * (info.max_seqs - len(running))
    return [_slot(number, each, info) for number, each in enumerate([*running, *idle])]


def _slot(number: int, sequence: SequenceStats | None, info: ModelInfo) -> dict[str, Any]:
    slot: dict[str, Any] = {
        "id": number,
        "n_ctx": sequence.ctx if sequence else info.ctx,
        "speculative": info.options.draft not in (None, "none"),
        "is_processing": sequence is not None,
    }
    if sequence is None:
        return slot
    decoded = {"n_decoded": sequence.generated_tokens}
    return slot | {"n_prompt_tokens": sequence.prompt_tokens, "next_token": decoded}
