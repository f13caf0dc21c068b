"""A loaded or loading model. Only the model manager changes it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from localgen.backends.errors import InvalidRequest, ModelBusy, TimedOut
from localgen.backends.formats.model_files import ModelFile, stem_of
from localgen.backends.memory.kv_sizing import require_trained_ctx
from localgen.backends.memory.load_limits import validate_cache_types
from localgen.backends.model_info import DRAFT_AUTO, LoadOptions, ModelInfo, option_flag
from localgen.backends.units import format_size
from localgen.placement.backend_choice import Placement
from localgen.server.models.engine_client import EngineClient

# even with a keep-alive of 0, a client that loads a model can send a request to it
MIN_IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """How long an idle model stays loaded. None: no limit."""

    seconds: float | None


@dataclass(slots=True, kw_only=True, eq=False)
class ResidentModel:
    """A model with its engine process.

    requested_options: options of the request that loaded it, the draft option resolved.
    file: by its unique name. id: that of the file when its load began. file_name: see plain_name.
    estimated_bytes: RAM estimate until it is loaded; 0 on a GPU. resolved_names: names that resolve
    to this file, each with allow_paths, because `a/b` is a path only for local clients.
    keep_alive_s: idle time until it is unloaded, or None for no limit. num_users: requests that
    hold it.
    created_s, loaded_s, last_used_s: when its load began and ended, and when the last request
    released it (monotonic seconds). has_made_room: its load ran out of memory, and room was made
    for another attempt. is_ending: it was removed, but its engine has not exited yet.
    """

    file: ModelFile
    placement: Placement
    engine: EngineClient
    requested_options: LoadOptions
    estimated_bytes: int
    load_future: asyncio.Future[ModelInfo]
    id: str = field(init=False)
    file_name: str = field(init=False)
    resolved_names: set[tuple[str, bool]] = field(default_factory=set)
    keep_alive_s: float | None
    num_users: int = 0
    has_made_room: bool = False
    is_ending: bool = False
    created_s: float = field(default_factory=time.monotonic)
    loaded_s: float = field(default_factory=time.monotonic)
    last_used_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        # once: the disk may change, or not answer any more
        self.id = model_id(self.file)
        self.file_name = plain_name(self.file)

    @property
    def info(self) -> ModelInfo | None:
        """Info on the loaded model; None while it loads or if the load failed."""
        if (
            not self.load_future.done()
            or self.load_future.cancelled()
            or self.load_future.exception()
        ):
            return None
        return self.load_future.result()

    @property
    def state(self) -> str:
        return "loading" if self.info is None else "loaded"

    @property
    def is_idle(self) -> bool:
        """True if it is loaded and no request holds it."""
        return self.info is not None and self.num_users == 0 and not self.is_ending

    def expires_in_s(self) -> float | None:
        """Seconds until it is unloaded if no request uses it, or None if never."""
        if self.keep_alive_s is None:
            return None
        since = time.monotonic() if self.num_users or self.info is None else self.last_used_s
        return max(0.0, since + max(self.keep_alive_s, MIN_IDLE_S) - time.monotonic())

    def has_expired(self) -> bool:
        """Return True if it was idle for its keep-alive time."""
        return self.is_idle and self.expires_in_s() == 0

    async def wait_until_loaded(
        self,
        on_progress: Callable[[ResidentModel], None] | None,
        deadline_s: float | None = None,
    ) -> ModelInfo:
        """Wait for the load. Cancelling the waiter does not cancel it. Raises its error.

        on_progress: called several times a second. deadline_s: when TimedOut is raised (monotonic
        seconds), or None if never.
        """
        while not self.load_future.done():
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise TimedOut(
                    f"the request timed out while {self.file.name} was loading, which continues: "
                    "try again later"
                )
            if on_progress is not None:
                on_progress(self)
            await asyncio.wait({self.load_future}, timeout=0.1)
        return self.load_future.result()

    def can_reload_for(self, requested: LoadOptions) -> bool:
        """Return True if a larger context is requested by the model's only user.

        Never if the size of the KV cache was chosen, or with a draft model, which may not fit then.
        """
        info, own, ctx = self.load_future.result(), self.requested_options, requested.ctx or 0
        is_larger = info.ctx < ctx <= info.ctx_train and ctx != own.ctx
        return is_larger and self.num_users == 1 and own.kv_tokens is None and info.draft is None

    def require_options(self, requested: LoadOptions) -> None:
        """Raise ModelBusy if requested options differ from the loaded model's.

        Raises InvalidRequest for a value that the model would not accept in another load either.
        """
        info, loaded = self.load_future.result(), self.requested_options
        differences = {
            option.name: _difference(option.name, wanted, actual)
            for option in fields(LoadOptions)
            # the value may have been rounded at load: to repeat the original request is no conflict
            if not _is_compatible(
                option.name,
                wanted := getattr(requested, option.name),
                actual := getattr(info.options, option.name),
                getattr(loaded, option.name),
            )
        }
        if "backend" not in differences:
            validate_cache_types(requested, self.placement.backend)
        if "ctx" in differences:
            require_trained_ctx(requested.ctx, info.ctx_train, self.file.name)
        if differences:
            raise ModelBusy(
                f"{self.file.name} is loaded {', '.join(differences.values())}: "
                f"`localgen stop {self.file.name}`, then try again",
                param=next(iter(differences)),
            )


def _difference(option: str, wanted: Any, actual: Any) -> str:
    """How the loaded model differs in one option: `with --threads 2, not 4`."""
    flag = option_flag(option)
    if option == "chat_template":  # do not print whole templates
        return f"with another {flag}"
    if wanted is True:
        return f"without {flag}"
    if wanted is False:
        return f"with {flag}"
    if option in ("kv_ram", "kv_disk"):
        wanted = format_size(wanted)
        actual = None if actual is None else format_size(actual)
    return f"without {flag} {wanted}" if actual is None else f"with {flag} {actual}, not {wanted}"


def _is_compatible(option: str, requested: Any, actual: Any, first_requested: Any) -> bool:
    """Return True if a requested option value is satisfied by the loaded model."""
    if requested in (None, actual, first_requested):
        return True
    match option:
        case "ctx":  # a limit per request
            return bool(requested <= actual)
        case "backend" | "draft":
            return bool(requested == DRAFT_AUTO)
        case "device":  # any GPU
            return bool(requested == "cuda" and str(actual).startswith("cuda"))
        case "tp":  # None: the backend has no tensor parallelism
            return bool(requested == 1 and actual is None)
        case "dummy":
            return not requested
    return False


def find_by_resolved_name(
    residents: Iterable[ResidentModel], name: str, allow_paths: bool
) -> ResidentModel | None:
    """Return the resident that a name was resolved to before, or with this id."""
    key = (name, allow_paths)
    return next((r for r in residents if key in r.resolved_names or name == r.id), None)


def find_by_short_name(
    residents: Iterable[ResidentModel], name: str, allow_paths: bool
) -> ResidentModel | None:
    """Return the resident with this name, else the one whose file has it.

    Raises InvalidRequest if there are several.
    """
    loaded = tuple(residents)
    found = [r for r in loaded if r.file.name == name]
    found = found or [r for r in loaded if r.file_name == name]
    if len(found) > 1:
        places = [str(r.file.path) if allow_paths else r.file.name for r in found]
        raise InvalidRequest(
            f"{len(found)} models are named {name}, use one of {', '.join(places)}"
        )
    return found[0] if found else None


def plain_name(file: ModelFile) -> str:
    """Name of a file or folder on the disk, which several models may have."""
    return stem_of(file.path) if file.is_gguf else file.path.absolute().name


def model_id(file: ModelFile) -> str:
    """Return 12 hex digits, a hash of path, size and modification time."""
    changed_ns = file.path.stat().st_mtime_ns if file.path.exists() else 0
    text = f"{file.path}\0{file.size_bytes}\0{changed_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
