"""Token limits of a gateway: each replica tells it the tokens of each account, and it charges."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

from localgen.backends.terminal_text import one_line

# tokens are charged so much later than a request ends
_PERIOD_S = 1.0

Totals = Mapping[str, int]


class TokenCharges:
    """The tokens of a replica that the gateway has to charge, each of which it is told once.

    read: the tokens of each account since the start of the replica. charge: tells the gateway new
    ones, and returns when it has charged them. What fails is charged with the next ones, also by a
    gateway that was started anew.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Totals]],
        charge: Callable[[Totals], Awaitable[object]],
    ) -> None:
        self._read, self._charge = read, charge
        self._charged: Totals = {}

    async def run(self) -> NoReturn:
        """Charge periodically. A failure is said in the log once, until one succeeds."""
        is_failing = False
        while True:
            await asyncio.sleep(_PERIOD_S)
            try:
                await self.charge_new()
                is_failing = False
            except Exception as error:
                if not is_failing:
                    reason = one_line(str(error)) or type(error).__name__
                    print(f"tokens are charged later: {reason}", file=sys.stderr)
                is_failing = True

    async def charge_new(self) -> None:
        """Charge what has been computed since the last call that did not fail."""
        totals = await self._read()
        if new := self.new_tokens(totals):
            await self._charge(new)
        self._charged = dict(totals)

    def new_tokens(self, totals: Totals) -> dict[str, int]:
        """The tokens of each account that are not charged yet. totals: what read() returns."""
        counts = ((name, total - self._charged.get(name, 0)) for name, total in totals.items())
        return {account: new for account, new in counts if new > 0}
