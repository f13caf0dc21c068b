"""Follows a server in a thread of its own, and says so when it is lost and when it is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from textual.message import Message

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.client.snapshot import Snapshot
from localgen.tui.gauges.sample_builder import Record
from localgen.tui.gauges.samples import Reading

# the most often that gauges get to repaint
PERIOD_S = 0.25
# servers that stream do so with this period themselves: nothing of theirs shall be left out
_SLACK = 0.8
# how long the thread may take to end
_LEAVE_S = 0.3
FIRST_RETRY_S, LAST_RETRY_S = 0.5, 5.0


class Watch(Protocol):
    """A way to look at one server. Methods raise LocalgenError; nothing they do loads a model."""

    def snapshots(self) -> Iterator[Snapshot]:
        """The server again and again; ends when it leaves."""

    def close(self) -> None:
        """Let the connections go; what waits for an answer stops waiting."""


class Seen(Message):
    """A new reading."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self.reading = reading


class Lost(Message):
    """Nothing is heard of it. retry_s: seconds until the next try; tries: so far, from 1.

    has_left: it took its leave. is_silent: it answers, and tells nothing of itself.
    """

    def __init__(
        self,
        why: str,
        retry_s: float,
        tries: int,
        *,
        has_left: bool = False,
        is_silent: bool = False,
    ) -> None:
        super().__init__()
        self.why, self.retry_s, self.tries = why, retry_s, tries
        self.has_left, self.is_silent = has_left, is_silent


class Feed:
    """Posts Seen at most four times a second, and Lost for each try that failed.

    watch: makes the way to look, in the thread, as that imports what takes long. post: may be
    called from any thread, as `post_message` may.
    """

    def __init__(
        self,
        watch: Callable[[], Watch],
        post: Callable[[Message], object],
        *,
        clock: Callable[[], float] = time.monotonic,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self._make = watch
        self._post = post
        self._clock = clock
        self._first_retry_s = first_retry_s
        self._stop = threading.Event()
        self._now = threading.Event()
        self._watch: Watch | None = None
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """End; nothing is posted any more. Waits for a moment, for a thread that runs while Python
        leaves may crash it, and not for a server that does not answer."""
        self._stop.set()
        self._now.set()
        if self._watch is not None:
            self._watch.close()
        if self._thread.is_alive():
            self._thread.join(_LEAVE_S)

    def retry(self) -> None:
        """Try at once, if it waits."""
        self._now.set()

    def _run(self) -> None:
        tries = 0
        while not self._stop.is_set():
            why = "the server has left"
            fault: Exception | None = None
            try:
                if self._watch is None:
                    self._watch = self._make()
                for seen in self._readings(self._watch):
                    tries = 0
                    self._say(Seen(seen))
            except LocalgenError as error:
                why, fault = error.message, error
            except Exception as error:  # a reading that we cannot make shall not end the program
                why, fault = f"a defect of localgen ({type(error).__name__}: {error})", error
            tries += 1
            retry_s = min(LAST_RETRY_S, self._first_retry_s * 2 ** min(tries - 1, 10))
            is_silent = isinstance(fault, InvalidRequest)
            # whoever sees that it is lost may ask for the next try before this thread waits for it
            self._now.clear()
            self._say(Lost(why, retry_s, tries, has_left=fault is None, is_silent=is_silent))
            self._wait(retry_s)

    def _readings(self, watch: Watch) -> Iterator[Reading]:
        record, last_s = Record(), None
        for snapshot in watch.snapshots():
            now_s = self._clock()
            if last_s is None or now_s - last_s >= PERIOD_S * _SLACK:
                last_s = now_s
                yield record.read(now_s, snapshot)
            if self._stop.is_set():
                return

    def _wait(self, retry_s: float) -> None:
        if not self._stop.is_set():
            self._now.wait(retry_s)

    def _say(self, message: Message) -> None:
        if not self._stop.is_set():
            self._post(message)
