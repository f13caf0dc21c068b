"""Which models are in memory: loaded on demand, unloaded when idle, swapped by LRU."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from localgen.backends.errors import (
    InvalidRequest,
    LocalgenError,
    ModelBusy,
    ModelNotFound,
    OutOfMemory,
    ServerUnavailable,
)
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import DRAFT_WORDS, Load, LoadOptions, ModelInfo
from localgen.config import Settings
from localgen.hub.resolve import BUILT_IN, require_name, resolve
from localgen.placement.backend_choice import Hardware, Placement, this_machine
from localgen.server.models.draft_choice import Drafting, find_draft
from localgen.server.models.engine_client import Engine, LoadCrashed
from localgen.server.models.engine_process import (
    EngineCommand,
    EngineProcess,
    cuda_command,
    llamacpp_command,
)
from localgen.server.models.memory_budget import Room
from localgen.server.models.resident import KeepAlive, Resident

# an engine process started before anyone asked waits this long for a model
SPARE_WAIT_S = 30.0
_log = logging.getLogger("localgen.server")


# told of each load: the model, `loaded` or the code of what went wrong, seconds that it took
OnLoad = Callable[[str, str, float], None]


class ModelManager:
    """Owns every engine process of a server. For one event loop. on_load: told of each load."""

    def __init__(
        self,
        settings: Settings,
        *,
        engine_command: EngineCommand = llamacpp_command,
        spare: EngineProcess | None = None,
        find: Callable[..., ModelFile] = resolve,
        look: Callable[[], Hardware] = this_machine,
    ) -> None:
        self._settings = settings
        self._engine_command = engine_command
        self._spare = spare
        self._started_s = time.monotonic()
        self._find = find
        self._residents: list[Resident] = []
        self._room = Room(settings, lambda: self._residents, self._remove, look)
        self._admission = asyncio.Lock()
        self._last_used_s = time.monotonic()
        self._closing = False
        self.on_load: OnLoad = lambda name, outcome, load_s: None

    @property
    def residents(self) -> tuple[Resident, ...]:
        """Models loaded or loading, in the order of loading."""
        return tuple(self._residents)

    @property
    def closing(self) -> bool:
        """Whether requests are refused because the server leaves."""
        return self._closing

    @property
    def active_requests(self) -> int:
        """Requests that hold a model."""
        return sum(resident.users for resident in self._residents)

    @property
    def idle_s(self) -> float:
        """Seconds since anything was asked of a model; 0 while something is."""
        loading = any(resident.info is None for resident in self._residents)
        return 0.0 if self.active_requests or loading else time.monotonic() - self._last_used_s

    @contextlib.asynccontextmanager
    async def using(
        self,
        name: str | None,
        options: LoadOptions = LoadOptions(),
        on_progress: Callable[[float], None] | None = None,
        keep_alive: KeepAlive | None = None,
        *,
        paths: bool = False,
    ) -> AsyncIterator[tuple[Resident, ModelInfo]]:
        """The model of that name, loaded if it is not, kept for as long as the block runs.

        keep_alive: how long it then stays; None: as it was, at first as the settings say.
        paths: whether the name may be a path, which is not for clients from other machines.

        Raises ModelNotFound, ModelBusy, OutOfMemory, LoadFailed.
        """
        if name is not None and not paths:
            require_name(name)
        resident, info = await self._hold(name, options, on_progress, paths)
        if keep_alive is not None:
            resident.keep_alive_s = keep_alive.seconds
        try:
            yield resident, info
        finally:
            self._release(resident)

    async def _hold(
        self,
        name: str | None,
        options: LoadOptions,
        on_progress: Callable[[float], None] | None,
        paths: bool,
    ) -> tuple[Resident, ModelInfo]:
        while True:
            resident = await self._resident(BUILT_IN if name is None else name, options, paths)
            resident.users += 1
            try:
                info = await self._loaded(resident, on_progress)
                if options.draft not in (None, *DRAFT_WORDS):
                    asked = await self._drafting(resident.file, options.draft, paths)
                    options = replace(options, draft=asked.asked)
                resident.require(options)
                return resident, info
            except OutOfMemory:
                # the engine knows better than our estimate: give it what idle models hold
                self._release(resident)
                if not await self._room.evict_one(resident.file, resident.placement.gpu):
                    raise
            except BaseException:
                self._release(resident)
                raise

    def _release(self, resident: Resident) -> None:
        resident.users -= 1
        resident.last_used_s = self._last_used_s = time.monotonic()

    async def unload(self, name: str, *, when_idle: bool = False) -> bool:
        """Unload a model now, in use or not, or as soon as nobody uses it; False if it is not
        loaded. InvalidRequest: two are called that."""
        found = self._asked_as(name) or self._called(name)
        if found is None:
            try:
                path = (await self._locate(name, paths=True)).path
            except LocalgenError:
                return False
            found = next((r for r in self._residents if r.file.path == path), None)
        if found is None:
            return False
        if when_idle and not found.idle:
            found.keep_alive_s = 0.0
        else:
            await self._remove(found, f"{found.file.name} was stopped by `localgen stop`")
        return True

    def forget_name(self, name: str) -> None:
        """A name may mean another model from now on."""
        for resident in self._residents:
            resident.asked_as.discard(name)

    async def expire(self) -> None:
        """Unload what nobody used for the keep-alive time; to be called now and then."""
        if self._spare and time.monotonic() - self._started_s > SPARE_WAIT_S:
            await self._drop_spare()
        for resident in self.residents:
            if resident.idle and resident.seconds_left() == 0:
                await self._remove(resident, f"{resident.file.name} was idle")

    def refuse_new(self) -> None:
        """From now on nothing is loaded and no request accepted: the server leaves."""
        self._closing = True

    def cancel(self, request_id: str) -> bool:
        """End a running or waiting request for text as cancelled; False: there is none."""
        return any(resident.engine.end(request_id) for resident in self._residents)

    def fail_all(self, code: str, message: str) -> None:
        """End every running request with this error."""
        for resident in self._residents:
            resident.engine.fail_all(code, message)

    async def close(self) -> None:
        """End every engine process."""
        self.refuse_new()
        await self._drop_spare()
        ending = [self._remove(resident, "the server ends") for resident in self.residents]
        await asyncio.gather(*ending)

    async def _resident(self, name: str, options: LoadOptions, paths: bool) -> Resident:
        """The resident that a name means, its loading begun if need be."""
        if self._closing:
            raise ServerUnavailable("the server is shutting down: try again")
        resident = self._asked_as(name)
        if resident is None:
            try:
                resident = await self._admit(await self._locate(name, paths), options, paths)
            except ModelNotFound:
                # what was loaded by its path is listed by its short name
                resident = self._called(name)
                if resident is None:
                    raise
        resident.asked_as.add(name)
        return resident

    def _asked_as(self, name: str) -> Resident | None:
        return next((r for r in self._residents if name in r.asked_as or name == r.id), None)

    def _called(self, name: str) -> Resident | None:
        """The only resident of that short name, which several files may have."""
        found = [r for r in self._residents if r.file.name == name]
        if len(found) > 1:
            paths = ", ".join(str(r.file.path) for r in found)
            raise InvalidRequest(f"{len(found)} models are called {name}, name one: {paths}")
        return found[0] if found else None

    async def _locate(self, name: str, paths: bool) -> ModelFile:
        # in a thread: the cache may be large, its disk slow
        return await asyncio.to_thread(self._find, name, paths=paths)

    async def _drafting(self, file: ModelFile, asked: str | None, paths: bool) -> Drafting:
        """What drafts for a model. asked: None: nothing was, but the server may have its usual."""
        usual = None if asked is not None else self._settings.draft
        # what the settings say is the user's own, wherever the request comes from
        find = partial(self._find, paths=paths or asked is None)
        return await asyncio.to_thread(find_draft, asked, usual, file, find)

    async def _admit(self, file: ModelFile, options: LoadOptions, paths: bool) -> Resident:
        """The resident of a file, begun if there is none: one load, however many ask."""
        async with self._admission:
            for resident in self._residents:
                if resident.file.path == file.path:
                    return resident
            drafting = await self._drafting(file, options.draft, paths)
            try:
                placement, need = await self._room.make_for(file, options, drafting)
            except (OutOfMemory, ModelBusy) as error:
                if drafting.file is None or not drafting.optional:
                    raise
                drafting = drafting.without(error.message)
                placement, need = await self._room.make_for(file, options, drafting)
            if self._closing:
                raise ServerUnavailable("the server is shutting down: try again")
            return self._begin(file, placement, options, need, drafting.on(placement))

    def _begin(
        self,
        file: ModelFile,
        placement: Placement,
        options: LoadOptions,
        need: int,
        drafting: Drafting,
    ) -> Resident:
        asked = replace(options, draft=drafting.asked)
        options = replace(options, draft=drafting.in_force)
        if len(placement.gpus) == 1:  # of several, each rank takes its own
            options = replace(options, device=f"cuda:{placement.gpus[0].index}")
        for name in ("max_queue", "parallel"):
            if getattr(options, name) is None:
                options = replace(options, **{name: getattr(self._settings, name)})
        request = Load(
            file.name, str(file.path), options, self._room.limit_bytes(), drafting.message
        )
        resident = Resident(
            file=file,
            placement=placement,
            engine=self._engine(file, placement),
            asked=asked,
            estimate_bytes=need,
            keep_alive_s=self._settings.keep_alive_s,
            loading=asyncio.get_running_loop().create_future(),
        )
        resident.loading = asyncio.create_task(self._load(request, resident, drafting.note))
        resident.loading.add_done_callback(lambda task: self._finish_load(resident, task))
        self._residents.append(resident)
        _log.info("loading %s from %s (process %d)", file.name, file.path, resident.engine.pid)
        return resident

    def _engine(self, file: ModelFile, placement: Placement) -> Engine:
        engine = Engine(self._process(placement), file.name, lambda: self._bury(engine))
        return engine

    def _bury(self, engine: Engine) -> None:
        """An engine has died: forget its model, unless a load is about to try again."""
        for resident in self.residents:
            if resident.engine is engine and resident.loading.done():
                self._forget(resident)

    async def _load(self, request: Load, resident: Resident, note: str) -> ModelInfo:
        """Load in the resident's engine. note: what is to be told of it, if anything."""
        info = await self._load_somehow(request, resident)
        reason = resident.placement.reason
        return replace(info, notes=(*info.notes, *([note] if note else [])), backend_reason=reason)

    async def _load_somehow(self, request: Load, resident: Resident) -> ModelInfo:
        """The same, where code that crashes on this processor gets a second try without the layouts
        that are made for it."""
        placement = resident.placement
        try:
            return await resident.engine.load(request)
        except LoadCrashed as crash:
            tried = request.options.repack is not None or placement.backend != "llamacpp"
            if tried or resident not in self._residents:
                raise
            _log.warning("%s: trying again without repacking", crash)
            options = replace(request.options, repack=False)
            resident.engine = self._engine(resident.file, placement)
            info = await resident.engine.load(replace(request, options=options))
            note = (
                "this build of llama.cpp crashes with weights repacked for this CPU: they are used "
                "as they are, which is slower; `make clean` and `make chat` build one that does not"
            )
            return replace(info, notes=(*info.notes, note))

    def _process(self, placement: Placement) -> EngineProcess:
        if placement.backend == "cuda":
            return EngineProcess.start(cuda_command)
        spare, self._spare = self._spare, None
        if spare is not None and spare.running():
            return spare
        return EngineProcess.start(self._engine_command)

    def _finish_load(self, resident: Resident, task: asyncio.Future[ModelInfo]) -> None:
        self._last_used_s = resident.last_used_s = time.monotonic()
        if task.cancelled() or (error := task.exception()) is not None:
            self._forget(resident)
            reason = "cancelled" if task.cancelled() else error
            _log.error("%s was not loaded: %s", resident.file.name, reason)
            code = "cancelled" if task.cancelled() else getattr(error, "code", LocalgenError.code)
            self.on_load(resident.file.name, code, 0.0)
            return
        self.on_load(resident.file.name, "loaded", task.result().load_ms / 1e3)
        _log.info("%s is loaded (%.0f ms)", resident.file.name, task.result().load_ms)

    async def _loaded(
        self, resident: Resident, on_progress: Callable[[float], None] | None
    ) -> ModelInfo:
        """Wait for a load, which goes on whoever stops waiting."""
        while not resident.loading.done():
            if on_progress is not None:
                on_progress(resident.engine.progress)
            await asyncio.wait({resident.loading}, timeout=0.1)
        return resident.loading.result()

    async def _remove(self, resident: Resident, reason: str) -> None:
        self._forget(resident)
        _log.info("unloading: %s", reason)
        await resident.engine.stop(reason)

    def _forget(self, resident: Resident) -> None:
        if resident in self._residents:
            self._residents.remove(resident)

    async def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.sock.close()
            await spare.end(1.0)
            if spare.process.stdout is not None:
                spare.process.stdout.close()
