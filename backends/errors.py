"""Errors that reach a user: one clear sentence that says what to do."""

from __future__ import annotations


class LocalgenError(Exception):
    """Base of every error that is shown to a user.

    code: stable name, the `code` of an API error and the key of the CLI's exit code.
    param: the request field at fault, where there is one.
    """

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(LocalgenError):
    """The request cannot be honoured as written: unknown, contradictory or out of range."""

    code = "invalid_request"


class ContextExceeded(LocalgenError):
    """The prompt does not fit the context; the message states both numbers."""

    code = "context_length_exceeded"


class QueueFull(LocalgenError):
    """Too many requests wait already: try again later."""

    code = "queue_full"


class ModelNotFound(LocalgenError):
    """No model of that name, or no such file."""

    code = "model_not_found"


class ModelBusy(LocalgenError):
    """The model is loaded with other options, or in use where it would have to go."""

    code = "model_busy"


class LoadFailed(LocalgenError):
    """The model could not be loaded; the message names the file and the reason."""

    code = "load_failed"


class OutOfMemory(LocalgenError):
    """The model does not fit; the message states what it needs and what there is."""

    code = "out_of_memory"


class DiskFull(LocalgenError):
    """The files do not fit; the message states what they need and what there is."""

    code = "disk_full"


class EngineDied(LocalgenError):
    """The model's engine process ended in mid-request; the next request starts a new one."""

    code = "engine_died"


class TimedOut(LocalgenError):
    """The request took longer than the server lets one take."""

    code = "timeout"


class ServerUnavailable(LocalgenError):
    """The server cannot be started or reached."""

    code = "server_unavailable"


def error_from_code(code: str, message: str, param: str | None = None) -> LocalgenError:
    """The error class of a code that came over a wire; an unknown code stays a LocalgenError."""
    for kind in LocalgenError.__subclasses__():
        if kind.code == code:
            return kind(message, param=param)
    return LocalgenError(message, param=param)
