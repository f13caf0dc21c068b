"""A machine whose replicas share its cores."""

from __future__ import annotations

from typing import Protocol


class Computing(Protocol):
    """A replica in a step."""

    def set_slowdown(self, slowdown: float) -> None:
        """From now on, a step takes so many times as long as alone."""
        ...


class Machine:
    """Processor sharing: more threads than cores slow all of them.

    cores: None for as many as there are threads.
    """

    def __init__(self, cores: int | None, threads: int) -> None:
        self._cores, self._threads = cores, threads
        self._computing: list[Computing] = []
        self.slowdown = 1.0

    def enter(self, replica: Computing) -> None:
        """The replica begins to compute."""
        self._computing.append(replica)
        self._share()

    def leave(self, replica: Computing) -> None:
        self._computing.remove(replica)
        self._share()

    def _share(self) -> None:
        if self._cores is None:
            return
        slowdown = max(1.0, len(self._computing) * self._threads / self._cores)
        if slowdown == self.slowdown:
            return
        self.slowdown = slowdown
        for replica in self._computing:
            replica.set_slowdown(slowdown)
