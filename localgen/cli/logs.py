"""`localgen logs`."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from localgen.backends.terminal_text import escape_control_chars
from localgen.cli import tables
from localgen.client.launch import read_server_pid
from localgen.config import ServerSettings

_POLL_INTERVAL_S = 0.2
# a server's first line, with its process id
_LISTENS = re.compile(rb"server (\d+) listens on ")


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
    settings = ServerSettings.from_environment()
    path = settings.log_path
    # the server keeps one older file
    files = [file for file in (path.with_name(f"{path.name}.1"), path) if file.exists()]
    _print_place(path, files)
    _print_if_earlier(read_server_pid(settings), files)
    last: deque[bytes] = deque(maxlen=lines)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with contextlib.ExitStack() as opened:
        logs = [opened.enter_context(file.open("rb")) for file in files]
        for log in logs:
            last.extend(log)
        _write(decoder.decode(b"".join(last), final=not follow))
        if follow:
            _follow(new_text(path, logs[-1] if logs else None, decoder))


def _print_place(path: Path, files: list[Path]) -> None:
    if files:
        tables.print_notice(f"log: {' and '.join(map(str, files))}")
    else:
        tables.print_notice(
            f"no log at {path}: a server that a command such as `localgen run` starts writes it, "
            "`localgen serve` logs to its own terminal"
        )


def _print_if_earlier(running: int | None, files: list[Path]) -> None:
    """Say that the log is not that of the running server, which has a terminal."""
    logged = [pid for file in files for pid in _LISTENS.findall(file.read_bytes())]
    if running is not None and logged and int(logged[-1]) != running:
        tables.print_notice(
            f"the running server (pid {running}) logs to its own terminal: "
            "this is the log of an earlier one"
        )


def _follow(texts: Iterator[str]) -> None:
    for text in texts:
        _write(text)
        time.sleep(_POLL_INTERVAL_S)


def new_text(
    path: Path, log: BinaryIO | None, decoder: codecs.IncrementalDecoder
) -> Generator[str, None, None]:
    """Yield new text of a log file, following rotation, until interrupted.

    path: of the log and its successors.
    """
    while True:
        # before the read: the server writes no more to a file once it has renamed it
        newer = _open_newer(path, log)
        if log is not None:
            if os.fstat(log.fileno()).st_size < log.tell():
                log.seek(0)  # emptied
            yield decoder.decode(log.read(), final=newer is not None)
            if newer is not None:
                log.close()
        log = newer or log
        if log is None:
            yield ""


def _open_newer(path: Path, log: BinaryIO | None) -> BinaryIO | None:
    """Open the file of that name unless it is the log."""
    with contextlib.suppress(FileNotFoundError):
        if log is None or not os.path.samestat(path.stat(), os.fstat(log.fileno())):
            return path.open("rb")
    return None


def _write(text: str) -> None:
    sys.stdout.write(escape_control_chars(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
