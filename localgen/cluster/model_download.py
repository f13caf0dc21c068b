"""Models of a cluster that a machine lacks: downloaded there once, whichever replica is first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from localgen.backends.errors import ModelNotFound
from localgen.backends.model_info import DRAFT_KEYWORDS
from localgen.backends.units import format_size
from localgen.client.pullable_models import can_pull, pull_model
from localgen.cluster.config import ClusterConfig
from localgen.hub.packaged import SMOLLM2, default_model
from localgen.hub.resolve import expand_alias, resolve_model

# between two lines that tell how far a download is
_SAY_PERIOD_S = 10.0


def require_available(config: ClusterConfig) -> None:
    """Raise LocalgenError unless each model is installed here, or can be downloaded."""
    from localgen.hub.pull import plan_pull, require_disk_space

    for name in _names(config):
        if _is_missing(name) and expand_alias(name) != SMOLLM2:
            require_disk_space(plan_pull(name))


def ensure_installed(config: ClusterConfig, say: Callable[[str], None]) -> None:
    """Download each model that is not installed here. say: told how far that is.

    Processes of this machine share a download: one does it, and the others wait. Raises
    LocalgenError.
    """
    for name in _names(config):
        if _is_missing(name):
            pull_model(name, _Progress(name, say).update, say)
            say(f"{name} is downloaded")


def model_name(config: ClusterConfig) -> str:
    """The name by which clients know the model. Raises LocalgenError if there is no such model."""
    from localgen.hub.pull import plan_pull

    if config.command is not None:
        return config.model or ""
    if config.model is not None and _is_missing(config.model):
        return SMOLLM2 if expand_alias(config.model) == SMOLLM2 else plan_pull(config.model).name
    return resolve_model(config.model).name


def _names(config: ClusterConfig) -> Iterator[str]:
    if config.command is None:
        yield config.model or default_model()
        if config.load.draft is not None and config.load.draft not in DRAFT_KEYWORDS:
            yield config.load.draft


def _is_missing(name: str) -> bool:
    """True if a model has to be downloaded. Raises ModelNotFound if that is impossible."""
    try:
        resolve_model(name)
    except ModelNotFound:
        if not can_pull(name):
            raise
        return True
    return False


class _Progress:
    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self._said_s = 0.0

    def update(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAY_PERIOD_S:
            self._said_s = now_s
            self._say(f"{self._name}: {format_size(done)} of {format_size(total)} downloaded")
