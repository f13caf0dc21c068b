"""The tag that Ollama clients append to names without one."""

from __future__ import annotations

LATEST_TAG = ":latest"


def without_latest(name: str) -> str:
    """Return the name without `:latest`."""
    while name.endswith(LATEST_TAG):
        name = name.removesuffix(LATEST_TAG)
    return name
