"""The engines of a server: load models, stop engines, count their memory until they are gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from localgen.backends.engine_stats import SAVE_TIMEOUT_S
from localgen.backends.errors import LoadFailed, LocalgenError
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import LoadOptions, ModelInfo, ModelLoadRequest
from localgen.config import ServerSettings
from localgen.placement.backend_choice import Placement
from localgen.server.models import engine_pool
from localgen.server.models.draft_choice import DraftChoice
from localgen.server.models.engine_client import EngineClient
from localgen.server.models.engine_process import EngineStarter
from localgen.server.models.model_load import build_load_request, load_model
from localgen.server.models.resident import ResidentModel

# how long others wait for an engine to exit: it is killed 3 s after it should have saved its
# prefixes, which has no effect while the system waits for a disk or a driver that hangs
EXIT_WAIT_S = SAVE_TIMEOUT_S + 5.0
_log = logging.getLogger("localgen.server")

# (model name, `loaded` or an error code, load time in seconds)
OnLoad = Callable[[str, str, float], None]


@dataclass(frozen=True, slots=True)
class _Exit:
    """An engine that ends. deadline_s: until when others wait for it (monotonic seconds)."""

    task: asyncio.Task[None]
    deadline_s: float


class EnginePool:
    """Owns the models with their engines. Not thread-safe.

    on_change: called when a model was loaded or removed, and when its memory is free. on_load:
    called after each load.
    """

    def __init__(
        self,
        settings: ServerSettings,
        starter: EngineStarter,
        on_change: Callable[[], None],
        on_load: OnLoad,
    ) -> None:
        self._settings = settings
        self._starter = starter
        self._on_change = on_change
        self._on_load = on_load
        self._residents: list[ResidentModel] = []
        self._exits: dict[ResidentModel, _Exit] = {}

    @property
    def residents(self) -> tuple[ResidentModel, ...]:
        """Loaded and loading models, in load order."""
        return tuple(self._residents)

    @property
    def memory_users(self) -> tuple[ResidentModel, ...]:
        """Models that take memory: residents, and those whose engine has not exited yet."""
        return (*self._residents, *self._exits)

    def start_load(
        self,
        file: ModelFile,
        placement: Placement,
        options: LoadOptions,
        required_bytes: int,
        draft_choice: DraftChoice,
        limit_bytes: int | None,
    ) -> ResidentModel:
        """Start to load a model. limit_bytes: see build_load_request."""
        settings = self._settings
        request = build_load_request(file, placement, options, draft_choice, settings, limit_bytes)
        resident = ResidentModel(
            file=file,
            placement=placement,
            engine=self._start_engine(file, placement),
            requested_options=replace(options, draft=draft_choice.option),
            estimated_bytes=required_bytes,
            keep_alive_s=settings.keep_alive_s,
            load_future=asyncio.get_running_loop().create_future(),
        )
        resident.load_future = asyncio.create_task(self._load(request, resident, draft_choice.note))
        resident.load_future.add_done_callback(lambda task: self._on_load_done(resident, task))
        self._residents.append(resident)
        _log.info("loading %s from %s (process %d)", file.name, file.path, resident.engine.pid)
        return resident

    def _start_engine(self, file: ModelFile, placement: Placement) -> EngineClient:
        try:
            process = self._starter.start(placement.backend)
        except OSError as error:
            raise LoadFailed(
                f"cannot load {file.name}: its engine process does not start: {error}"
            ) from error
        engine = EngineClient(process, file.name, lambda: self._on_engine_death(engine))
        return engine

    def _on_engine_death(self, engine: EngineClient) -> None:
        """Remove the model of a dead engine, unless its load may be retried."""
        for resident in self.residents:
            if resident.engine is engine and resident.load_future.done():
                self._remove(resident, engine.wait_until_exited)

    async def _load(
        self, request: ModelLoadRequest, resident: ResidentModel, note: str
    ) -> ModelInfo:
        """Load the model in the resident's engine. note: appended to the notes of ModelInfo."""
        try:
            info = await load_model(
                request,
                resident,
                lambda: self._start_engine(resident.file, resident.placement),
                lambda: resident in self._residents,
            )
        except BaseException:
            # before a request that waited for it tries again
            self._remove(resident, resident.engine.wait_until_exited)
            raise
        resident.loaded_s = resident.last_used_s = time.monotonic()
        return replace(info, notes=(*info.notes, note)) if note else info

    def _on_load_done(self, resident: ResidentModel, task: asyncio.Future[ModelInfo]) -> None:
        self._on_change()
        if task.cancelled() or (error := task.exception()) is not None:
            self._remove(resident, resident.engine.wait_until_exited)
            reason = "cancelled" if task.cancelled() else error
            _log.error("%s failed to load: %s", resident.file.name, reason)
            code = "cancelled" if task.cancelled() else getattr(error, "code", LocalgenError.code)
            self._on_load(resident.file.name, code, 0.0)
            return
        self._on_load(resident.file.name, "loaded", task.result().load_ms / 1e3)
        _log.info("%s is loaded (%.0f ms)", resident.file.name, task.result().load_ms)

    async def unload(self, resident: ResidentModel, reason: str) -> None:
        """Remove a model, stop its engine, and wait for its exit, at most EXIT_WAIT_S."""
        if resident in self._residents:
            _log.info("unloading: %s", reason)
            self._remove(resident, partial(resident.engine.stop, reason))
        await self.wait_for_exits()

    def _remove(
        self, resident: ResidentModel, end: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Remove a model. Its memory counts until `end`, which ends its engine, has returned."""
        if resident not in self._residents:
            return
        self._residents.remove(resident)
        resident.is_ending = True
        task = asyncio.create_task(end())
        self._exits[resident] = _Exit(task, time.monotonic() + engine_pool.EXIT_WAIT_S)
        task.add_done_callback(lambda _: self._on_exit(resident))
        self._on_change()

    def _on_exit(self, resident: ResidentModel) -> None:
        del self._exits[resident]
        self._on_change()

    async def wait_for_exits(self) -> None:
        """Wait until all ending engines have exited, for each at most EXIT_WAIT_S."""
        for exit_ in tuple(self._exits.values()):
            left_s = exit_.deadline_s - time.monotonic()
            if left_s > 0:
                await asyncio.wait({exit_.task}, timeout=left_s)

    async def stop_expired_spare(self) -> None:
        """Stop a spare engine that was not used. Call this periodically."""
        await self._starter.stop_expired_spare()

    async def close(self) -> None:
        """Stop all engines; those that do not exit in time have been killed."""
        await self._starter.stop_spare()
        reason = "the server is shutting down"
        await asyncio.gather(*(self.unload(resident, reason) for resident in self.residents))
        await self.wait_for_exits()
