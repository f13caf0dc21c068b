"""Token limits of a gateway: replicas count the tokens of each account, and the gateway charges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping


class TokenCharges:
    """charge: called with an account and its new tokens."""

    def __init__(self, charge: Callable[[str, int], object]) -> None:
        self._charge = charge
        self._known: dict[str, Mapping[str, int]] = {}

    def read(self, answers: Iterable[tuple[str, Mapping[str, int]]]) -> None:
        """Charge what has been added since the last call.

        answers: name and tokens of each account of all replicas that answered. A replica that did
        not answer in the last call is charged from now on.
        """
        known, self._known = self._known, dict(answers)
        for replica in known.keys() & self._known.keys():
            for account, total in self._known[replica].items():
                if (new := total - known[replica].get(account, 0)) > 0:
                    self._charge(account, new)
