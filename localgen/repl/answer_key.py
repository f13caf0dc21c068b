"""The key that ends the reasoning of an answer. The terminal turns it into a signal, SIGQUIT.

So nothing reads the terminal during an answer, and what is typed is kept for the next prompt.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ANSWER_NOW_KEY, ANSWER_NOW_CODE = "Ctrl+X", b"\x18"


def has_answer_key() -> bool:
    """Return True if the key's signal reaches no other program.

    The terminal sends it to all processes of the job: to `tee` in a pipe, or to a script that has
    started localgen, which would end by it.
    """
    return os.getpgrp() == os.getpid() and os.isatty(1)


@contextmanager
def on_answer_now(action: Callable[[], None]) -> Iterator[None]:
    """Run the action in a thread of its own at each press of the key, until the end of the block.

    Has no effect outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def press(*_: object) -> None:
        # not here: the signal may have interrupted a request of the same client
        threading.Thread(target=action, name="answer-now", daemon=True).start()

    before = signal.signal(signal.SIGQUIT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, before)
