"""Exit codes: one for each kind of error, so that a script can tell them apart."""

from __future__ import annotations

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


def status_of(code: str) -> int:
    """The exit status of an error's code."""
    return BY_ERROR_CODE.get(code, OTHER_ERROR)


def table() -> str:
    """Every exit status and its meaning, for `--help`."""
    rows = [f"{status} {meaning}" for status, meaning in _MEANINGS.items()]
    return "Exit status: " + ", ".join(rows) + "."
