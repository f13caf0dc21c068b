"""Runs localgen as a program on a terminal of its own."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Mapping, Sequence


def run_on_terminal(
    command: Sequence[str], environment: Mapping[str, str], typed: str = ""
) -> tuple[int, str]:
    """Exit status of a command, and what it shows."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command, env=environment, stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    os.write(leader, typed.encode())
    shown = b"".join(iter(lambda: _read(leader), b""))
    os.close(leader)
    return process.wait(60), shown.decode()


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 1 << 16)
    except OSError:  # the other end is closed
        return b""
