"""Connection status of the server: a label and a notice."""

from __future__ import annotations

from dataclasses import dataclass

import localgen
from localgen.backends.terminal_text import one_line
from localgen.client.snapshot import ServerSnapshot
from localgen.tui.feed import ServerLost


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """label: LIVE, LOST, WAITING, or NO FIGURES if the server responds but reports no statistics.

    notice: the problem and what is done about it, or empty if none.
    """

    label: str = "WAITING"
    notice: str = ""

    @property
    def is_live(self) -> bool:
        """True if the statistics are current."""
        return self.label == "LIVE"

    def after_loss(self, message: ServerLost, *, is_remote: bool) -> ServerStatus:
        """Return the status after a failed attempt."""
        why = f"{one_line(message.reason)}. Retrying in {message.retry_s:.3g} s, F12: now."
        if not is_remote:
            why += " The next prompt starts a server."
        if message.has_no_stats:
            return ServerStatus("NO FIGURES", why)
        if self.label == "LOST" or (self.is_live and not message.has_shut_down):
            return ServerStatus("LOST", why)
        # the local server exits when idle; the next prompt restarts it
        return ServerStatus("WAITING", why if is_remote else "")


def live_server_status(snapshot: ServerSnapshot, *, is_remote: bool) -> ServerStatus:
    """Return the status after a sample. A local server may be older than this program."""
    theirs, ours = snapshot.version, localgen.__version__
    if is_remote or theirs in (None, ours):
        return ServerStatus("LIVE")
    return ServerStatus(
        "LIVE",
        f"The server runs localgen {one_line(theirs or '')}, this is {ours}: localgen stop "
        "ends it, the next prompt starts this version.",
    )
