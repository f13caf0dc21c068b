"""The processes of the soak: server, engine and helpers, found by their runtime folder."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil


@dataclass
class Sample:
    """Resident bytes of one process at a moment."""

    at_s: float
    bytes: int


@dataclass
class Watch:
    """All processes whose environment names the runtime folder, but for clients.

    memory: samples by (kind, pid).
    """

    runtime_dir: Path
    memory: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)

    def servers(self) -> list[psutil.Process]:
        return [process for process in self._ours() if _runs(process, "localgen.server")]

    def engines(self) -> list[psutil.Process]:
        return [process for process in self._ours() if _runs(process, "localgen.backends.")]

    def helpers(self) -> list[psutil.Process]:
        """Children of engines."""
        found: list[psutil.Process] = []
        for engine in self.engines():
            with contextlib.suppress(psutil.Error):
                found += engine.children(recursive=True)
        return found

    def all(self) -> list[psutil.Process]:
        """Everything but clients, zombies included."""
        return [one for one in self._ours() if not _runs(one, "soak_parts")]

    def sample(self, at_s: float) -> None:
        for kind, found in (("server", self.servers()), ("engine", self.engines())):
            for process in found:
                with contextlib.suppress(psutil.Error):
                    used = process.memory_info().rss
                    self.memory.setdefault((kind, process.pid), []).append(Sample(at_s, used))

    def kill_one(self, kind: str, source: random.Random) -> bool:
        """Kill a process of a kind with SIGKILL. Returns False if there is none."""
        found = {"server": self.servers, "engine": self.engines, "helper": self.helpers}[kind]()
        if not found:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            source.choice(found).kill()
        return True

    def _ours(self) -> Iterator[psutil.Process]:
        wanted = str(self.runtime_dir)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("LOCALGEN_RUNTIME_DIR") == wanted:
                    yield process


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        return any(module in part for part in process.cmdline())
    except psutil.Error:
        return False
