"""Which replicas have a model in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping

# a replica that was given a model is taken to have it for this time, in which it loads it and
# reports that
_LOADING_S = 30.0
# loading a model takes longer than waiting behind this many requests
LOAD_SPILL = 16


class ModelTable:
    """The models that replicas report, and those of requests that they got since."""

    def __init__(self) -> None:
        self._given_s: dict[tuple[str, str], float] = {}

    def give(self, model: str, replica: str, now_s: float) -> None:
        """Note that a request for a model goes to a replica."""
        self._given_s = {
            pair: given_s for pair, given_s in self._given_s.items() if now_s - given_s < _LOADING_S
        }
        self._given_s[model, replica] = now_s

    def holders(
        self, model: str, reported: Mapping[str, Collection[str]], now_s: float
    ) -> list[str]:
        """The replicas that have a model. reported: names of the models of each replica."""
        return [
            replica
            for replica, models in reported.items()
            if model in models
            or now_s - self._given_s.get((model, replica), -_LOADING_S) < _LOADING_S
        ]


def serving(loads: Mapping[str, int], holders: Collection[str]) -> dict[str, int]:
    """The loads of the replicas that should get a request: those with its model in memory.

    loads: requests of each replica. All of them, if none has the model, or if each of those has
    over LOAD_SPILL requests more than the least loaded one.
    """
    held = {replica: loads[replica] for replica in holders}
    if not held or min(held.values()) - min(loads.values()) > LOAD_SPILL:
        return dict(loads)
    return held
