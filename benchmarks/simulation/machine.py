"""A machine whose replicas share its cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Computing(Protocol):
    """A replica in a step."""

    def set_slowdown(self, slowdown: float) -> None:
        """From now on, a step takes so many times as long as alone."""
        ...


class Machine:
    """All replicas that compute are slowed by the same factor.

    slowdowns: how many times as long as alone a step takes with 1, 2, … of them; empty: 1.
    """

    def __init__(self, slowdowns: Sequence[float]) -> None:
        self._slowdowns = slowdowns
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
        if not self._slowdowns or not self._computing:
            return
        slowdown = self._slowdowns[len(self._computing) - 1]
        if slowdown == self.slowdown:
            return
        self.slowdown = slowdown
        for replica in self._computing:
            replica.set_slowdown(slowdown)


def fair_shares(replicas: int, threads: int, cores: int) -> tuple[float, ...]:
    """Slowdowns of replicas with so many threads each that share cores without other losses."""
    return tuple(max(1.0, count * threads / cores) for count in range(1, replicas + 1))
