"""A quantization in a child process, for a program with its own user interface."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from typing import IO, Protocol

from localgen.backends.errors import LoadFailed, LocalgenError, OutOfMemory, error_from_code
from localgen.backends.messages import start_process
from localgen.machine.python_process import last_line, python_command, python_environment
from localgen.quant.request.events import EXIT_INTERRUPTED, FailedEvent, QuantizeEvent
from localgen.quant.request.request import EVENT_CODEC, REQUEST_CODEC, QuantizeRequest


class QuantizeWorker(Protocol):
    """A running quantization. Methods may be called from any thread."""

    def events(self) -> Iterator[QuantizeEvent]:
        """Events until the end; call once. Raises LocalgenError if the run fails."""

    def stop(self) -> None:
        """Ask it to stop soon; finished layers are kept."""

    def kill(self) -> None:
        """Terminate it immediately."""

    def memory_bytes(self) -> int | None:
        """Current memory usage; None if unknown."""


class QuantizeProcess:
    """A QuantizeWorker in a child process."""

    def __init__(self, request: QuantizeRequest, *, dry_run: bool = False) -> None:
        """dry_run: only estimate. Raises LoadFailed if the process cannot be started."""
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this
        try:
            self._process, self._messages = start_process(
                python_command("localgen.quant", "dry-run" if dry_run else "run"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._output,
                env=python_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise LoadFailed(f"cannot start a process: {error.strerror or error}") from None
        with contextlib.suppress(OSError):  # its exit status tells why
            self._messages.send(REQUEST_CODEC.encode(request))

    @property
    def pid(self) -> int:
        return self._process.pid

    def events(self) -> Iterator[QuantizeEvent]:
        """As QuantizeWorker. Raises OutOfMemory if the process was killed, LoadFailed if it
        crashed."""
        failed: FailedEvent | None = None
        for content in self._messages:
            event = EVENT_CODEC.decode(content)
            if isinstance(event, FailedEvent):
                failed = event
            else:
                yield event
        self._messages.close()
        status = self._process.wait()
        if failed is not None:
            raise error_from_code(failed.code, failed.message)
        if status not in (0, EXIT_INTERRUPTED):
            raise self._exit_error(status)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def memory_bytes(self) -> int | None:
        import psutil

        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return None

    def _exit_error(self, status: int) -> LocalgenError:
        if status == -signal.SIGKILL:
            return OutOfMemory(
                "the quantization process was killed, probably because the memory is full; "
                "finished layers are kept"
            )
        last = last_line(self._output, "no error message")
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return LoadFailed(f"the quantization process ended {how}: {last}")
