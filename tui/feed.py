"""Follows a server in a background thread and reports when it is lost or found again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from textual.message import Message

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.client.errors import ServerNotAnswering
from localgen.client.snapshot import ServerSnapshot
from localgen.tui.gauges.sample_builder import SampleBuilder
from localgen.tui.gauges.samples import ServerSample

# minimum seconds between two gauge updates
MIN_UPDATE_PERIOD_S = 0.25
# streaming servers send at this period themselves: the slack keeps jitter from dropping samples
_SLACK = 0.8
# seconds that stop() waits for the thread
_JOIN_TIMEOUT_S = 0.3
FIRST_RETRY_S, MAX_RETRY_S = 0.5, 5.0


class ServerMonitor(Protocol):
    """Source of snapshots of one server. Methods raise LocalgenError and never load a model."""

    def snapshots(self) -> Iterator[ServerSnapshot]:
        """Yield snapshots until the server shuts down."""

    def close(self) -> None:
        """Close the connections; pending requests are aborted."""


class SampleReceived(Message):
    def __init__(self, sample: ServerSample) -> None:
        super().__init__()
        self.sample = sample


class ServerLost(Message):
    """The server does not respond.

    retry_s: seconds until the next attempt; tries: failed attempts so far, from 1. has_shut_down:
    the server ended the stream itself. has_no_stats: it responds but reports no statistics.
    is_hung: it runs but does not respond.
    """

    def __init__(
        self,
        reason: str,
        retry_s: float,
        tries: int,
        *,
        has_shut_down: bool = False,
        has_no_stats: bool = False,
        is_hung: bool = False,
    ) -> None:
        super().__init__()
        self.reason, self.retry_s, self.tries = reason, retry_s, tries
        self.has_shut_down, self.has_no_stats = has_shut_down, has_no_stats
        self.is_hung = is_hung


class SampleFeed:
    """Posts SampleReceived at most four times a second, and ServerLost for each failed attempt.

    make_monitor: called in the thread, because it imports slow modules. post: must be safe to call
    from any thread, as `post_message` is.
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
        self._thread.start()

    def stop(self) -> None:
        """Stop posting and close the monitor.

        Waits briefly for the thread, because a thread that runs during interpreter shutdown may
        crash it, but not for a server that does not respond.
        """
        self._stop.set()
        self._retry_now.set()
        if self._monitor is not None:
            self._monitor.close()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    def retry(self) -> None:
        """Retry now instead of after the delay."""
        self._retry_now.set()

    def _run(self) -> None:
        tries = 0
        while not self._stop.is_set():
            why = "the server has shut down"
            fault: Exception | None = None
            try:
                if self._monitor is None:
                    self._monitor = self._make_monitor()
                for seen in self._samples(self._monitor):
                    tries = 0
                    self._post_unless_stopped(SampleReceived(seen))
            except LocalgenError as error:
                why, fault = error.message, error
            except Exception as error:  # a bug in sampling must not end the app
                why, fault = f"internal error ({type(error).__name__}: {error})", error
            tries += 1
            limit_s = max(MAX_RETRY_S, self._first_retry_s)
            retry_s = min(limit_s, self._first_retry_s * 2 ** min(tries - 1, 10))
            # clear before posting: a handler may call retry() before this thread starts to wait
            self._retry_now.clear()
            self._post_unless_stopped(
                ServerLost(
                    why,
                    retry_s,
                    tries,
                    has_shut_down=fault is None,
                    has_no_stats=isinstance(fault, InvalidRequest),
                    is_hung=isinstance(fault, ServerNotAnswering),
                )
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
