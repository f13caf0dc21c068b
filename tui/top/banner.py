"""The title line of `localgen top`: server, version, uptime and connection status."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

import localgen
from localgen.backends.terminal_text import one_line
from localgen.backends.units import format_count
from localgen.client.snapshot import ServerSnapshot
from localgen.tui.widgets.alignment import align_ends
from localgen.tui.widgets.numbers import format_duration_s

_STYLES = {
    "LIVE": "bold $success",
    "LOST": "bold $error",
    "WAITING": "bold $warning",
    "PAUSED": "bold $warning",
}


class Banner(Widget):
    """server_label: how the user named the server. status: LIVE, WAITING, LOST or PAUSED."""

    ALLOW_SELECT = False
    DEFAULT_CSS = """
    Banner { height: 1; background: $panel; padding: 0 1; text-wrap: nowrap;
             text-overflow: ellipsis; }
    """
    facts: reactive[tuple[str, ...]] = reactive(())
    status: reactive[str] = reactive("WAITING")

    def __init__(self, server_label: str) -> None:
        super().__init__()
        self._server_label = server_label

    def show(self, snapshot: ServerSnapshot) -> None:
        """Show the facts of a snapshot."""
        self.facts = server_facts(snapshot)

    def render(self) -> Content:
        status = Content.styled(f"● {self.status}", _STYLES[self.status])
        parts: list[tuple[str, str]] = [("localgen top", "bold $primary")]
        parts += [(f"  {fact}", "") for fact in (self._server_label, *self.facts)]
        # always show the status; drop the least important facts first
        while len(parts) > 1 and self._width(parts) + status.cell_length >= self.content_size.width:
            parts.pop()
        return align_ends(Content.assemble(*parts), status, self.content_size.width)

    def _width(self, parts: list[tuple[str, str]]) -> int:
        return Content.assemble(*parts).cell_length


def server_facts(snapshot: ServerSnapshot) -> tuple[str, ...]:
    """Facts for the title line, most important first."""
    name = f"{snapshot.server_type} {one_line(snapshot.version or '')}".strip()
    if snapshot.server_type == "localgen" and snapshot.version not in (None, localgen.__version__):
        name += f" (this is {localgen.__version__})"
    facts = [name] if name else []
    if snapshot.status != "ok":
        facts.append(one_line(snapshot.status))
    if snapshot.uptime_s is not None:
        facts.append(f"up {format_duration_s(snapshot.uptime_s)}")
    if snapshot.num_replicas is not None:
        facts.append(format_count(snapshot.num_replicas, "replica"))
    facts.append(format_count(len({model.served_name for model in snapshot.models}), "model"))
    return tuple(facts)
