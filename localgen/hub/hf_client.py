"""Import and configure huggingface_hub."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from localgen.backends.errors import DiskFull as DiskFull
from localgen.backends.errors import LocalgenError

# shows a line to the user
Notify = Callable[[str], None]
# read once, when huggingface_hub is imported
HF_VARIABLES = ("HF_TOKEN", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE")
_BLOCK_BYTES = 1 << 18
# of the folders of models in the cache
REPO_PREFIX = "models--"


class HubUnavailable(LocalgenError):
    """The hub cannot be reached or its response is invalid."""

    code = "hub_unavailable"


class AccessDenied(LocalgenError):
    """The repository is private or gated, or a server requires an API key."""

    code = "access_denied"


class DownloadFailed(LocalgenError):
    """A downloaded file does not match the hub's description, or cannot be written."""

    code = "download_failed"


def import_huggingface_hub() -> ModuleType:
    """Import huggingface_hub with our settings; late, because most commands do not need it."""
    for variable in HF_VARIABLES:
        ours = os.environ.get(f"LOCALGEN_{variable}")
        if ours:
            os.environ[variable] = ours
    # the HTTP library's own command line, which would import click and rich
    sys.modules.setdefault("httpx2._main", None)  # type: ignore[arg-type]
    # its logging module adds a handler when it is imported: do that before forward_warnings
    import huggingface_hub.utils.logging
    from huggingface_hub import constants

    # progress and resume work in whole chunks; the default of 10 MB is ten seconds on a slow line
    constants.DOWNLOAD_CHUNK_SIZE = _BLOCK_BYTES
    return huggingface_hub


def cache_folder() -> Path:
    """The cache folder that huggingface_hub uses, or will use when it is imported."""
    # another thread may be importing it
    folder = getattr(sys.modules.get("huggingface_hub.constants"), "HF_HUB_CACHE", None)
    return resolve_cache_folder() if folder is None else Path(folder).expanduser()


def resolve_cache_folder() -> Path:
    """The cache folder, resolved from the environment as huggingface_hub does."""
    folder = _env("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if folder:
        return Path(os.path.expandvars(folder)).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = _env("HF_HOME") or f"{base}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def _env(name: str) -> str | None:
    return os.environ.get(f"LOCALGEN_{name}") or os.environ.get(name)


def hub_url() -> str:
    """The hub's address, for links."""
    import_huggingface_hub()
    from huggingface_hub import constants

    return constants.ENDPOINT


def hub_host() -> str:
    """The hub's address without its scheme, for messages."""
    return hub_url().partition("://")[2]


def repo_folder(repo: str) -> Path:
    """Cache folder of a model repository, which may not exist."""
    return cache_folder() / f"{REPO_PREFIX}{repo.replace('/', '--')}"


def repo_name(folder: Path) -> str:
    """Name `user/repo` of a model's folder in the cache."""
    return folder.name.removeprefix(REPO_PREFIX).replace("--", "/")


class _WarningForwarder(logging.Handler):
    """Forwards this thread's retry and rate-limit warnings of huggingface_hub as notices."""

    def __init__(self, notify: Notify) -> None:
        super().__init__(logging.WARNING)
        self._notify = notify
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread != self._thread:
            return
        text = record.getMessage()
        if text.startswith(("Rate limited", "Retrying")):
            self._notify(f"{hub_host()} is busy or unreachable: {text[0].lower()}{text[1:]}")
        elif "Trying to resume" in text:
            self._notify("the connection was lost, resuming the download")


class _QuietLibrary:
    """Silences huggingface_hub's logger and progress bars, which all threads share.

    They are silent while any thread has a handler registered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handlers: list[logging.Handler] = []
        self._saved: tuple[list[logging.Handler], bool] = ([], True)

    def begin(self, handler: logging.Handler) -> None:
        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        logger = logging.getLogger("huggingface_hub")
        with self._lock:
            if not self._handlers:
                self._saved = logger.handlers, logger.propagate
                disable_progress_bars()
            self._handlers = [*self._handlers, handler]
            logger.handlers, logger.propagate = self._handlers, False

    def end(self, handler: logging.Handler) -> None:
        from huggingface_hub.utils import enable_progress_bars  # type: ignore[attr-defined]

        logger = logging.getLogger("huggingface_hub")
        with self._lock:
            self._handlers = [other for other in self._handlers if other is not handler]
            logger.handlers, logger.propagate = self._handlers, False
            if not self._handlers:
                logger.handlers, logger.propagate = self._saved
                enable_progress_bars()


_quiet_library = _QuietLibrary()


@contextmanager
def forward_warnings(notify: Notify) -> Iterator[None]:
    """Within the block, disable progress bars and send this thread's warnings to `notify`."""
    import_huggingface_hub()
    handler = _WarningForwarder(notify)
    _quiet_library.begin(handler)
    try:
        yield
    finally:
        _quiet_library.end(handler)
