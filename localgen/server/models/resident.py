"""One model in memory, or on its way there; changed by the manager alone."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field, fields
from typing import Any

from localgen.backends.errors import ModelBusy
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import AUTO, LoadOptions, ModelInfo
from localgen.placement.backend_choice import Placement
from localgen.server.models.engine_client import Engine

# even with a keep-alive of 0 a client that has loaded a model gets to ask it
LEAST_IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """How long a model stays when idle; None: for ever."""

    seconds: float | None


@dataclass(slots=True, kw_only=True, eq=False)
class Resident:
    """users: requests that hold it. last_used_s: when the last one let go (monotonic).

    asked_as: names that were found to mean this file. keep_alive_s: its own idle time if
    one was asked for; None: for ever.
    """

    file: ModelFile
    placement: Placement
    engine: Engine
    asked: LoadOptions
    estimate_bytes: int
    loading: asyncio.Future[ModelInfo]
    asked_as: set[str] = field(default_factory=set)
    keep_alive_s: float | None
    users: int = 0
    last_used_s: float = field(default_factory=time.monotonic)

    @property
    def info(self) -> ModelInfo | None:
        """What was loaded; None while it is not, or if it failed."""
        if not self.loading.done() or self.loading.cancelled() or self.loading.exception():
            return None
        return self.loading.result()

    @property
    def id(self) -> str:
        """Twelve hex digits that stay the same for the same file."""
        return model_id(self.file)

    @property
    def state(self) -> str:
        return "loading" if self.info is None else "loaded"

    @property
    def idle(self) -> bool:
        """Whether it could go: loaded, and nobody uses it."""
        return self.info is not None and self.users == 0

    def seconds_left(self) -> float | None:
        """Seconds until it is unloaded if nothing uses it from now on; None: never."""
        if self.keep_alive_s is None:
            return None
        since = time.monotonic() if self.users or self.info is None else self.last_used_s
        return max(0.0, since + max(self.keep_alive_s, LEAST_IDLE_S) - time.monotonic())

    def require(self, asked: LoadOptions) -> None:
        """ModelBusy if an option was asked for that differs from the one in force."""
        info = self.loading.result()
        for option in fields(LoadOptions):
            wanted = getattr(asked, option.name)
            actual = getattr(info.options, option.name)
            # what was asked at first may have been rounded: asking the same again is no conflict
            if not _satisfied(option.name, wanted, actual, getattr(self.asked, option.name)):
                # a template is pages long
                long = option.name == "chat_template"
                values = (
                    "another chat_template" if long else f"{option.name} {actual}, not {wanted}"
                )
                raise ModelBusy(
                    f"{self.file.name} is loaded with {values}: "
                    f"`localgen stop {self.file.name}`, then try again",
                    param=option.name,
                )


def _satisfied(option: str, wanted: Any, actual: Any, asked: Any) -> bool:
    """Whether a loaded model is as wanted."""
    if wanted in (None, actual, asked):
        return True
    match option:
        case "ctx":  # a cap for each request
            return bool(wanted <= actual)
        case "backend" | "draft":
            return bool(wanted == AUTO)
        case "device":  # whichever GPU
            return bool(wanted == "cuda" and str(actual).startswith("cuda"))
        case "tp":  # of a backend that has no such option
            return bool(wanted == 1 and actual is None)
        case "dummy":
            return not wanted
    return False


def model_id(file: ModelFile) -> str:
    """Twelve hex digits that stay the same for the same file."""
    changed_ns = file.path.stat().st_mtime_ns if file.path.exists() else 0
    text = f"{file.path}\0{file.size_bytes}\0{changed_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
