"""The outbox joins the deltas of short steps, and delays nothing that ends a request."""

from __future__ import annotations

from localgen.backends.engine.outbox import PUBLISH_INTERVAL_S, Outbox
from localgen.backends.engine_stats import EngineStats
from localgen.backends.types import (
    Delta,
    Failed,
    PositionLogprobs,
    StepEvents,
    TokenLogprob,
    ToolCallDelta,
)

CALL, REST = ToolCallDelta(0, "{", "id", "name"), ToolCallDelta(0, "}")
LOGPROBS = (PositionLogprobs(TokenLogprob(1, "a", -0.5), ()),)


class _Published:
    """An outbox with a scripted clock, and its published events."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.events: list[StepEvents] = []
        self.outbox = Outbox(self.events.append, clock=lambda: self.now_s)

    def step(
        self, *events: Delta | Failed, ms: float = 0.0, may_wait: bool = True
    ) -> list[StepEvents]:
        """Add events, advance the clock and publish. Returns what was published."""
        for event in events:
            self.outbox.add(event)
        self.now_s += ms / 1e3
        before = len(self.events)
        self.outbox.publish(None, deltas_may_wait=may_wait)
        return self.events[before:]


def test_the_first_token_is_sent_at_once_and_short_steps_are_joined() -> None:
    published = _Published()
    first, second = Delta("a", "one", 1), Delta("b", "other", 1)
    assert published.step(first, second) == [StepEvents((first, second))]
    wait_ms = PUBLISH_INTERVAL_S * 300
    assert not published.step(Delta("a", " two", 2, LOGPROBS), ms=wait_ms)
    assert not published.step(Delta("b", " more", 2), ms=wait_ms)
    (event,) = published.step(Delta("a", " three", 3, LOGPROBS), ms=wait_ms)
    joined = Delta("a", " two three", 3, LOGPROBS + LOGPROBS)
    assert event == StepEvents((joined, Delta("b", " more", 2)))
    assert not published.step()


def test_steps_that_would_end_too_late_are_not_waited_for() -> None:
    published = _Published()
    for number in range(3):
        delta = Delta("a", "x", number)
        assert published.step(delta, ms=PUBLISH_INTERVAL_S * 750) == [StepEvents((delta,))]


def test_long_steps_wait_for_nothing() -> None:
    published = _Published()
    for number in range(3):
        delta = Delta("a", "x", number)
        assert published.step(delta, ms=1 + PUBLISH_INTERVAL_S * 1e3) == [StepEvents((delta,))]
    assert published.step(Delta("a", "y", 4), may_wait=False)


def test_an_end_and_statistics_bring_all_deltas_with_them() -> None:
    published = _Published()
    published.step(Delta("a", "x", 1))
    delta, failed = Delta("a", "y", 2), Failed("b", "code", "message")
    assert not published.step(delta)
    assert published.step(failed) == [StepEvents((delta,), failed=(failed,))]
    assert not published.step(delta)
    stats = EngineStats()
    published.outbox.publish(stats, deltas_may_wait=True)
    assert published.events[-1] == StepEvents((delta,), stats=stats)


def test_deltas_are_joined_only_if_the_order_of_their_parts_stays() -> None:
    published = _Published()
    published.step(Delta("a", "x", 0))
    parts = [
        Delta("a", "", 1, reasoning="so"),
        Delta("a", "text", 2, reasoning=" then"),
        Delta("a", " end", 3, tool_calls=(CALL,)),
        Delta("a", "", 4, tool_calls=(REST, ToolCallDelta(1, "", "other", "name"))),
        Delta("a", "after", 5),
        Delta("a", "", 6, reasoning="again"),
    ]
    for part in parts[:-1]:
        assert not published.step(part)
    (event,) = published.step(parts[-1], may_wait=False)
    calls = ToolCallDelta(0, "{}", "id", "name"), ToolCallDelta(1, "", "other", "name")
    assert event.deltas == (
        Delta("a", "text end", 4, reasoning="so then", tool_calls=calls),
        *parts[4:],
    )
