"""The child process of QuantizeProcess: `run` or `dry-run`.

It receives one QuantizeRequest from an inherited socket and sends events, a FailedEvent last if it
fails. SIGINT stops it, as does the end of the socket, which means that the parent is gone. Finished
layers are kept.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from localgen.backends.errors import LocalgenError, OutOfMemory
from localgen.backends.messages import FrameSocket, inherited_socket
from localgen.quant.request.events import EXIT_INTERRUPTED, FailedEvent, OnEvent, QuantizeEvent
from localgen.quant.request.request import EVENT_CODEC, REQUEST_CODEC, QuantizeRequest

_SIGINT_S = 20.0


def main(command: str, fd: int) -> int:
    """Return the exit status. command: `run` or `dry-run`. fd: of the socket."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent = inherited_socket(fd)

    def send(event: QuantizeEvent | FailedEvent) -> None:
        with contextlib.suppress(OSError):  # _exit_with_parent then ends the work
            parent.send(EVENT_CODEC.encode(event))

    try:
        request = REQUEST_CODEC.decode(parent.receive())
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
        _command(command)(request, send)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except LocalgenError as error:
        failure = error
    except MemoryError:
        failure = OutOfMemory(
            "out of memory: close other programs, or choose a method that needs less"
        )
    except Exception as error:
        failure = LocalgenError(f"internal error ({type(error).__name__}: {error})")
    else:
        return 0
    send(FailedEvent(failure.message, failure.code))
    return 1


def _command(name: str) -> Callable[[QuantizeRequest, OnEvent], None]:
    # imported here: torch takes seconds, and the parent may be gone before
    gc.disable()  # imports leave no garbage
    from localgen.quant import run

    gc.freeze()
    gc.enable()
    return {"run": run.run_quantization, "dry-run": run.dry_run_quantization}[name]


def _exit_with_parent(parent: FrameSocket) -> None:
    for _ in parent:
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_SIGINT_S)
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    status = main(sys.argv[1], int(sys.argv[2]))
    sys.stderr.flush()
    # no cleanup: torch takes long to exit
    os._exit(status)
