"""Errors shown to the user: one sentence that states the problem and the fix."""

from __future__ import annotations

import errno

# what ContextExceeded advises by default; a chat knows more
SHORTEN_PROMPT = "shorten the prompt"
DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


class LocalgenError(Exception):
    """Base class of all errors shown to the user.

    code: stable identifier, used as the `code` of API errors and to look up the CLI exit code.
    message: lone surrogates, of names that are not UTF-8, are escaped: any message can be encoded.
    param: the invalid request field, if any.
    """

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        self.message = message.encode("utf-8", "backslashreplace").decode()
        super().__init__(self.message)
        self.param = param


class InvalidRequest(LocalgenError):
    """The request is invalid: an unknown field, a value out of range, or conflicting values."""

    code = "invalid_request"


class ContextExceeded(LocalgenError):
    """The prompt does not fit in the context; the message states both numbers."""

    code = "context_length_exceeded"


class QueueFull(LocalgenError):
    """The request queue is full; the client should retry later."""

    code = "queue_full"


class ModelNotFound(LocalgenError):
    """No model or file of that name exists."""

    code = "model_not_found"


class NotFound(InvalidRequest):
    """Nothing of that id exists."""

    code = "not_found"


class ModelBusy(LocalgenError):
    """The model is already loaded with other options, or is in use and cannot be deleted."""

    code = "model_busy"


class MemoryInUse(LocalgenError):
    """Models in use hold the memory that the model needs; the client should retry later."""

    code = "memory_in_use"


class LoadFailed(LocalgenError):
    """The model could not be loaded; the message names the file and the reason."""

    code = "load_failed"


class OutOfMemory(LocalgenError):
    """The model does not fit in memory; the message states the bytes needed and available."""

    code = "out_of_memory"


class DiskFull(LocalgenError):
    """The files do not fit on the disk; the message states the bytes needed and available."""

    code = "disk_full"


class EngineDied(LocalgenError):
    """The engine process exited during a request; the next request starts a new one."""

    code = "engine_died"


class TimedOut(LocalgenError):
    """The request exceeded the server's time limit."""

    code = "timeout"


class ServerUnavailable(LocalgenError):
    """The server could not be started or reached."""

    code = "server_unavailable"


def error_from_code(code: str, message: str, param: str | None = None) -> LocalgenError:
    """Rebuild an error from its serialized code; an unknown code gives a plain LocalgenError."""
    for kind in LocalgenError.__subclasses__():
        if kind.code == code:
            return kind(message, param=param)
    return LocalgenError(message, param=param)
