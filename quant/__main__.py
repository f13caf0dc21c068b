"""The process that quantizes for a program that is not to load torch: `make`, or only `look`.

It reads one Asked as a line of JSON and tells what happens in lines of JSON: events, and
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
from localgen.quant.events import Event, Tell, to_line
from localgen.quant.request.request import Asked, from_json

INTERRUPTED = 130
_SIGINT_S = 20.0


def main(work: str) -> int:
    """work: `make` or `look`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # whatever a library may print does not belong between the lines
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    teller = Teller(output)
    try:
        asked = from_json(sys.stdin.buffer.readline())
        threading.Thread(target=_end_with_the_asker, daemon=True).start()
        _work(work)(asked, teller.tell)
    except KeyboardInterrupt:
        return INTERRUPTED
    except LocalgenError as error:
        teller.say(json.dumps({"error": error.message, "code": error.code}))
        return 1
    except MemoryError:
        told = "the memory is full: end other programs, or choose what needs less"
        teller.say(json.dumps({"error": told, "code": "out_of_memory"}))
        return 1
    except Exception as error:
        told = f"a defect of localgen ({type(error).__name__}: {error})"
        teller.say(json.dumps({"error": told, "code": "internal_error"}))
        return 1
    return 0


class Teller:
    """Writes lines until nobody reads them; the work is then ended from elsewhere."""

    def __init__(self, output: IO[str]) -> None:
        self._output = output
        self._is_heard = True

    def tell(self, event: Event) -> None:
        self.say(to_line(event))

    def say(self, line: str) -> None:
        if not self._is_heard:
            return
        try:
            self._output.write(line + "\n")
            self._output.flush()
        except OSError:
            self._is_heard = False


def _work(name: str) -> Callable[[Asked, Tell], None]:
    # torch takes seconds: the asker may be gone before it is there
    from localgen.quant import run

    return {"make": run.make, "look": run.look}[name]


def _end_with_the_asker() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_SIGINT_S)
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stderr.flush()
    # nothing is left to be done, and torch takes its time to leave
    os._exit(status)
