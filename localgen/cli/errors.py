"""Exit statuses, one per error code, and the crash log."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from localgen import __version__
from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import escape_control_chars
from localgen.config import ServerSettings

OTHER_ERROR = 1
USAGE_ERROR = 2
INTERNAL_ERROR = 70
INTERRUPTED = 130
BROKEN_PIPE = 141
EXIT_STATUS_BY_CODE = {
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
    "memory_in_use": 20,
    "mcp_server_failed": 21,
}
_DESCRIPTIONS = {
    0: "success",
    OTHER_ERROR: "other error",
    USAGE_ERROR: "invalid command line",
    **{status: code.replace("_", " ") for code, status in EXIT_STATUS_BY_CODE.items()},
    INTERNAL_ERROR: "internal error (see the crash log)",
    INTERRUPTED: "interrupted (Ctrl+C)",
    BROKEN_PIPE: "broken pipe",
}


def log_crash(error: Exception) -> Path:
    """Append the traceback of an error to the crash log and return the log's path."""
    path = _log_dir() / "crash.log"
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    trace = "".join(traceback.format_exception(error))
    text = f"{stamp} localgen {__version__} {' '.join(sys.argv[1:])}\n{trace}\n"
    # arguments may hold prompts; one write, because other commands may fail at the same time, and
    # the log only grows
    with open(path, "ab", buffering=0, opener=_open_private) as log:
        log.write(escape_control_chars(text).encode())
    return path


def _open_private(path: str, flags: int) -> int:
    fd = os.open(path, flags, 0o600)
    os.fchmod(fd, 0o600)  # an older version may have created it
    return fd


def _log_dir() -> Path:
    try:
        settings = ServerSettings.from_environment()
        settings.create_dirs()
        return settings.state_dir
    except (LocalgenError, OSError):
        return Path(tempfile.mkdtemp(prefix="localgen-"))


def exit_status(code: str) -> int:
    """Exit status of an error code."""
    return EXIT_STATUS_BY_CODE.get(code, OTHER_ERROR)


def exit_status_help() -> str:
    """List of exit statuses and their meanings, for `--help`."""
    rows = [f"{status} {meaning}" for status, meaning in _DESCRIPTIONS.items()]
    return "Exit status: " + ", ".join(rows) + "."
