"""A server of one benchmark, which no other program uses."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from localgen.client import LocalClient
from localgen.config import ServerSettings

# after this time a server exits that a killed benchmark left behind
_KEEP_ALIVE_S = 900.0


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
            with LocalClient(settings) as client:
                client.shutdown()
