"""How it stands with the server, in a word and a sentence."""

from __future__ import annotations

from dataclasses import dataclass

import localgen
from localgen.backends.terminal_text import one_line
from localgen.client.snapshot import Snapshot
from localgen.tui.feed import Lost


@dataclass(frozen=True, slots=True)
class ServerState:
    """status: LIVE, LOST, WAITING, or NO FIGURES of one that answers and tells none of itself.

    notice: what is wrong and what is done about it; empty: nothing.
    """

    status: str = "WAITING"
    notice: str = ""

    @property
    def is_live(self) -> bool:
        """Whether the figures there are, are of now."""
        return self.status == "LIVE"

    def after(self, message: Lost, *, is_elsewhere: bool) -> ServerState:
        """The state once nothing was heard of it."""
        why = f"{one_line(message.why)}. Trying again in {message.retry_s:.3g} s, F12: now."
        if not is_elsewhere:
            why += " The next prompt starts one."
        if message.is_silent:
            return ServerState("NO FIGURES", why)
        if self.status == "LOST" or (self.is_live and not message.has_left):
            return ServerState("LOST", why)
        # ours leaves when it has been idle, and the next prompt starts it
        return ServerState("WAITING", why if is_elsewhere else "")


def seen(snapshot: Snapshot, *, is_elsewhere: bool) -> ServerState:
    """The state once it was heard of. One of ours may be there since before an update."""
    theirs, ours = snapshot.version, localgen.__version__
    if is_elsewhere or theirs in (None, ours):
        return ServerState("LIVE")
    return ServerState(
        "LIVE",
        f"The server is localgen {one_line(theirs or '')}, this is {ours}: localgen stop ends it, "
        "the next prompt starts ours.",
    )
