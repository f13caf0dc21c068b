"""Outbox: the events that the engine has not published yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from localgen.backends.types import (
    Delta,
    Embedded,
    EngineStats,
    Failed,
    Finished,
    StepEvents,
)

# steps of a small model are shorter: it sends several tokens at once, because each event costs the
# server and its client time of the processor, which the next step lacks
PUBLISH_INTERVAL_S = 0.02


class Outbox:
    """Collects events; publishes deltas that may wait at most every PUBLISH_INTERVAL_S.

    publish_events: called with all events collected since the last call.
    """

    def __init__(
        self,
        publish_events: Callable[[StepEvents], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.publish_events, self._clock = publish_events, clock
        self._published_at_s = -PUBLISH_INTERVAL_S
        self._deltas: list[Delta] = []
        self._ends: list[Finished | Failed] = []
        self._embedded: list[Embedded] = []

    def add(self, event: Delta | Finished | Failed | Embedded) -> None:
        """Add an event. Within a request, deltas come before its end."""
        if isinstance(event, Delta):
            self._deltas.append(event)
        elif isinstance(event, Embedded):
            self._embedded.append(event)
        else:
            self._ends.append(event)

    def publish(self, stats: EngineStats | None, *, deltas_may_wait: bool) -> None:
        """Publish the events. deltas_may_wait: the next call comes soon, so deltas alone may be
        published with it."""
        if not (self._ends or self._embedded or stats):
            waited_s = self._clock() - self._published_at_s
            if not self._deltas or (deltas_may_wait and waited_s < PUBLISH_INTERVAL_S):
                return
        if self._deltas:
            self._published_at_s = self._clock()
        finished = tuple(end for end in self._ends if isinstance(end, Finished))
        failed = tuple(end for end in self._ends if isinstance(end, Failed))
        events = StepEvents(_merged(self._deltas), finished, failed, stats, tuple(self._embedded))
        self._deltas, self._ends, self._embedded = [], [], []
        self.publish_events(events)


def _merged(deltas: list[Delta]) -> tuple[Delta, ...]:
    """Join the deltas of each request, where one delta can say in which order its parts came."""
    merged: list[Delta] = []
    place: dict[str, int] = {}
    for new in deltas:
        i = place.get(new.request_id)
        if i is None or (joined := _joined(merged[i], new)) is None:
            place[new.request_id] = len(merged)
            merged.append(new)
        else:
            merged[i] = joined
    return tuple(merged)


def _joined(old: Delta, new: Delta) -> Delta | None:
    """One delta for both, or None. A delta is read as reasoning, then text, then tool calls."""
    if (old.text and new.reasoning) or (old.tool_calls and (new.text or new.reasoning)):
        return None
    return replace(
        new,
        text=old.text + new.text,
        logprobs=old.logprobs + new.logprobs,
        reasoning=old.reasoning + new.reasoning,
        tool_calls=old.tool_calls + new.tool_calls,
    )
