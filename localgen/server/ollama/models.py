"""Models as Ollama's clients see them: here, loaded, and each by itself."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from localgen.backends.errors import LoadFailed, LocalgenError, ModelNotFound
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.text.reasoning import tags_of
from localgen.hub.aliases import aliases
from localgen.hub.metadata import About, about, entry_of
from localgen.hub.resolve import available, resolve
from localgen.placement import free_memory
from localgen.server.models.resident import Resident, model_id
from localgen.server.ollama.responses import timestamp

# "for ever", as the largest duration of Go makes it
_FOR_EVER_S = 2**63 / 1e9


def tags(residents: tuple[Resident, ...]) -> dict[str, Any]:
    """Every model that can be named, those loaded from elsewhere, and the user's own names. Reads
    the disk."""
    files = {file.path: file for file in available()}
    files |= {resident.file.path: resident.file for resident in residents}
    named = [(file.name, file) for file in files.values()]
    for name in aliases():
        with contextlib.suppress(LocalgenError):  # what it means is not here
            named.append((name, resolve(name)))
    return {"models": [_tag(name, file) for name, file in named if file.path.exists()]}


def running(residents: tuple[Resident, ...]) -> dict[str, Any]:
    """The models that are loaded. Reads the disk."""
    return {"models": [_process(resident) for resident in residents if resident.info]}


def shown(name: str) -> dict[str, Any]:
    """What a model is. Reads the disk. ModelNotFound, LoadFailed."""
    file = resolve(name, paths=False)
    facts = _facts(file)
    entry = entry_of(file)
    return {
        "modelfile": f"FROM {file.path}\n",
        "parameters": "\n".join(f"{key:<30} {value}" for key, value in facts.sampling.items()),
        "template": facts.chat_template or "",
        "license": facts.license or (entry.license if entry else None) or "",
        "details": _details(file, facts),
        "model_info": _model_info(facts),
        "capabilities": _capabilities(facts),
        "modified_at": _modified(file.path),
    }


def _tag(name: str, file: ModelFile) -> dict[str, Any]:
    try:
        facts = _facts(file)
    except LoadFailed:  # it is listed all the same: loading it says what is wrong
        facts = About()
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(file.path),
        "size": file.size_bytes,
        "digest": model_id(file),
        "details": _details(file, facts),
    }


def _process(resident: Resident) -> dict[str, Any]:
    info = resident.info
    assert info is not None, "the caller has looked"
    size = free_memory.footprint(info)
    left_s = resident.seconds_left()
    until_s = time.time() + min(_FOR_EVER_S, _FOR_EVER_S if left_s is None else left_s)
    shown = _tag(resident.file.name, resident.file) | {
        "size": size,
        "size_vram": round(size * gpu_share(info.processor)),
    }
    del shown["modified_at"]
    return shown | {"expires_at": timestamp(until_s), "context_length": info.ctx}


def gpu_share(processor: str) -> float:
    """How much of a model is on a GPU, 0 to 1. processor: as ModelInfo has it."""
    share = re.search(r"(\d+)% (?:CPU/)?GPU$", processor)
    return int(share[1]) / 100 if share else 0.0


def _facts(file: ModelFile) -> About:
    try:
        return _read(file, file.path.stat().st_mtime_ns)
    except FileNotFoundError as error:
        raise ModelNotFound(f"{file.name} is no longer there: {file.path}") from error


@lru_cache(maxsize=1024)
def _read(file: ModelFile, changed_ns: int) -> About:
    return about(file)


def _details(file: ModelFile, facts: About) -> dict[str, Any]:
    family = facts.architecture or ""
    return {
        "parent_model": "",
        "format": "gguf" if file.is_gguf else "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _parameters(facts.params),
        "quantization_level": facts.quantization or "",
    }


def _parameters(count: int | None) -> str:
    """`8.0B`, `494.03M`, as Ollama writes them."""
    match count:
        case None:
            return ""
        case int() if count >= 1e9:
            return f"{count / 1e9:.1f}B"
        case int() if count >= 1e6:
            return f"{count / 1e6:.2f}M"
        case _:
            return str(count)


def _model_info(facts: About) -> dict[str, Any]:
    known = asdict(facts)
    family = facts.architecture
    general = {"general.architecture": family, "general.basename": facts.title}
    general["general.parameter_count"] = known["params"]
    of_family = {
        f"{family}.{name}": known[ours]
        for name, ours in (
            ("context_length", "context"),
            ("block_count", "layers"),
            ("embedding_length", "hidden"),
            ("vocab_size", "vocab"),
        )
    }
    return {key: value for key, value in (general | of_family).items() if value is not None}


def _capabilities(facts: About) -> list[str]:
    template = facts.chat_template or ""
    knows_tools = re.search(r"\btools\b", template) is not None
    thinks = tags_of(template) is not None
    return ["completion", *["tools"] * knows_tools, *["thinking"] * thinks]


def _modified(path: Path) -> str:
    return timestamp(path.stat().st_mtime)
