"""`localgen logs`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from localgen.backends.terminal_text import escape_control_chars
from localgen.cli import tables
from localgen.config import ServerSettings

_POLL_INTERVAL_S = 0.2


def command(
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print new lines until Ctrl+C.")
    ] = False,
    lines: Annotated[
        int,
        typer.Option("-n", "--lines", metavar="<int>", min=0, help="Number of last lines."),
    ] = 100,
) -> None:
    """Print the log of the background server and its engines; its path goes to standard error.

    A server that `localgen serve` runs logs to its own terminal.
    """
    path = ServerSettings.from_environment().log_path
    # the server keeps one older file
    files = [file for file in (path.with_name(f"{path.name}.1"), path) if file.exists()]
    if files:
        tables.print_notice(f"log: {' and '.join(map(str, files))}")
    else:
        tables.print_notice(
            f"no log at {path}: a server that a command such as `localgen run` starts writes it, "
            "`localgen serve` logs to its own terminal"
        )
    last: deque[bytes] = deque(maxlen=lines)
    offset = 0
    for file in files:
        with file.open("rb") as log:
            last.extend(log)
            offset = log.tell() if file == path else 0
    _write(b"".join(last))
    if follow:
        _follow(path, offset)


def _follow(path: Path, offset: int) -> None:
    """Print for ever what is appended after an offset, also to a new file of that name."""
    while True:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as log:
            # a shorter file is a new one
            log.seek(offset if log.seek(0, os.SEEK_END) >= offset else 0)
            _write(log.read())
            offset = log.tell()
        time.sleep(_POLL_INTERVAL_S)


def _write(log: bytes) -> None:
    text = log.decode(errors="replace")
    sys.stdout.write(escape_control_chars(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
