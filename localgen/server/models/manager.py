"""Model manager: load on demand, unload when idle, evict least recently used."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial

from localgen.backends.errors import (
    LocalgenError,
    ModelBusy,
    ModelNotFound,
    OutOfMemory,
    ServerUnavailable,
)
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.memory.load_limits import validate_load_options
from localgen.backends.model_info import DRAFT_KEYWORDS, LoadOptions, ModelInfo
from localgen.config import BadSetting, ServerSettings
from localgen.hub.models_file import models_file_version
from localgen.hub.packaged import default_model
from localgen.placement.backend_choice import Hardware, detect_hardware
from localgen.server.models.draft_choice import DraftChoice, resolve_draft_model
from localgen.server.models.engine_pool import EnginePool, OnLoad
from localgen.server.models.engine_process import (
    LLAMACPP_ENGINE,
    EngineCommand,
    EngineProcess,
    EngineStarter,
)
from localgen.server.models.memory_budget import MemoryBudget
from localgen.server.models.names import UniqueNames, resolve_named
from localgen.server.models.resident import (
    KeepAlive,
    ResidentModel,
    find_by_resolved_name,
    find_by_short_name,
)
from localgen.server.models.serve_options import ServeOptions
from localgen.server.models.swap_queue import DEFAULT_WAIT_S, MemoryWait, MustWait, SwapQueue


class ModelManager:
    """Owns all engine processes of a server. Not thread-safe.

    on_load: called after each load. serve_options: of `localgen serve`.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        engine_command: EngineCommand = LLAMACPP_ENGINE,
        spare: EngineProcess | None = None,
        resolve_file: Callable[..., ModelFile] = resolve_named,
        probe_hardware: Callable[[], Hardware] = detect_hardware,
    ) -> None:
        self._settings = settings
        self._resolve = resolve_file
        self._swap_queue = SwapQueue(lambda: self.residents, settings.max_queue)
        self._pool = EnginePool(
            settings,
            EngineStarter(engine_command, spare),
            self._swap_queue.notify,
            self._on_load_done,
        )
        self._memory_budget = MemoryBudget(
            settings,
            lambda: self._pool.memory_users,
            self._swap_queue.may_evict,
            self._pool.unload,
            probe_hardware,
        )
        self._names = UniqueNames()
        self._names_version = models_file_version()
        self._admission = asyncio.Lock()
        self._num_open = 0
        self._last_used_s = time.monotonic()
        self._closing = False
        self.serve_options = ServeOptions()
        self.on_load: OnLoad = lambda name, outcome, load_s: None

    @property
    def residents(self) -> tuple[ResidentModel, ...]:
        """Loaded and loading models, in load order."""
        return self._pool.residents

    @property
    def is_closing(self) -> bool:
        """True once the server is shutting down and rejects requests."""
        return self._closing

    @property
    def active_requests(self) -> int:
        """The number of requests that hold a model."""
        return sum(resident.num_users for resident in self.residents)

    def count_waiting(self) -> dict[str, int]:
        """Requests that wait for memory, by model name."""
        return self._swap_queue.count_waiting()

    @property
    def default_name(self) -> str:
        """The model of requests that name none; may be a path."""
        return self.serve_options.model or default_model()

    @contextlib.contextmanager
    def activity(self) -> Iterator[None]:
        """The server is not idle during the block."""
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            self._last_used_s = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds since the last use of any model; 0 during loads, requests and their waits."""
        loading = any(resident.info is None for resident in self.residents)
        return 0.0 if loading or self._num_open else time.monotonic() - self._last_used_s

    @contextlib.asynccontextmanager
    async def acquire(
        self,
        name: str | None,
        options: LoadOptions = LoadOptions(),
        on_progress: Callable[[ResidentModel], None] | None = None,
        keep_alive: KeepAlive | None = None,
        *,
        allow_paths: bool = False,
        deadline_s: float | None = None,
        on_wait: Callable[[str], None] = lambda reason: None,
    ) -> AsyncIterator[tuple[ResidentModel, ModelInfo]]:
        """Hold a model for the duration of the block, loading it if needed.

        name: None for the model of `localgen serve MODEL`, else the default model. keep_alive: new
        idle time of the model; None keeps the current one, initially that of the settings.
        allow_paths: accept a path as name; must be False for remote clients. deadline_s: until when
        to wait for memory of models in use and for the load (monotonic seconds), or None for
        DEFAULT_WAIT_S, and until it has ended. on_wait: see MemoryWait.

        Raises InvalidRequest for an invalid option, ModelNotFound, ModelBusy if it is loaded with
        other options, MemoryInUse and QueueFull if it cannot be loaded in time, TimedOut,
        OutOfMemory, LoadFailed.
        """
        validate_load_options(options)
        memory_deadline_s = deadline_s or time.monotonic() + DEFAULT_WAIT_S
        wait = MemoryWait(memory_deadline_s, on_wait, deadline_s)
        with self.activity():
            resident, info = await self._acquire(name, options, on_progress, allow_paths, wait)
            if keep_alive is not None:
                resident.keep_alive_s = keep_alive.seconds
            try:
                yield resident, info
            finally:
                self._release(resident)

    async def _acquire(
        self,
        name: str | None,
        options: LoadOptions,
        on_progress: Callable[[ResidentModel], None] | None,
        allow_paths: bool,
        wait: MemoryWait,
    ) -> tuple[ResidentModel, ModelInfo]:
        while True:
            wanted, may_be_path = (self.default_name, True) if name is None else (name, allow_paths)
            resident = await self._find_or_load(wanted, options, may_be_path, wait)
            if resident is None or resident not in self.residents:
                continue
            resident.num_users += 1
            try:
                info = await self._wait_until_loaded(resident, on_progress, wait)
                if info is None:
                    self._release(resident)
                    continue
                if options.draft not in (None, *DRAFT_KEYWORDS):
                    requested = await self._resolve_draft(resident.file, options.draft, allow_paths)
                    options = replace(options, draft=requested.option)
                if resident.can_reload_for(options):
                    resident.require_options(replace(options, ctx=None))
                    await self._reload(resident, options, wait)
                    self._release(resident)
                    continue
                resident.require_options(options)
                return resident, info
            except ModelBusy:
                self._release(resident)
                # an option that this machine cannot have is not one for another load
                await self._memory_budget.require_possible(resident.file, options)
                raise
            except BaseException:
                self._release(resident)
                raise

    async def _wait_until_loaded(
        self,
        resident: ResidentModel,
        on_progress: Callable[[ResidentModel], None] | None,
        wait: MemoryWait,
    ) -> ModelInfo | None:
        """Wait for a load. None: it ran out of memory, and there is room for another attempt."""
        try:
            return await resident.wait_until_loaded(on_progress, wait.load_deadline_s)
        except OutOfMemory as error:
            make_room = partial(self._make_room, resident, error)
            await self._swap_queue.run(resident.file, make_room, wait)
            return None

    async def _make_room(self, failed: ResidentModel, error: OutOfMemory) -> None:
        """Make room after a load, once for all requests that waited for it."""
        async with self._admission:
            if not failed.has_made_room:
                await self._pool.wait_for_exits()
                await self._memory_budget.make_room(failed.file, failed.placement, error)
                failed.has_made_room = True

    async def _reload(
        self, resident: ResidentModel, options: LoadOptions, wait: MemoryWait
    ) -> None:
        """Load a model again with the requested context, for its only user.

        If there is no memory for it, the model stays unloaded. Does nothing if it has got another
        user meanwhile. Raises OutOfMemory, MemoryInUse.
        """
        async with self._admission:
            if resident not in self.residents or not resident.can_reload_for(options):
                return
            await self._pool.unload(resident, "reloading it with a larger context")
        options = replace(resident.requested_options, ctx=options.ctx)
        start_load = partial(self._start_load_once, resident.file, options, allow_paths=True)
        reloaded = await self._swap_queue.run(resident.file, start_load, wait)
        if reloaded is not None:
            reloaded.keep_alive_s = resident.keep_alive_s
            reloaded.resolved_names |= resident.resolved_names

    def _release(self, resident: ResidentModel) -> None:
        resident.num_users -= 1
        resident.last_used_s = time.monotonic()
        if not resident.num_users:
            self._swap_queue.notify()

    async def unload(
        self, name: str, *, when_idle: bool = False, allow_paths: bool = False
    ) -> bool:
        """Unload a model immediately, even in use; with when_idle, once it has no requests.

        allow_paths: as in acquire(). Returns False if it is not loaded; raises InvalidRequest if
        the name is ambiguous.
        """
        found = await self.find_loaded(name, allow_paths)
        if found is None:
            return False
        if when_idle and not found.is_idle:
            found.keep_alive_s = 0.0
        else:
            reason = f"{found.file.name} was unloaded by a client, as by `localgen stop`"
            async with self._admission:  # its memory is free before another load is placed
                await self._pool.unload(found, reason)
        return True

    async def find_loaded(self, name: str, allow_paths: bool) -> ResidentModel | None:
        """The resident of a name. Raises InvalidRequest if the name is ambiguous."""
        self._forget_changed_names()
        found = find_by_resolved_name(self.residents, name, allow_paths)
        if found is not None:
            return found
        try:
            file = await self._resolve_file(name, allow_paths)
        except (ModelNotFound, BadSetting):  # BadSetting: an error in models.toml
            return find_by_short_name(self.residents, name, allow_paths)
        except LocalgenError:
            return None
        return next((r for r in self.residents if r.file.identity == file.identity), None)

    async def unload_expired(self) -> None:
        """Unload models that were idle for their keep-alive time. Call this periodically."""
        await self._pool.stop_expired_spare()
        for resident in self.residents:
            if not resident.has_expired():
                continue
            async with self._admission:
                if resident.has_expired():
                    await self._pool.unload(resident, f"{resident.file.name} was idle")

    def refuse_new_requests(self) -> None:
        """Reject requests and loads from now on, waiting ones too: the server is shutting down."""
        self._closing = True
        self._swap_queue.close()

    def cancel(self, request_id: str, account: str | None) -> bool:
        """Cancel a running or waiting generation request.

        account: of its owner, or None for any. Returns False if there is none.
        """
        return any(each.engine.cancel_request(request_id, account) for each in self.residents)

    def answer_now(self, request_id: str, account: str | None) -> bool:
        """End the reasoning of a running or waiting request; otherwise as cancel()."""
        return any(each.engine.answer_now(request_id, account) for each in self.residents)

    def fail_all(self, code: str, message: str) -> None:
        """Fail every request with this error."""
        for resident in self.residents:
            resident.engine.fail_all(code, message)

    async def close(self) -> None:
        """Stop all engine processes."""
        self.refuse_new_requests()
        await self._pool.close()

    async def _find_or_load(
        self, name: str, options: LoadOptions, allow_paths: bool, wait: MemoryWait
    ) -> ResidentModel | None:
        """Return the resident for a name; start loading it if needed. None: call it again."""
        if self._closing:
            raise ServerUnavailable("the server is shutting down: try again")
        version = self._forget_changed_names()
        resident = find_by_resolved_name(self.residents, name, allow_paths)
        if resident is not None and self._swap_queue.gives_way_to(resident) is None:
            resident.resolved_names.add((name, allow_paths))
            return resident
        try:
            file = resident.file if resident else await self._resolve_file(name, allow_paths)
        except ModelNotFound:
            # models that were loaded by path are listed by their short name
            resident = find_by_short_name(self.residents, name, allow_paths)
            if resident is None:
                raise
            file = resident.file
        file = self._names.claim(file, self.residents)
        start_load = partial(self._start_load_once, file, options, allow_paths)
        resident = await self._swap_queue.run(file, start_load, wait)
        if resident is not None and version == self._names_version:
            resident.resolved_names.add((name, allow_paths))
        return resident

    def _forget_changed_names(self) -> tuple[int, ...]:
        """Resolve the names again after models.toml has changed; returns its version."""
        version = models_file_version()
        if version != self._names_version:
            self._names_version = version
            for resident in self.residents:
                resident.resolved_names.clear()
        return version

    async def _resolve_file(self, name: str, allow_paths: bool) -> ModelFile:
        # in a thread: scanning a large cache on a slow disk takes time
        return await asyncio.to_thread(self._resolve, name, allow_paths=allow_paths)

    async def _resolve_draft(
        self, file: ModelFile, requested: str | None, allow_paths: bool
    ) -> DraftChoice:
        """Resolve the draft option of a model. requested: None uses the server default."""
        default = None if requested is not None else self._settings.draft
        # the server default may be a path, even for remote clients
        find = partial(self._resolve, allow_paths=allow_paths or requested is None)
        return await asyncio.to_thread(resolve_draft_model, requested, default, file, find)

    async def _start_load_once(
        self, file: ModelFile, options: LoadOptions, allow_paths: bool
    ) -> ResidentModel:
        """Return the resident of a file. Concurrent requests share one load."""
        options = await asyncio.to_thread(self.serve_options.complete, file, options)
        async with self._admission:
            for resident in self.residents:
                if resident.file.identity == file.identity:
                    self._swap_queue.require_turn(resident)
                    return resident
            await self._pool.wait_for_exits()
            drafting = await self._resolve_draft(file, options.draft, allow_paths)
            try:
                placement, need = await self._memory_budget.place_model(file, options, drafting)
            except (OutOfMemory, MustWait) as error:
                if drafting.file is None or not drafting.optional:
                    raise
                drafting = drafting.without_model(error.message)
                placement, need = await self._memory_budget.place_model(file, options, drafting)
            if self._closing:
                raise ServerUnavailable("the server is shutting down: try again")
            draft_choice = drafting.for_placement(placement)
            left = self._memory_budget.remaining_limit_bytes()
            resident = self._pool.start_load(file, placement, options, need, draft_choice, left)
            if self._settings.keep_model and file.identity == self.serve_options.identity:
                resident.keep_alive_s = None
            return resident

    def _on_load_done(self, name: str, outcome: str, load_s: float) -> None:
        self._last_used_s = time.monotonic()
        self.on_load(name, outcome, load_s)
