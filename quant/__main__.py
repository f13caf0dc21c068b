"""The child process of QuantizeProcess: `run` or `dry-run`.

It reads one QuantizeRequest as a line of JSON from standard input and writes events as lines of
JSON, a FailedEvent last if it fails. SIGINT stops it, as does the end of standard input, which
means that the parent is gone. Finished layers are kept.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

from localgen.backends.errors import LocalgenError
from localgen.quant.request.events import (
    EXIT_INTERRUPTED,
    FailedEvent,
    OnEvent,
    QuantizeEvent,
    encode_event,
)
from localgen.quant.request.request import QuantizeRequest, decode_request

_SIGINT_S = 20.0


def main(command: str) -> int:
    """Return the exit status. command: `run` or `dry-run`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # keep standard output for events: what libraries print goes to standard error
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    writer = EventWriter(output)
    try:
        request = decode_request(sys.stdin.buffer.readline())
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        _command(command)(request, writer.write)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except LocalgenError as error:
        writer.write(FailedEvent(error.message, error.code))
        return 1
    except MemoryError:
        message = "out of memory: close other programs, or choose a method that needs less"
        writer.write(FailedEvent(message, "out_of_memory"))
        return 1
    except Exception as error:
        message = f"internal error ({type(error).__name__}: {error})"
        writer.write(FailedEvent(message, "internal_error"))
        return 1
    return 0


class EventWriter:
    """Writes events until the reader is gone; _exit_with_parent then ends the work."""

    def __init__(self, output: IO[str]) -> None:
        self._output = output
        self._has_reader = True

    def write(self, event: QuantizeEvent | FailedEvent) -> None:
        if not self._has_reader:
            return
        try:
            self._output.write(encode_event(event) + "\n")
            self._output.flush()
        except OSError:
            self._has_reader = False


def _command(name: str) -> Callable[[QuantizeRequest, OnEvent], None]:
    # imported here: torch takes seconds, and the parent may be gone before
    from localgen.quant import run

    return {"run": run.run_quantization, "dry-run": run.dry_run_quantization}[name]


def _exit_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_SIGINT_S)
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stderr.flush()
    # no cleanup: torch takes long to exit
    os._exit(status)
