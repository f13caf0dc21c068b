"""Actual memory usage of a loaded model, to compare with its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from localgen.backends.errors import ServerUnavailable
from localgen.backends.model_info import LoadOptions, MemoryUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedUsage:
    """Memory in bytes, as allocated by the runner and as measured for the engine process.

    rss_bytes: resident memory, including mapped weights and other file pages. gpu_bytes: GPU
    memory. draft: the draft model's memory. None: unknown, or no draft model.
    """

    backend: str
    reason: str
    processor: str
    ctx: int
    kv_tokens: int
    weights_bytes: int | None
    kv_bytes: int | None
    work_bytes: int | None
    draft: MemoryUsage | None
    rss_bytes: int
    gpu_bytes: int | None
    options: LoadOptions = LoadOptions()

    @property
    def total_bytes(self) -> int | None:
        drafting = 0 if self.draft is None else self.draft_bytes
        return _sum(self.weights_bytes, self.kv_bytes, self.work_bytes, drafting)

    @property
    def draft_bytes(self) -> int | None:
        """Total memory of the draft model; None if unknown or absent.

        On a GPU, its buffers are counted with the target's.
        """
        used = self.draft
        return None if used is None else _sum(used.weights, used.kv, used.work or 0)

    @property
    def unmapped_bytes(self) -> int:
        """Known memory other than weights."""
        used = self.draft or MemoryUsage()
        return sum(part or 0 for part in (self.kv_bytes, self.work_bytes, used.kv, used.work))


def _sum(*parts: int | None) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def find_loaded(stats: dict[str, Any], path: str | None) -> LoadedUsage | None:
    """Find the model with this path in the server's stats. Returns None if it is not loaded.

    Raises ServerUnavailable if a server of another version reports other values.
    """
    try:
        return _find_loaded(stats, path)
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerUnavailable(
            f"cannot read the server's statistics ({type(error).__name__}: {error}): restart it "
            "with localgen stop"
        ) from error


def _find_loaded(stats: dict[str, Any], path: str | None) -> LoadedUsage | None:
    for model in stats["models"]:
        info = model.get("info")
        if path is None or model["path"] != path or info is None:
            continue
        memory, draft = info["memory"], info["draft"]
        return LoadedUsage(
            backend=info["backend"],
            reason=info["backend_reason"],
            processor=info["processor"],
            ctx=info["ctx"],
            kv_tokens=info["kv_tokens"],
            weights_bytes=memory["weights"],
            kv_bytes=memory["kv"],
            work_bytes=memory["work"],
            draft=MemoryUsage(**draft["memory"]) if draft else None,
            rss_bytes=model["rss_bytes"],
            gpu_bytes=model["gpu_bytes"],
            options=LoadOptions(**info["options"]),
        )
    return None


_MEMORY_OPTIONS = ("cache_type_k", "cache_type_v", "parallel", "max_batch_tokens", "flash_attn")
_PLACEMENT_OPTIONS = ("kv_unified", "backend", "device", "draft")
_CONTEXT_OPTIONS = ("ctx", "kv_tokens")


def with_loaded_options(options: LoadOptions, loaded: LoadedUsage) -> LoadOptions:
    """Fill unset options with those of the loaded model, so that the figures are comparable."""
    names = (*_MEMORY_OPTIONS, *_PLACEMENT_OPTIONS, *(() if options.ctx else _CONTEXT_OPTIONS))
    rest = {name: getattr(loaded.options, name) for name in names if getattr(options, name) is None}
    return replace(options, **rest)
