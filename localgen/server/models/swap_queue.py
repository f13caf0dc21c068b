"""Requests that wait for memory of other models, and the turns of models that share it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from localgen.backends.errors import MemoryInUse, QueueFull, ServerUnavailable
from localgen.backends.formats.model_files import ModelFile
from localgen.placement.backend_choice import Placement
from localgen.server.models.resident import ResidentModel

# how long a request waits unless it has a time limit of its own
DEFAULT_WAIT_S = 120.0
# waiting requests per model, as in the engines
DEFAULT_MAX_WAITING = 512
# a turn lasts at least this long, and as many load times: at most a quarter of the time is loading
MIN_TURN_S = 2.0
TURN_LOADS = 3
# in its turn, an idle model is kept for this share of its load time: its clients may come back
HOLD_LOADS = 0.25
MAX_HOLD_S = 1.0
# the memory that other programs use changes without notice
_POLL_S = 1.0


class MustWait(MemoryInUse):
    """A request cannot have its model before others gave memory back.

    placement: where the model is to be loaded; None if it is loaded and gives way.
    """

    def __init__(self, message: str, placement: Placement | None = None) -> None:
        super().__init__(message)
        self.placement = placement

    def wants_memory_of(self, resident: ResidentModel) -> bool:
        if self.placement is None:
            return False
        return any(resident.placement.uses(gpu) for gpu in self.placement.gpus or (None,))


@dataclass(frozen=True, slots=True)
class MemoryWait:
    """How a request waits.

    deadline_s: until when for memory (monotonic seconds). on_wait: called with the reason when that
    begins, and with an empty text when it ends. load_deadline_s: until when for the load of its
    model, or None until that has ended.
    """

    deadline_s: float
    on_wait: Callable[[str], None] = lambda reason: None
    load_deadline_s: float | None = None


@dataclass(slots=True, eq=False)
class _Waiter:
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_served: bool = False
    model: ResidentModel | None = None


@dataclass(slots=True, eq=False)
class _Line:
    """The waiting requests of one model, oldest first. reason: of the last attempt."""

    name: str
    reason: MustWait
    waiters: list[_Waiter] = field(default_factory=list)


class SwapQueue:
    """Queue of models that wait for memory, each with a line of requests.

    A model in use keeps its memory for a turn. After that, new requests for it wait behind the
    models that came before, and it is evicted when its last request has ended. The first request
    of a line attempts to load the model whenever something changed; the others share that load.

    residents: returns the loaded and loading models. max_waiting: requests per model.
    """

    def __init__(
        self,
        residents: Callable[[], Sequence[ResidentModel]],
        max_waiting: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._residents = residents
        self._max_waiting = max_waiting or DEFAULT_MAX_WAITING
        self._clock = clock
        self._lines: dict[Path, _Line] = {}  # in the order of their turns
        self._closed = False

    def count_waiting(self) -> dict[str, int]:
        """Waiting requests by model name."""
        counts: Counter[str] = Counter()
        for line in self._lines.values():
            counts[line.name] += len(line.waiters)
        return dict(counts)

    def may_evict(self, file: ModelFile, resident: ResidentModel) -> bool:
        """Return True if an idle model may be evicted for this file now."""
        held = self._clock() < _hold_end_s(resident)
        return resident.is_idle and not held and self._wanted_by(resident, file.path) is None

    def gives_way_to(self, resident: ResidentModel) -> str | None:
        """The model that new requests for a resident model wait behind, if any."""
        if resident.info is None or self._clock() < _turn_end_s(resident):
            return None
        return self._wanted_by(resident, resident.file.path)

    def require_turn(self, resident: ResidentModel) -> None:
        """Raise MustWait if new requests for a resident model wait behind another model."""
        other = self.gives_way_to(resident)
        if other is not None:
            raise MustWait(f"{resident.file.name} gives way to {other}, which waits for its memory")

    def _wanted_by(self, resident: ResidentModel, path: Path) -> str | None:
        """The first model before `path` in the queue that waits for a resident's memory."""
        for other, line in self._lines.items():
            if other == path:
                return None
            if line.reason.wants_memory_of(resident):
                return line.name
        return None

    async def run(
        self,
        file: ModelFile,
        attempt: Callable[[], Awaitable[ResidentModel | None]],
        wait: MemoryWait,
    ) -> ResidentModel | None:
        """Return the result of an attempt, repeated in the turn of the model while it must wait.

        The result of one attempt is that of all requests that wait for this model. Raises
        QueueFull, MemoryInUse after the deadline, and the errors of the attempt.
        """
        line = self._lines.get(file.path)
        if line is None:
            try:
                return await attempt()
            except MustWait as reason:
                line = self._lines.setdefault(file.path, _Line(file.name, reason))
        if len(line.waiters) >= self._max_waiting:
            raise QueueFull(
                f"{len(line.waiters)} requests wait for {file.name} to be loaded, the limit is "
                f"{self._max_waiting}: try again later"
            )
        waiter = _Waiter()
        line.waiters.append(waiter)
        wait.on_wait(line.reason.message)
        try:
            while not waiter.is_served:
                await self._wait_for_change(line, waiter, wait.deadline_s)
                if line.waiters[0] is waiter and not waiter.is_served:
                    await self._attempt(line, attempt)
            return waiter.model
        finally:
            wait.on_wait("")
            self._leave(file.path, line, waiter)

    async def _wait_for_change(self, line: _Line, waiter: _Waiter, deadline_s: float) -> None:
        """Wait until an attempt may succeed. Raises MemoryInUse, ServerUnavailable."""
        left_s = deadline_s - self._clock()
        if left_s <= 0:
            advice = "try again later, or unload a model with `localgen stop`"
            raise MemoryInUse(f"{line.reason.message}; {advice}")
        if line.waiters[0] is waiter:
            left_s = min(left_s, self._next_attempt_s())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(waiter.changed.wait(), 0 if self._closed else left_s)
        waiter.changed.clear()
        if self._closed:
            raise ServerUnavailable("the server is shutting down: try again")

    def _next_attempt_s(self) -> float:
        """Seconds until an idle model is no longer held, at most _POLL_S."""
        now_s = self._clock()
        ends = (_hold_end_s(resident) - now_s for resident in self._residents())
        return min((end_s for end_s in ends if end_s > 0), default=_POLL_S)

    async def _attempt(
        self, line: _Line, attempt: Callable[[], Awaitable[ResidentModel | None]]
    ) -> None:
        try:
            model = await attempt()
        except MustWait as reason:
            line.reason = reason
            return
        # later requests join no line whose model is there
        self._lines = {path: other for path, other in self._lines.items() if other is not line}
        for waiter in line.waiters:
            waiter.is_served, waiter.model = True, model
            waiter.changed.set()

    def _leave(self, path: Path, line: _Line, waiter: _Waiter) -> None:
        was_first = line.waiters[0] is waiter
        line.waiters.remove(waiter)
        if not line.waiters and self._lines.get(path) is line:
            del self._lines[path]
        if was_first:
            self.notify()

    def notify(self) -> None:
        """A model became idle, was loaded or unloaded: the first of each line attempts again."""
        for line in self._lines.values():
            line.waiters[0].changed.set()

    def close(self) -> None:
        """End all waits with ServerUnavailable."""
        self._closed = True
        for line in self._lines.values():
            for waiter in line.waiters:
                waiter.changed.set()


def _load_s(resident: ResidentModel) -> float:
    return resident.loaded_s - resident.created_s


def _turn_end_s(resident: ResidentModel) -> float:
    """When a loaded model may have to give way (monotonic seconds)."""
    return resident.loaded_s + max(MIN_TURN_S, TURN_LOADS * _load_s(resident))


def _hold_end_s(resident: ResidentModel) -> float:
    """Until when an idle model is kept for its clients (monotonic seconds); 0 if it is not."""
    if not resident.is_idle:
        return 0.0
    idle_end_s = resident.last_used_s + min(MAX_HOLD_S, HOLD_LOADS * _load_s(resident))
    return min(_turn_end_s(resident), idle_end_s)
