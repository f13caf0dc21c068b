"""huggingface_hub, with our settings in place before it reads its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

# it reads these once, when it is imported
VARIABLES = ("HF_TOKEN", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE")


_BLOCK_BYTES = 1 << 18


def hub() -> ModuleType:
    """The library, imported late: most commands do without it."""
    for variable in VARIABLES:
        ours = os.environ.get(f"LOCALGEN_{variable}")
        if ours:
            os.environ[variable] = ours
    import huggingface_hub
    from huggingface_hub import constants

    # it counts and keeps whole blocks only, and 10 MB are ten seconds of a slow line
    constants.DOWNLOAD_CHUNK_SIZE = _BLOCK_BYTES
    return huggingface_hub


def cache_folder() -> Path:
    """Where models lie."""
    hub()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def host() -> str:
    """The hub's address without its scheme, as messages name it."""
    hub()
    from huggingface_hub import constants

    return constants.ENDPOINT.partition("://")[2]


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids asking the hub."""
    hub()
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def repo_folder(repo: str) -> Path:
    """Where the cache has, or would have, a repository of models."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"


class _Retelling(logging.Handler):
    """Passes on what the library says while it waits, in a line that has no addresses."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith(("Rate limited", "Retrying")):
            self._say(f"{host()} is busy or out of reach: {text[0].lower()}{text[1:]}")
        elif "Trying to resume" in text:
            self._say("the connection broke, going on from where it was")


@contextmanager
def talking(say: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, the library draws no bars and its warnings go to say."""
    hub()
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        disable_progress_bars,
        enable_progress_bars,
    )

    logger = logging.getLogger("huggingface_hub")
    handlers, propagates = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [_Retelling(say)], False
    disable_progress_bars()
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagates
        enable_progress_bars()
