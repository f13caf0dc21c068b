"""Load a model at server startup."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from localgen.backends.errors import LocalgenError
from localgen.config import ServerSettings
from localgen.server.models.manager import ModelManager
from localgen.server.models.resident import KeepAlive
from localgen.server.models.serve_options import ServeOptions
from localgen.server.requests.presets import NamedSettings

_log = logging.getLogger("localgen.server")


class Preload:
    """Loads the model of `localgen serve MODEL` at startup.

    options: its name, None to load nothing, and the load options. request_shutdown: called on
    failure.
    """

    def __init__(
        self,
        manager: ModelManager,
        options: ServeOptions,
        request_shutdown: Callable[[], None],
        settings: ServerSettings,
    ) -> None:
        """settings: with the default draft of the server, which the model must have."""
        self._manager, self._options, self._request_shutdown = manager, options, request_shutdown
        self._name, self._draft = options.model, settings.draft
        self._keep_alive = KeepAlive(None) if settings.keep_model else None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_pending(self) -> bool:
        """True until the load has ended."""
        return self._name is not None and not (self._task is not None and self._task.done())

    def start(self) -> None:
        """Start loading. The loaded model is evicted like any other, and kept as settings say."""
        if self._name is not None:
            self._task = asyncio.create_task(self._load(self._name))
            self._task.add_done_callback(self._on_load_done)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def raise_if_failed(self) -> None:
        """Raise the error of a failed load."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def _load(self, name: str) -> None:
        # of a preset or an adapter, as its requests will ask for it
        named = (await NamedSettings.find(name)).load_options(self._options.load)
        load = replace(named, draft=self._draft)
        acquired = self._manager.acquire(name, load, keep_alive=self._keep_alive, allow_paths=True)
        async with acquired as (resident, _):
            # when it is loaded again, too
            self._manager.serve_options = replace(
                self._options, load=named, identity=resident.file.identity
            )

    def _on_load_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        # the server was stopped during the load: not an error
        if self._manager.is_closing:
            self._task = None
            return
        reason = error.message if isinstance(error, LocalgenError) else error
        _log.error("cannot load %s, shutting down: %s", self._name, reason)
        self._request_shutdown()
