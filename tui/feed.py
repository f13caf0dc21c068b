"""Follows a server in a thread of its own, and says so when it is lost and when it is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from textual.message import Message

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.client.snapshot import ServerSnapshot
from localgen.tui.gauges.sample_builder import SampleBuilder
from localgen.tui.gauges.samples import ServerSample

# the most often that gauges get to repaint
MIN_UPDATE_PERIOD_S = 0.25
# servers that stream do so with this period themselves: nothing of theirs shall be left out
_SLACK = 0.8
# how long the thread may take to end
_JOIN_TIMEOUT_S = 0.3
FIRST_RETRY_S, MAX_RETRY_S = 0.5, 5.0


class ServerMonitor(Protocol):
    """A way to look at one server. Methods raise LocalgenError; nothing they do loads a model."""

    def snapshots(self) -> Iterator[ServerSnapshot]:
        """The server again and again; ends when it leaves."""

    def close(self) -> None:
        """Let the connections go; what waits for an answer stops waiting."""


class SampleReceived(Message):
    """A new sample."""

    def __init__(self, sample: ServerSample) -> None:
        super().__init__()
        self.sample = sample


class ServerLost(Message):
    """Nothing is heard of it. retry_s: seconds until the next try; tries: so far, from 1.

    has_shut_down: it took its leave. has_no_stats: it answers, and tells nothing of itself.
    """

    def __init__(
        self,
        reason: str,
        retry_s: float,
        tries: int,
        *,
        has_shut_down: bool = False,
        has_no_stats: bool = False,
    ) -> None:
        super().__init__()
        self.reason, self.retry_s, self.tries = reason, retry_s, tries
        self.has_shut_down, self.has_no_stats = has_shut_down, has_no_stats


class SampleFeed:
    """Posts SampleReceived at most four times a second, and ServerLost for each try that failed.

    make_monitor: makes the way to look, in the thread, as that imports what takes long. post: may
    be called from any thread, as `post_message` may.
    """

    def __init__(
        self,
        make_monitor: Callable[[], ServerMonitor],
        post: Callable[[Message], object],
        *,
        clock: Callable[[], float] = time.monotonic,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self._make_monitor = make_monitor
        self._post = post
        self._clock = clock
        self._first_retry_s = first_retry_s
        self._stop = threading.Event()
        self._retry_now = threading.Event()
        self._monitor: ServerMonitor | None = None
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """End; nothing is posted any more. Waits for a moment, for a thread that runs while Python
        leaves may crash it, and not for a server that does not answer."""
        self._stop.set()
        self._retry_now.set()
        if self._monitor is not None:
            self._monitor.close()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    def retry(self) -> None:
        """Try at once, if it waits."""
        self._retry_now.set()

    def _run(self) -> None:
        tries = 0
        while not self._stop.is_set():
            why = "the server has left"
            fault: Exception | None = None
            try:
                if self._monitor is None:
                    self._monitor = self._make_monitor()
                for seen in self._samples(self._monitor):
                    tries = 0
                    self._post_unless_stopped(SampleReceived(seen))
            except LocalgenError as error:
                why, fault = error.message, error
            except Exception as error:  # a sample that we cannot make shall not end the program
                why, fault = f"a defect of localgen ({type(error).__name__}: {error})", error
            tries += 1
            retry_s = min(MAX_RETRY_S, self._first_retry_s * 2 ** min(tries - 1, 10))
            is_silent = isinstance(fault, InvalidRequest)
            # whoever sees that it is lost may ask for the next try before this thread waits for it
            self._retry_now.clear()
            self._post_unless_stopped(
                ServerLost(why, retry_s, tries, has_shut_down=fault is None, has_no_stats=is_silent)
            )
            self._wait(retry_s)

    def _samples(self, monitor: ServerMonitor) -> Iterator[ServerSample]:
        record, last_s = SampleBuilder(), None
        for snapshot in monitor.snapshots():
            now_s = self._clock()
            if last_s is None or now_s - last_s >= MIN_UPDATE_PERIOD_S * _SLACK:
                last_s = now_s
                yield record.add_snapshot(now_s, snapshot)
            if self._stop.is_set():
                return

    def _wait(self, retry_s: float) -> None:
        if not self._stop.is_set():
            self._retry_now.wait(retry_s)

    def _post_unless_stopped(self, message: Message) -> None:
        if not self._stop.is_set():
            self._post(message)
