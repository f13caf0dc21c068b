"""A server of one benchmark, which no other program uses."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from localgen.client import LocalClient
from localgen.config import ServerSettings

# after this time a server exits that a killed benchmark left behind
_KEEP_ALIVE_S = 900.0
_START_S, _POLL_S = 3.0, 0.05


@contextlib.contextmanager
def private_settings() -> Iterator[ServerSettings]:
    """Settings of a server in a temporary folder; it is shut down at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="localgen-bench-") as folder:
        settings = ServerSettings(
            runtime_dir=Path(folder) / "run",
            state_dir=Path(folder) / "state",
            keep_alive_s=_KEEP_ALIVE_S,
        )
        settings.create_dirs()
        try:
            yield settings
        finally:
            _shut_down(settings)


def _shut_down(settings: ServerSettings) -> None:
    """Stop the server, also one that was interrupted while it started."""
    deadline_s = time.monotonic() + _START_S
    with LocalClient(settings) as client:
        while settings.log_path.exists() and not client.shutdown():
            if time.monotonic() > deadline_s:
                break  # it has ended by itself
            time.sleep(_POLL_S)
