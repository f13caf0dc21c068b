"""The sandbox process: holds objects and calls their methods within limits of time and memory.

Requests are pickles, because the parent is trusted; replies are JSON, because this process runs
code of model files. Their strings may have lone surrogates, which msgpack cannot hold.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import resource
import signal
from dataclasses import dataclass
from typing import Any

from localgen.backends.errors import LocalgenError
from localgen.backends.messages import inherited_socket

MAX_REPLY_BYTES = 64 << 20
_MAX_REQUEST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of one call.

    seconds: on the wall clock. memory_bytes: beyond what the process holds between calls. Linux
    refuses more; elsewhere the parent kills a process whose resident memory exceeds it.
    """

    seconds: float
    memory_bytes: int = 512 << 20


@dataclass(frozen=True, slots=True)
class CreateObject:
    """Create the object of this number: factory(*arguments)."""

    number: int
    factory: Any
    arguments: tuple[Any, ...]
    limits: CallLimits


@dataclass(frozen=True, slots=True)
class CallMethod:
    """Call a method of an object; the result must be JSON."""

    number: int
    method: str
    arguments: tuple[Any, ...]
    limits: CallLimits


def main(fd: int) -> None:
    """Serve requests from the socket `fd` until the parent closes it.

    The first frame is a pickle of what to import; an empty reply follows.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process, even in native code
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    parent = inherited_socket(fd, _MAX_REQUEST_BYTES)
    worker = _Worker()
    with contextlib.suppress(EOFError, ConnectionError):
        pickle.loads(parent.receive())
        parent.send(b"")
        while True:
            parent.send(worker.handle(pickle.loads(parent.receive())))


class _Worker:
    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._base_bytes = _private_bytes()

    def handle(self, request: CreateObject | CallMethod) -> bytes:
        """Run a request and return the reply: {"result": …} or {"error": [code, text, param]}."""
        try:
            _limit_memory(self._base_bytes + request.limits.memory_bytes)
            signal.setitimer(signal.ITIMER_REAL, request.limits.seconds)
            reply = json.dumps({"result": self._run(request)}).encode()
        except LocalgenError as error:
            reply = _error_reply(error.code, error.message, error.param)
        except MemoryError:
            reply = _error_reply("memory", "", None)
        except Exception as error:  # the parent reports it
            reply = _error_reply("internal_error", f"{type(error).__name__}: {error}", None)
        if len(reply) > MAX_REPLY_BYTES:
            reply = _error_reply("memory", "", None)
        # after the reply is made, which needs time and memory too
        signal.setitimer(signal.ITIMER_REAL, 0)
        if isinstance(request, CreateObject):
            self._base_bytes = _private_bytes()
        return reply

    def _run(self, request: CreateObject | CallMethod) -> object:
        if isinstance(request, CallMethod):
            target = self._objects[request.number]
            return getattr(target, request.method)(*request.arguments)
        self._objects[request.number] = request.factory(*request.arguments)
        return None


def _error_reply(code: str, message: str, param: str | None) -> bytes:
    return json.dumps({"error": [code, message[:10_000], param]}).encode()


def _private_bytes() -> int:
    """Private memory of this process in bytes, as RLIMIT_DATA counts it; 0 if unknown."""
    try:
        with open("/proc/self/status", "rb") as status:
            line = next((line for line in status if line.startswith(b"VmData:")), b"VmData: 0 kB")
    except OSError:
        return 0
    return int(line.split()[1]) << 10


def _limit_memory(most_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    with contextlib.suppress(OSError, ValueError):  # systems without this limit
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
