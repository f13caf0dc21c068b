"""The process that quantizes for a program that is not to load torch: `run`, or only `dry-run`.

It reads one QuantizeRequest as a line of JSON and tells what happens in lines of JSON: events, and
`{"error": "…", "code": "…"}` before it fails. SIGINT stops it, and so does the end of its standard
input: whoever wanted the result is gone. What is done stays.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

from localgen.backends.errors import LocalgenError
from localgen.quant.events import OnEvent, QuantizeEvent, encode_event
from localgen.quant.request.request import QuantizeRequest, decode_request

EXIT_INTERRUPTED = 130
_SIGINT_S = 20.0


def main(command: str) -> int:
    """command: `run` or `dry-run`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # whatever a library may print does not belong between the lines
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    teller = EventWriter(output)
    try:
        asked = decode_request(sys.stdin.buffer.readline())
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        _command(command)(asked, teller.write_event)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except LocalgenError as error:
        teller.write_line(json.dumps({"error": error.message, "code": error.code}))
        return 1
    except MemoryError:
        told = "the memory is full: end other programs, or choose what needs less"
        teller.write_line(json.dumps({"error": told, "code": "out_of_memory"}))
        return 1
    except Exception as error:
        told = f"a defect of localgen ({type(error).__name__}: {error})"
        teller.write_line(json.dumps({"error": told, "code": "internal_error"}))
        return 1
    return 0


class EventWriter:
    """Writes lines until nobody reads them; the work is then ended from elsewhere."""

    def __init__(self, output: IO[str]) -> None:
        self._output = output
        self._has_reader = True

    def write_event(self, event: QuantizeEvent) -> None:
        self.write_line(encode_event(event))

    def write_line(self, line: str) -> None:
        if not self._has_reader:
            return
        try:
            self._output.write(line + "\n")
            self._output.flush()
        except OSError:
            self._has_reader = False


def _command(name: str) -> Callable[[QuantizeRequest, OnEvent], None]:
    # torch takes seconds: the asker may be gone before it is there
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
    # nothing is left to be done, and torch takes its time to leave
    os._exit(status)
