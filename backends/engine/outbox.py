"""Outbox: the events that the engine has not published yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from localgen.backends.engine.output_processor import OutputProcessor
from localgen.backends.engine_stats import EngineStats
from localgen.backends.types import (
    Delta,
    Embedded,
    Failed,
    Finished,
    StepEvents,
    Tokenized,
    ToolCallDelta,
)

# a model with shorter steps sends several tokens at once: the server and its client compute on the
# same cores for each event, and so slow the next step down. A chat draws fifteen times a second.
PUBLISH_INTERVAL_S = 1 / 15


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
        self._deltas: dict[str, list[Delta]] = {}  # by request
        self._unread: dict[OutputProcessor, None] = {}  # a set in order
        self._ends: list[Finished | Failed] = []
        self._embedded: list[Embedded] = []
        self._tokenized: list[Tokenized] = []

    def add(self, event: Delta | Finished | Failed | Embedded | Tokenized) -> None:
        """Add an event. Within a request, deltas come before its end."""
        if isinstance(event, Delta):
            self._deltas.setdefault(event.request_id, []).append(event)
        elif isinstance(event, Embedded):
            self._embedded.append(event)
        elif isinstance(event, Tokenized):
            self._tokenized.append(event)
        else:
            self._ends.append(event)

    def add_unread(self, answers: Sequence[OutputProcessor]) -> None:
        """Read the deltas of these answers when events are published: once for many tokens."""
        self._unread.update(dict.fromkeys(answers))

    def publish(
        self,
        stats: EngineStats | None,
        *,
        deltas_may_wait: bool,
        held_chunks: bytes | None = None,
    ) -> None:
        """Publish the events. deltas_may_wait: deltas alone may be published with the next call, if
        it comes in time when it takes as long as this one did. held_chunks: with stats."""
        now_s = self._clock()
        step_s, self._called_at_s = now_s - self._called_at_s, now_s
        has_ends = bool(self._ends or self._embedded or self._tokenized or stats)
        # the next call comes after a step like the last one
        may_wait = deltas_may_wait and now_s + step_s - self._published_at_s <= PUBLISH_INTERVAL_S
        if may_wait and not has_ends:
            return
        self._read_answers()
        if not (self._deltas or has_ends):
            return
        if self._deltas:
            self._published_at_s = now_s
        finished = tuple(end for end in self._ends if isinstance(end, Finished))
        failed = tuple(end for end in self._ends if isinstance(end, Failed))
        deltas = tuple(chain.from_iterable(map(_joined, self._deltas.values())))
        embedded, tokenized = tuple(self._embedded), tuple(self._tokenized)
        events = StepEvents(deltas, finished, failed, stats, embedded, tokenized, held_chunks)
        self._deltas, self._ends, self._embedded, self._tokenized = {}, [], [], []
        self.publish_events(events)

    def _read_answers(self) -> None:
        unread, self._unread = self._unread, {}
        for answer in unread:
            delta = answer.read()
            if delta is not None:
                self.add(delta)


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Join the deltas of a request, where one delta can say in which order its parts came.

    A delta is read as reasoning, then text, then tool calls.
    """
    joined: list[Delta] = []
    parts: list[Delta] = []
    has_text = has_calls = False
    for delta in deltas:
        if (has_text and delta.reasoning) or (has_calls and (delta.text or delta.reasoning)):
            joined.append(_one(parts))
            parts, has_text, has_calls = [], False, False
        parts.append(delta)
        has_text, has_calls = has_text or bool(delta.text), has_calls or bool(delta.tool_calls)
    return [*joined, _one(parts)]


def _one(parts: list[Delta]) -> Delta:
    """One delta for all parts."""
    last = parts[-1]
    if len(parts) == 1:
        return last
    return Delta(
        last.request_id,
        "".join([part.text for part in parts]),
        last.num_tokens,
        tuple(chain.from_iterable([part.logprobs for part in parts])),
        "".join([part.reasoning for part in parts]),
        _joined_calls(chain.from_iterable([part.tool_calls for part in parts])),
        last.prompt_tokens,
    )


def _joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """One delta for each call: clients expect an index only once in a chunk."""
    joined: dict[int, ToolCallDelta] = {}
    for new in deltas:
        old = joined.get(new.index)
        joined[new.index] = (
            new if old is None else replace(old, arguments=old.arguments + new.arguments)
        )
    return tuple(joined.values())
