"""A quantization in a process of its own, for a program that draws meanwhile."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from typing import IO, Protocol

from localgen.backends.errors import LoadFailed, LocalgenError, OutOfMemory, error_from_code
from localgen.machine.python_process import python_command, python_environment
from localgen.quant.events import QuantizeEvent, decode_event
from localgen.quant.request.request import QuantizeRequest, encode_request

EXIT_INTERRUPTED = 130


class QuantizeWorker(Protocol):
    """Something that tells events while it goes on. Its methods may be called in any thread."""

    def events(self) -> Iterator[QuantizeEvent]:
        """Until it ends; to be asked for once. LocalgenError: it failed."""

    def stop(self) -> None:
        """Let it end soon, and keep what is done."""

    def kill(self) -> None:
        """End it at once."""

    def memory_bytes(self) -> int | None:
        """What it has in memory now; None: it is not known."""


class QuantizeProcess:
    """The process. dry_run: it only tells what the run would take. LoadFailed: it cannot start."""

    def __init__(self, request: QuantizeRequest, *, dry_run: bool = False) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as this
        try:
            self._process = subprocess.Popen(
                python_command("localgen.quant", "dry-run" if dry_run else "run"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=python_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise LoadFailed(f"no process can be started: {error.strerror or error}") from None
        assert self._process.stdin is not None
        # the pipe stays open: that it closes is how the process knows that we are gone
        with contextlib.suppress(OSError):
            self._process.stdin.write(encode_request(request) + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def events(self) -> Iterator[QuantizeEvent]:
        """LocalgenError: what it failed of; LoadFailed: it was killed, or died."""
        assert self._process.stdout is not None
        failed: LocalgenError | None = None
        for line in self._process.stdout:
            said = json.loads(line)
            if "error" in said:
                failed = error_from_code(said["code"], said["error"])
            else:
                yield decode_event(said)
        status = self._process.wait()
        if failed is not None:
            raise failed
        if status not in (0, EXIT_INTERRUPTED):
            raise self._exit_error(status)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def memory_bytes(self) -> int | None:
        import psutil

        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return None

    def _exit_error(self, status: int) -> LocalgenError:
        if status == -signal.SIGKILL:
            return OutOfMemory(
                "the process that quantized was killed, as systems do whose memory is full; what "
                "is done stays"
            )
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return LoadFailed(f"the process that quantized ended {how}: {said or 'without a word'}")
