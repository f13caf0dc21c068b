"""A sandbox: code that a model file brings runs in processes with limits of time and memory.

Such code is chat templates, regular expressions of tokenizers, and clients' grammars. It runs in
native code that holds the interpreter's lock or allocates at will, so only a process can stop it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import localgen
from localgen.backends.errors import error_from_code
from localgen.backends.messages import start_process
from localgen.backends.sandbox_worker import MAX_REPLY_BYTES, CallLimits, CallMethod, CreateObject

# the process ends itself at the limit; later it is killed, as it may be stopped
_GRACE_S = 10.0
_START_S = 60.0
_EXIT_S = 1.0
# elsewhere the system limits no memory of a process, so its resident memory is read while it works
_SYSTEM_LIMITS_MEMORY = sys.platform == "linux"
_MEMORY_POLL_S = 0.02
# of a call whose process is killed from outside
_MAX_TRIES = 3
_COMMAND = (
    "import sys; sys.path[:] = sys.argv[1:-1]; "
    "from localgen.backends.sandbox_worker import main; main(int(sys.argv[-1]))"
)
_ROOT = str(Path(localgen.__file__).parents[1])
_Request = CreateObject | CallMethod


class LimitExceeded(Exception):
    """A call exceeded its limits or crashed: "did not finish within 2 s"."""


class CallCancelled(Exception):
    """A call was ended by Cancellation.cancel."""


class _ProcessLost(Exception):
    """The process was killed, though not for its limits."""


class Sandbox:
    """Creates objects in processes with limits of time and memory. Thread-safe.

    imports: picklable functions and classes whose modules a process imports when it starts. Calls
    run in parallel, each in a process of its own; the first process starts at once, and each is
    replaced when it has ended. All are killed when the sandbox is no longer referenced.
    """

    def __init__(self, *imports: object) -> None:
        self._imports = pickle.dumps(imports)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._idle: list[_SandboxProcess] = []
        weakref.finalize(self, _kill_all, self._idle)
        self._start_idle()

    def create(self, limits: CallLimits, factory: Callable[..., Any], *arguments: Any) -> Sandboxed:
        """Create factory(*arguments), both picklable, in every process.

        Raises LimitExceeded, CallCancelled, and LocalgenError as the factory does.
        """
        recipe = CreateObject(next(self._numbers), factory, arguments, limits)
        self._run(lambda process: process.prepare(recipe))
        return Sandboxed(self, recipe)

    def call(self, recipe: CreateObject, request: CallMethod) -> Any:
        """Run a call, where the object is created first if need be."""

        def run(process: _SandboxProcess) -> Any:
            process.prepare(recipe)
            return process.run(request)

        return self._run(run)

    def _run(self, work: Callable[[_SandboxProcess], Any]) -> Any:
        """Run `work` with an idle process; again if the process was killed from outside."""
        for _ in range(_MAX_TRIES):
            with (
                self._process() as process,
                contextlib.suppress(_ProcessLost),
                _cancellable(process),
            ):
                return work(process)
        raise LimitExceeded(
            f"failed: its process was killed {_MAX_TRIES} times, perhaps for lack of memory"
        )

    @contextlib.contextmanager
    def _process(self) -> Iterator[_SandboxProcess]:
        try:
            process = self._take_idle() or _SandboxProcess(self._imports)
        except OSError as error:
            raise LimitExceeded(f"cannot run: no process for it: {error}") from error
        try:
            yield process
        finally:
            if process.is_dead:
                self._start_idle()
            else:
                with self._lock:
                    self._idle.append(process)

    def _take_idle(self) -> _SandboxProcess | None:
        """Take an idle process that has not been killed meanwhile, or return None."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                process = self._idle.pop()
            if process.is_running():
                return process
            process.close()

    def _start_idle(self) -> None:
        """Start a process for the next call."""
        with contextlib.suppress(OSError):  # the next call tries again, and reports it
            process = _SandboxProcess(self._imports)
            with self._lock:
                self._idle.append(process)


@dataclass(frozen=True, slots=True)
class Sandboxed:
    """An object in a sandbox."""

    _sandbox: Sandbox
    _recipe: CreateObject

    def call(self, limits: CallLimits, method: str, *arguments: Any) -> Any:
        """Call a method whose arguments are picklable and whose result is JSON.

        Raises LimitExceeded, CallCancelled, and LocalgenError as the method does.
        """
        number = self._recipe.number
        return self._sandbox.call(self._recipe, CallMethod(number, method, arguments, limits))


class Cancellation:
    """Ends the sandbox calls that one thread makes within `with cancellation:`. Thread-safe."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._process: _SandboxProcess | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Cancellation:
        _of_thread.cancellation = self
        return self

    def __exit__(self, *error: object) -> None:
        _of_thread.cancellation = None

    def cancel(self) -> None:
        """End the running call at once and all later ones; they raise CallCancelled."""
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                self._process.kill()

    @contextlib.contextmanager
    def watch(self, process: _SandboxProcess) -> Iterator[None]:
        """Let `cancel` kill a process; what it raises then becomes CallCancelled."""
        with self._lock:
            if self.is_cancelled:
                raise CallCancelled
            self._process = process
        try:
            yield
        except (LimitExceeded, _ProcessLost):
            if self.is_cancelled:
                raise CallCancelled from None
            raise
        finally:
            with self._lock:
                self._process = None


class _OfThread(threading.local):
    """The cancellation that the calls of this thread obey."""

    cancellation: Cancellation | None = None


_of_thread = _OfThread()


def _cancellable(process: _SandboxProcess) -> contextlib.AbstractContextManager[None]:
    cancellation = _of_thread.cancellation
    return contextlib.nullcontext() if cancellation is None else cancellation.watch(process)


class _SandboxProcess:
    """One process and our end of its socket. Used by one thread at a time, except `kill`."""

    def __init__(self, imports: bytes) -> None:
        self.is_dead = False
        self._is_ready = False
        self._base_bytes = 0
        self._created: set[int] = set()
        self._process, self._socket = start_process(
            # -S: what site would find is in sys.path, except where localgen is installed editable
            [sys.executable, "-P", "-S", "-c", _COMMAND, *sys.path, _ROOT],
            max_bytes=MAX_REPLY_BYTES,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # native code reports there what a file makes it do
            start_new_session=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )
        self._socket.send(imports, time.monotonic() + _START_S)

    def prepare(self, recipe: CreateObject) -> None:
        """Create an object, unless the process has it."""
        if recipe.number not in self._created:
            self.run(recipe)
            self._base_bytes = self._resident_bytes()
            self._created.add(recipe.number)

    def run(self, request: _Request) -> Any:
        """Run a request and return its result.

        Raises LimitExceeded, _ProcessLost, and LocalgenError as the request does.
        """
        content = pickle.dumps(request)
        try:
            reply = json.loads(self._exchange(content, request.limits))
        except TimeoutError:
            self.close()
            raise _too_slow(request) from None
        except (EOFError, OSError):
            raise self._death(request) from None
        except MemoryError:
            self.close()
            raise _too_large(request) from None
        except (ValueError, RecursionError):
            reply = None
        match reply:
            case {"error": ["memory", _, _]}:
                self.close()
                raise _too_large(request)
            case {"error": [str(code), str(message), str() | None as param]}:
                raise error_from_code(code, message, param)
            case {"result": result}:
                return result
        self.close()
        raise LimitExceeded("crashed: its answer is damaged")

    def _exchange(self, content: bytes, limits: CallLimits) -> bytes:
        """Send a request and return the reply.

        Raises EOFError, OSError, TimeoutError, and MemoryError if the process has too much memory.
        """
        if not self._is_ready:
            self._socket.receive(time.monotonic() + _START_S)
            self._is_ready = True
            self._base_bytes = self._resident_bytes()
        deadline_s = time.monotonic() + limits.seconds + _GRACE_S
        self._socket.send(content, deadline_s)
        if _SYSTEM_LIMITS_MEMORY:
            return self._socket.receive(deadline_s)
        while True:
            poll_s = time.monotonic() + _MEMORY_POLL_S
            try:
                return self._socket.receive(min(poll_s, deadline_s))
            except TimeoutError:
                if poll_s >= deadline_s:
                    raise
            if self._resident_bytes() > self._base_bytes + limits.memory_bytes:
                raise MemoryError

    def _resident_bytes(self) -> int:
        """Resident memory; 0 if the process has ended, or where the system limits memory."""
        if _SYSTEM_LIMITS_MEMORY:
            return 0
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(self._process.pid).memory_info().rss)
        return 0

    def _death(self, request: _Request) -> Exception:
        """Return the error of a request whose process has closed its socket."""
        status = self._end()
        if status == -signal.SIGALRM:
            return _too_slow(request)
        if status == -signal.SIGKILL:
            return _ProcessLost()
        return LimitExceeded(
            f"crashed, or needed more than {request.limits.memory_bytes >> 20} MiB of memory"
        )

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process, from any thread."""
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._end()

    def _end(self) -> int:
        self.is_dead = True
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_EXIT_S)
        self.kill()  # it was stopped, or sent what is no answer
        return self._process.wait()


def _kill_all(processes: list[_SandboxProcess]) -> None:
    for process in processes:
        process.close()


def _too_slow(request: _Request) -> LimitExceeded:
    return LimitExceeded(f"did not finish within {request.limits.seconds:g} s")


def _too_large(request: _Request) -> LimitExceeded:
    return LimitExceeded(f"needs more than {request.limits.memory_bytes >> 20} MiB of memory")
