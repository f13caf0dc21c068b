"""One model in memory, or on its way there; changed by the manager alone."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import dataclass, field, fields
from typing import Any

from localgen.backends.errors import ModelBusy
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import DRAFT_AUTO, LoadOptions, ModelInfo
from localgen.placement.backend_choice import Placement
from localgen.server.models.engine_client import EngineClient

# even with a keep-alive of 0 a client that has loaded a model gets to ask it
MIN_IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """How long a model stays when idle; None: for ever."""

    seconds: float | None


@dataclass(slots=True, kw_only=True, eq=False)
class ResidentModel:
    """num_users: requests that hold it. last_used_s: when the last one let go (monotonic).

    resolved_names: names that were found to mean this file. keep_alive_s: its own idle time if
    one was asked for; None: for ever.
    """

    file: ModelFile
    placement: Placement
    engine: EngineClient
    requested_options: LoadOptions
    estimated_bytes: int
    load_future: asyncio.Future[ModelInfo]
    resolved_names: set[str] = field(default_factory=set)
    keep_alive_s: float | None
    num_users: int = 0
    last_used_s: float = field(default_factory=time.monotonic)

    @property
    def info(self) -> ModelInfo | None:
        """What was loaded; None while it is not, or if it failed."""
        if (
            not self.load_future.done()
            or self.load_future.cancelled()
            or self.load_future.exception()
        ):
            return None
        return self.load_future.result()

    @property
    def id(self) -> str:
        """Twelve hex digits that stay the same for the same file."""
        return model_id(self.file)

    @property
    def state(self) -> str:
        return "loading" if self.info is None else "loaded"

    @property
    def is_idle(self) -> bool:
        """Whether it could go: loaded, and nobody uses it."""
        return self.info is not None and self.num_users == 0

    def expires_in_s(self) -> float | None:
        """Seconds until it is unloaded if nothing uses it from now on; None: never."""
        if self.keep_alive_s is None:
            return None
        since = time.monotonic() if self.num_users or self.info is None else self.last_used_s
        return max(0.0, since + max(self.keep_alive_s, MIN_IDLE_S) - time.monotonic())

    def require_options(self, requested: LoadOptions) -> None:
        """ModelBusy if an option was asked for that differs from the one in force."""
        info = self.load_future.result()
        for option in fields(LoadOptions):
            wanted = getattr(requested, option.name)
            actual = getattr(info.options, option.name)
            # what was asked at first may have been rounded: asking the same again is no conflict
            if not _is_compatible(
                option.name, wanted, actual, getattr(self.requested_options, option.name)
            ):
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


def _is_compatible(option: str, requested: Any, actual: Any, first_requested: Any) -> bool:
    """Whether a loaded model is as wanted."""
    if requested in (None, actual, first_requested):
        return True
    match option:
        case "ctx":  # a cap for each request
            return bool(requested <= actual)
        case "backend" | "draft":
            return bool(requested == DRAFT_AUTO)
        case "device":  # whichever GPU
            return bool(requested == "cuda" and str(actual).startswith("cuda"))
        case "tp":  # of a backend that has no such option
            return bool(requested == 1 and actual is None)
        case "dummy":
            return not requested
    return False


def model_id(file: ModelFile) -> str:
    """Twelve hex digits that stay the same for the same file."""
    changed_ns = file.path.stat().st_mtime_ns if file.path.exists() else 0
    text = f"{file.path}\0{file.size_bytes}\0{changed_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
