"""The first line: which server, how it is; and what is wrong where something is."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

import localgen
from localgen.backends.terminal_text import one_line
from localgen.client.snapshot import Snapshot
from localgen.tui.gauges.plots import spread
from localgen.tui.widgets import numbers

_STYLES = {
    "LIVE": "bold $success",
    "LOST": "bold $error",
    "WAITING": "bold $warning",
    "PAUSED": "bold $warning",
}


class Banner(Widget):
    """where: the server as the user called it. status: LIVE, WAITING, LOST or PAUSED."""

    ALLOW_SELECT = False
    DEFAULT_CSS = """
    Banner { height: 1; background: $panel; padding: 0 1; text-wrap: nowrap;
             text-overflow: ellipsis; }
    """
    text: reactive[tuple[str, ...]] = reactive(())
    status: reactive[str] = reactive("WAITING")

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def show(self, snapshot: Snapshot) -> None:
        """A word on the server."""
        self.text = facts_of(snapshot)

    def render(self) -> Content:
        status = Content.styled(f"● {self.status}", _STYLES[self.status])
        parts: list[tuple[str, str]] = [("localgen top", "bold $primary")]
        parts += [(f"  {fact}", "") for fact in (self._where, *self.text)]
        # how it stands is never cut off: what matters least makes room
        while len(parts) > 1 and self._width(parts) + status.cell_length >= self.content_size.width:
            parts.pop()
        return spread(Content.assemble(*parts), status, self.content_size.width)

    def _width(self, parts: list[tuple[str, str]]) -> int:
        return Content.assemble(*parts).cell_length


def facts_of(snapshot: Snapshot) -> tuple[str, ...]:
    """What is worth a place in the first line, the most important first."""
    name = f"{snapshot.kind} {one_line(snapshot.version or '')}".strip()
    if snapshot.kind == "localgen" and snapshot.version not in (None, localgen.__version__):
        name += f" (this is {localgen.__version__})"
    facts = [name] if name else []
    if snapshot.status != "ok":
        facts.append(one_line(snapshot.status))
    if snapshot.uptime_s is not None:
        facts.append(f"up {numbers.clock(snapshot.uptime_s)}")
    count = len(snapshot.models)
    facts.append("1 model" if count == 1 else f"{count} models")
    return (*facts, *map(one_line, snapshot.notes))
