"""Server state for /health, /v1/models, /v1/stats and /v1/loads."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import psutil

import localgen
from localgen import PROTOCOL
from localgen.backends.engine_stats import EngineStats
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.memory.system import available_memory_bytes
from localgen.backends.model_info import ModelInfo
from localgen.config import ServerSettings
from localgen.hub.hf_client import cache_folder
from localgen.hub.resolve import find_adapter, find_preset
from localgen.machine.gpus import process_gpu_bytes
from localgen.server.models.disk_paths import without_paths
from localgen.server.models.engine_client import EngineClient
from localgen.server.models.engine_watch import is_silent, silence_s
from localgen.server.models.manager import ModelManager
from localgen.server.models.names import find_listed, listed_models
from localgen.server.models.resident import ResidentModel, model_id
from localgen.server.stats.loads import ServerLoad
from localgen.server.stats.machine_watch import MachineWatch
from localgen.server.stats.memory_reads import ReadCostCache
from localgen.server.stats.recent_requests import RecentRequests
from localgen.server.stats.token_totals import TokenTotals


class ServerState:
    """Builds the responses of /health, /v1/models and /v1/stats, and tells the load.

    is_preloading: True while the startup model loads. recent_requests, token_totals: register them
    as observers of the request log.
    """

    def __init__(
        self,
        settings: ServerSettings,
        manager: ModelManager,
        *,
        is_preloading: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = settings
        self._manager = manager
        self._is_preloading = is_preloading
        self._started_s = time.monotonic()
        self.recent_requests = RecentRequests()
        self.token_totals = TokenTotals()
        self._machine = MachineWatch()
        self._read_costs = ReadCostCache()

    @property
    def status(self) -> str:
        """`ok`, `degraded` (an engine is silent), `loading` (the startup model), `stopping`."""
        if self._manager.is_closing:
            return "stopping"
        if self._is_preloading():
            return "loading"
        return "degraded" if self._silent_models() else "ok"

    @property
    def is_ready(self) -> bool:
        """True if it accepts requests. One to a silent engine waits until that is replaced."""
        return self.status in ("ok", "degraded")

    def _silent_models(self) -> list[str]:
        return [model.file.name for model in self._manager.residents if is_silent(model)]

    def health(self) -> dict[str, Any]:
        """For clients of this user: it has a path."""
        return self._process_state() | {"cache_folder": str(cache_folder().absolute())}

    def _process_state(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "version": localgen.__version__,
            "protocol": PROTOCOL,
            "pid": os.getpid(),
            "active_requests": self._manager.active_requests,
            "silent_models": self._silent_models(),
        }

    def list_models(self, *, with_paths: bool) -> list[dict[str, Any]]:
        """Card of every name that a client may ask for, that of `localgen serve MODEL` first.

        Reads the disk.
        """
        served = self._manager.serve_options.identity
        listed = sorted(
            listed_models(self._manager.residents).items(),
            # smg takes the first as the only model of a worker
            key=lambda named: named[1].identity != served,
        )
        return [self._build_card(file, name, with_paths) for name, file in listed]

    def model_card(self, name: str, *, allow_paths: bool) -> dict[str, Any]:
        """Card of one model, with the requested name as id. Reads the disk.

        allow_paths: take and give paths, for local clients. Raises ModelNotFound, InvalidRequest.
        """
        file = find_listed(name, self._manager.residents, allow_paths=allow_paths)
        return self._build_card(file, name, allow_paths)

    def _build_card(self, file: ModelFile, name: str, with_paths: bool) -> dict[str, Any]:
        loaded = {resident.file.identity: resident for resident in self._manager.residents}
        source = "preset" if find_preset(name) else file.source
        adapter = find_adapter(name) if source != "preset" else None
        own = {}
        if adapter is not None:  # as in vLLM, with the model as its parent
            source, size = "adapter", adapter[1].size_bytes
            own = {"parent": file.name, "size_bytes": size}
        return {
            "id": name,
            "object": "model",
            "created": int(file.path.stat().st_mtime) if file.path.exists() else 0,
            "owned_by": "localgen",
            "path": str(file.path) if with_paths else "",
            "size_bytes": file.size_bytes,
            "state": loaded[file.identity].state if file.identity in loaded else "available",
            "source": source,
            "hash": model_id(file),
            **own,
        }

    def gateway_stats(self) -> dict[str, Any]:
        """Statistics for the gateway of a cluster.

        Of each model also the chunks of prompts that its engine holds, where others fetch them, and
        whether it is that of `localgen serve MODEL`. And the tokens of each account.
        """
        stats = self.stats(is_local=False)
        for model, resident in zip(stats["models"], self._manager.residents, strict=True):
            model["kv_address"] = resident.info.options.kv_listen if resident.info else None
            model["is_default"] = resident.file.identity == self._manager.serve_options.identity
            model["held_chunks"] = base64.b64encode(resident.engine.held_chunks).decode()
        return stats | {"tokens_by_account": self.token_totals.by_account}

    def stats(self, *, is_local: bool) -> dict[str, Any]:
        """Statistics. is_local: for a client of this user, with paths and excerpts of prompts."""
        return {
            "server": self._process_state()
            | {
                "uptime_s": time.monotonic() - self._started_s,
                "rss_bytes": _rss_bytes(os.getpid()),
                "keep_alive_s": self._settings.keep_alive_s,
                "memory_limit": self._settings.memory_limit,
                "memory_available": available_memory_bytes(),
                "waiting_for_memory": self._manager.count_waiting(),
            },
            "machine": self._machine.latest,
            "models": [self._model_stats(each, is_local) for each in self._manager.residents],
            "ended": self.recent_requests.requests(with_prompts=is_local),
        }

    def load(self) -> ServerLoad:
        """Load of all engines. Requests that wait for memory or for a load have no tokens yet."""
        total = ServerLoad(num_waiting_reqs=sum(self._manager.count_waiting().values()))
        for resident in self._manager.residents:
            total += _engine_load(resident)
        return total

    def _model_stats(self, resident: ResidentModel, with_paths: bool) -> dict[str, Any]:
        info, pid = resident.info, resident.engine.pid
        if info is not None and not with_paths:
            info = without_paths(info)
        rss_bytes = _rss_bytes(pid)
        gpu_bytes = process_gpu_bytes(pid) if _is_on_gpu(resident) else None
        summary = {
            "name": resident.file.name,
            "id": resident.id,
            "names": sorted(name for name, paths in resident.resolved_names if not paths),
            "path": str(resident.file.path) if with_paths else "",
            "state": resident.state,
            "progress": 1.0 if info else resident.engine.progress,
            "silent_s": silence_s(resident),
            "pid": pid,
            "rss_bytes": rss_bytes,
            "gpu_bytes": gpu_bytes,
            "memory_bytes": rss_bytes + (gpu_bytes or 0),
            "size_bytes": resident.file.size_bytes + _draft_bytes(info),
            "active_requests": resident.num_users,
            "until_s": resident.expires_in_s(),
            "processor": info.processor if info else "",
            "ctx": info.ctx if info else 0,
            "draft": info.draft.name if info and info.draft else "",
            "adapters": resident.engine.stats.adapters if resident.engine.stats else (),
        }
        if info is not None:
            # without the chat template: it is long, and snapshots are frequent
            summary["info"] = asdict(replace(info, chat_template=None))
        stats = _current_stats(resident.engine)
        return summary | {"read": self._read_costs.lookup(resident), "stats": stats}


def _engine_load(resident: ResidentModel) -> ServerLoad:
    if resident.info is None or resident.engine.stats is None:
        return ServerLoad(num_waiting_reqs=resident.num_users)
    return ServerLoad.of_engine(resident.engine.stats, resident.info.max_seqs)


def _current_stats(engine: EngineClient) -> EngineStats | None:
    """The last statistics of an engine, with requests that have aged since it sent them."""
    if engine.stats is None:
        return None
    since_s = time.monotonic() - engine.stats_received_s
    aged = (replace(each, age_s=each.age_s + since_s) for each in engine.stats.sequences)
    return replace(engine.stats, sequences=tuple(aged))


def _draft_bytes(info: ModelInfo | None) -> int:
    return info.draft.size_bytes if info and info.draft else 0


def _is_on_gpu(resident: ResidentModel) -> bool:
    return "GPU" in (resident.info.processor if resident.info else "")


def _rss_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
