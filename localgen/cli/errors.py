"""Exit codes: one for each kind of error, so that a script can tell them apart."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from pathlib import Path

from localgen import __version__
from localgen.backends.errors import LocalgenError
from localgen.config import Settings

OTHER_ERROR = 1
USAGE = 2
UNEXPECTED = 70
INTERRUPTED = 130
BROKEN_PIPE = 141
BY_ERROR_CODE = {
    "invalid_request": 3,
    "context_length_exceeded": 4,
    "queue_full": 5,
    "model_not_found": 6,
    "model_busy": 7,
    "load_failed": 8,
    "out_of_memory": 9,
    "engine_died": 10,
    "server_unavailable": 11,
    "bad_setting": 12,
    "timeout": 13,
    "hub_unavailable": 14,
    "access_denied": 15,
    "disk_full": 16,
    "download_failed": 17,
    "endpoint_unavailable": 18,
    "store_failed": 19,
}
_MEANINGS = {
    0: "done",
    OTHER_ERROR: "another error",
    USAGE: "wrong command line",
    **{status: code.replace("_", " ") for code, status in BY_ERROR_CODE.items()},
    UNEXPECTED: "a defect of localgen, written to its log",
    INTERRUPTED: "Ctrl+C",
    BROKEN_PIPE: "the reader of the output went away",
}


def record(error: Exception) -> Path:
    """Append an error's traceback to the log; gives the log."""
    path = _folder() / "defects.log"
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    trace = "".join(traceback.format_exception(error))
    with path.open("a", encoding="utf-8", errors="replace") as log:
        log.write(f"{stamp} localgen {__version__} {' '.join(sys.argv[1:])}\n{trace}\n")
    return path


def _folder() -> Path:
    try:
        settings = Settings.from_environment()
        settings.prepare()
        return settings.state_dir
    except (LocalgenError, OSError):
        return Path(tempfile.mkdtemp(prefix="localgen-"))


def status_of(code: str) -> int:
    """The exit status of an error's code."""
    return BY_ERROR_CODE.get(code, OTHER_ERROR)


def table() -> str:
    """Every exit status and its meaning, for `--help`."""
    rows = [f"{status} {meaning}" for status, meaning in _MEANINGS.items()]
    return "Exit status: " + ", ".join(rows) + "."
