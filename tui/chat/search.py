"""Finding a text in all sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localgen.backends.errors import LocalgenError
from localgen.chats import report
from localgen.chats.inert import one_line
from localgen.tui.chat.desk import MOST_HITS, Hit

_PAUSE_S = 0.15


class SearchScreen(ModalScreen[Hit | None]):
    """find: what there is, in a thread. Closes with the place that was chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "Close"),
        Binding("down", "move(1)", "Next", show=False),
        Binding("up", "move(-1)", "Before", show=False),
    ]
    DEFAULT_CSS = """
    SearchScreen { align: center middle; background: $background 60%; }
    SearchScreen > Vertical {
        width: 90%; max-width: 110; height: 80%; padding: 0 1;
        border: round $primary; background: $surface; border-title-color: $primary;
    }
    SearchScreen Input { margin: 0 0 1 0; }
    SearchScreen OptionList { height: 1fr; border: none; background: $surface; padding: 0; }
    SearchScreen #count { height: 1; color: $text-muted; }
    """

    def __init__(self, find: Callable[[str], list[Hit]], text: str = "") -> None:
        super().__init__()
        self._find, self._text = find, text
        self._hits: list[Hit] = []

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Search all sessions"
            box.border_subtitle = "Enter goes there, Esc closes"
            yield Input(self._text, placeholder="words, in any letter case", compact=True)
            yield OptionList(markup=False)
            yield Static("", id="count", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).can_focus = False
        self.search(self._text)

    def on_input_changed(self, event: Input.Changed) -> None:
        self.search(event.value)

    def on_input_submitted(self) -> None:
        at = self.query_one(OptionList).highlighted
        if at is not None:
            self.dismiss(self._hits[at])

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._hits[event.option_index])

    def action_move(self, by: int) -> None:
        found = self.query_one(OptionList)
        if by > 0:
            found.action_cursor_down()
        else:
            found.action_cursor_up()

    @work(exclusive=True)
    async def search(self, text: str) -> None:
        """Look when the typing pauses."""
        await asyncio.sleep(_PAUSE_S if text else 0)
        try:
            hits = await asyncio.to_thread(self._find, text)
        except LocalgenError as error:
            self.query_one("#count", Static).update(Content(one_line(error.message)))
            return
        self._hits = hits
        found = self.query_one(OptionList)
        found.clear_options()
        found.add_options([Option(_drawn(hit, text)) for hit in hits])
        found.highlighted = 0 if hits else None
        more = " or more" if len(hits) >= MOST_HITS else ""
        count = report.count(len(hits), "place") + more if text.strip() else ""
        self.query_one("#count", Static).update(Content(count))


def _drawn(hit: Hit, text: str) -> Content:
    name = one_line(hit.name) or "New session"
    where = f"{name} · turn {hit.place + 1}" if hit.place is not None else f"{name} · its name"
    excerpt = Content(hit.excerpt)
    at = hit.excerpt.casefold().find(text.casefold().strip())
    if at >= 0:
        excerpt = excerpt.stylize("bold underline", at, at + len(text.strip()))
    return Content.assemble((where, "$primary"), "\n  ", excerpt)
