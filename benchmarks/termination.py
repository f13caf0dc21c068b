"""What a benchmark does when it is ended from outside."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises SystemExit in the block, so that processes are ended and files removed."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    earlier = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)
