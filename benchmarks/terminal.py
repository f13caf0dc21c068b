"""Terminal programs as their users see them: started, typed into, read."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

import psutil

from localgen.config import ServerSettings
from localgen.machine.python_process import python_command, python_environment

_ESCAPES = re.compile(rb"\x1b(?:\[[0-9;?<>=]*[a-zA-Z$]|[()=>].?)")


class Screen:
    """A program of localgen on a pseudo-terminal of so many columns and rows."""

    def __init__(self, settings: ServerSettings, size: tuple[int, int], *command: str) -> None:
        columns, rows = size
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.started_s = time.monotonic()
        self._process = subprocess.Popen(
            python_command("localgen.cli.main", *command),
            env=python_environment() | settings.to_environment() | {"TERM": "xterm-256color"},
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.usage = psutil.Process(self._process.pid)
        self.received = 0

    def read(self, until_s: float, wanted: bytes | None = None) -> float | None:
        """Read what is painted; the moment at which `wanted` was, None: it was not."""
        seen = b""
        while (left_s := until_s - time.monotonic()) > 0:
            if not select.select([self._fd], [], [], left_s)[0]:
                break
            received = os.read(self._fd, 1 << 16)
            self.received += len(received)
            seen = (seen + _ESCAPES.sub(b"", received))[-20_000:]
            if wanted is not None and wanted in seen:
                return time.monotonic()
        return None

    def press(self, key: bytes) -> None:
        os.write(self._fd, key)

    def close(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._fd)
