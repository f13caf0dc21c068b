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
    ToolCallDelta,
)

# a model with shorter steps sends several tokens at once: the server and its client compute on the
# same cores for each event, and so slow the next step down. A chat draws fifteen times a second.
PUBLISH_INTERVAL_S = 0.05


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
        self._published_at_s = self._called_at_s = -PUBLISH_INTERVAL_S
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
        """Publish the events. deltas_may_wait: deltas alone may be published with the next call, if
        it comes in time when it takes as long as this one did."""
        now_s = self._clock()
        step_s, self._called_at_s = now_s - self._called_at_s, now_s
        if not (self._ends or self._embedded or stats):
            # the next call comes after a step like the last one
            next_s = now_s + step_s - self._published_at_s
            if not self._deltas or (deltas_may_wait and next_s <= PUBLISH_INTERVAL_S):
                return
        if self._deltas:
            self._published_at_s = now_s
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
        tool_calls=_joined_calls(old.tool_calls + new.tool_calls),
    )


def _joined_calls(deltas: tuple[ToolCallDelta, ...]) -> tuple[ToolCallDelta, ...]:
    """One delta for each call: clients expect an index only once in a chunk."""
    joined: dict[int, ToolCallDelta] = {}
    for new in deltas:
        old = joined.get(new.index)
        joined[new.index] = (
            new if old is None else replace(old, arguments=old.arguments + new.arguments)
        )
    return tuple(joined.values())
