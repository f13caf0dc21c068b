"""`localgen serve` over TCP with real engines, for foreign clients."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serving import ServerHarness, settings_in, short_folder, wait_until

from localgen.config import ServerSettings
from localgen.machine.python_process import python_environment


@dataclass(frozen=True)
class RealServer:
    url: str
    log: Path
    settings: ServerSettings


@contextmanager
def real_server(*arguments: str, **environment: str) -> Iterator[RealServer]:
    """Start a server. arguments, environment: in addition to those that every test needs."""
    with short_folder() as folder:
        settings = settings_in(folder)
        settings.create_dirs()
        log = folder / "log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "localgen.cli.main", "serve", "--port", "0", *arguments],
                env=python_environment() | settings.to_environment() | environment,
                stderr=stderr,
            )
        try:
            harness = ServerHarness(folder)
            wait_until(harness.healthy, 60)
            harness.http.close()
            found = re.search(r"listening on (http://\S+)", log.read_text())
            assert found is not None, log.read_text()
            yield RealServer(found[1], log, settings)
        finally:
            process.terminate()
            process.wait(20)
