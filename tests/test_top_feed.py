"""The thread that follows a server: its rate, lost servers, its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from serving import wait_until
from textual.message import Message
from top_script import ScriptedServerMonitor, snapshot

from localgen.backends.errors import LocalgenError, ServerUnavailable
from localgen.client.snapshot import ServerSnapshot
from localgen.tui import feed as feed_module
from localgen.tui.feed import MAX_RETRY_S, SampleFeed, SampleReceived, ServerLost, ServerMonitor


class Told:
    """Messages of a feed."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def __call__(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def seen(self) -> list[SampleReceived]:
        return [each for each in self.messages if isinstance(each, SampleReceived)]

    @property
    def lost(self) -> list[ServerLost]:
        return [each for each in self.messages if isinstance(each, ServerLost)]


def following(make: Callable[[], ServerMonitor], told: Told, **settings: float) -> SampleFeed:
    feed = SampleFeed(make, told, first_retry_s=settings.get("first_retry_s", 0.01))
    feed.start()
    return feed


def test_snapshots_are_limited_to_four_readings_per_second() -> None:
    told, clock = Told(), iter(float(n) / 100 for n in range(10_000))
    watch = ScriptedServerMonitor([snapshot()] * 500)
    feed = SampleFeed(lambda: watch, told, clock=lambda: next(clock))
    feed.start()
    wait_until(lambda: not watch.scripts)
    time.sleep(0.2)
    feed.stop()
    assert 15 <= len(told.seen) <= 26


def test_reconnects_after_a_loss_and_reports_each_try() -> None:
    told = Told()
    watch = ScriptedServerMonitor(
        [snapshot(), ServerUnavailable("gone")], [None], [ServerUnavailable("none")], [snapshot()]
    )
    feed = following(lambda: watch, told)
    wait_until(lambda: len(told.seen) == 2)
    feed.stop()
    assert [(each.reason, each.tries) for each in told.lost] == [
        ("gone", 1),
        ("the server has shut down", 2),
        ("none", 3),
    ]
    assert [each.retry_s for each in told.lost] == [0.01, 0.02, 0.04]


def test_waits_get_longer_up_to_a_limit() -> None:
    told, watch = Told(), ScriptedServerMonitor(*[[ServerUnavailable("none")] for _ in range(9)])
    feed = following(lambda: watch, told, first_retry_s=1.0)
    for tries in range(1, 6):
        wait_until(lambda: len(told.lost) >= tries)  # noqa: B023 - asked at once
        feed.retry()
    wait_until(lambda: len(told.lost) == 6)
    feed.stop()
    assert [each.retry_s for each in told.lost] == [1.0, 2.0, 4.0, MAX_RETRY_S, 5.0, 5.0]


def test_requested_retry_happens_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feed_module, "MAX_RETRY_S", 1000.0)
    told, watch = Told(), ScriptedServerMonitor([ServerUnavailable("none")], [snapshot()])

    def hasty(message: Message) -> None:
        told(message)
        if isinstance(message, ServerLost):
            feed.retry()

    feed = SampleFeed(lambda: watch, hasty, first_retry_s=1000.0)
    feed.start()
    wait_until(lambda: bool(told.seen))
    feed.stop()


def test_a_server_that_cannot_be_looked_at_is_tried_again() -> None:
    told, tries = Told(), []

    def make() -> ServerMonitor:
        tries.append(1)
        if len(tries) == 1:
            raise ServerUnavailable("no way there")
        return ScriptedServerMonitor([snapshot()])

    feed = following(make, told)
    wait_until(lambda: bool(told.seen))
    feed.stop()
    assert told.lost[0].reason == "no way there"


def test_internal_errors_do_not_end_the_feed() -> None:
    told = Told()

    class Broken(ScriptedServerMonitor):
        def snapshots(self) -> Iterator[ServerSnapshot]:
            if not self.cancelled:
                self.cancelled.append("once")
                raise ZeroDivisionError("oh")
            yield from super().snapshots()

    feed = following(lambda: Broken([snapshot()]), told)
    wait_until(lambda: bool(told.seen))
    feed.stop()
    assert "ZeroDivisionError" in told.lost[0].reason


@pytest.mark.parametrize("error", [None, ServerUnavailable("gone")])
def test_no_messages_after_the_end(error: LocalgenError | None) -> None:
    told, released = Told(), threading.Event()

    class Slow(ScriptedServerMonitor):
        def snapshots(self) -> Iterator[ServerSnapshot]:
            yield snapshot()
            released.wait(10)
            if error is not None:
                raise error

    watch = Slow()
    feed = following(lambda: watch, told)
    wait_until(lambda: bool(told.seen))
    feed.stop()
    released.set()
    time.sleep(0.05)
    assert len(told.messages) == 1
    assert watch.closed.is_set()
