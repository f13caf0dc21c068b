"""Full-text search over all sessions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from textual import work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, Static

from localgen.backends import units
from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import escape_name, one_line
from localgen.tui.chat.session_manager import MAX_HITS, SearchHit
from localgen.tui.widgets.picker import Picker

_DEBOUNCE_S = 0.15


class SearchScreen(Picker[SearchHit]):
    """Closes with the selected hit.

    search_sessions: called in a thread with the text and a function that returns true once the
    search is cancelled.
    """

    DEFAULT_CSS = """
    SearchScreen > Vertical { max-width: 110; }
    SearchScreen #count { height: 1; color: $text-muted; }
    """

    def __init__(
        self, search_sessions: Callable[[str, Callable[[], bool]], list[SearchHit]], text: str = ""
    ) -> None:
        super().__init__()
        self._search_sessions, self._text = search_sessions, text

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Search all sessions"
            box.border_subtitle = "Enter goes there, Esc closes"
            yield Input(self._text, placeholder="text to find", compact=True)
            yield OptionList(markup=False)
            yield Static("", id="count", markup=False)

    def on_mount(self) -> None:
        self.search(self._text)

    def on_input_changed(self, event: Input.Changed) -> None:
        self.search(event.value)

    def on_input_submitted(self) -> None:
        if self.highlighted is not None:
            self.select_item(self.highlighted)

    @work(exclusive=True)
    async def search(self, text: str) -> None:
        """Search after a pause in typing."""
        is_over = threading.Event()
        try:
            await asyncio.sleep(_DEBOUNCE_S if text else 0)
            hits = await asyncio.to_thread(self._search_sessions, text, is_over.is_set)
        except LocalgenError as error:
            self.query_one("#count", Static).update(Content(one_line(error.message)))
            return
        finally:  # cancelling the worker does not end its thread
            is_over.set()
        if not self.is_open:
            return
        self.show_rows((hit, _hit_content(hit, text)) for hit in hits)
        more = " or more" if len(hits) >= MAX_HITS else ""
        count = units.format_count(len(hits), "hit") + more if text.strip() else ""
        self.query_one("#count", Static).update(Content(count))


def _hit_content(hit: SearchHit, text: str) -> Content:
    name = escape_name(hit.name) or "New session"
    where = (
        f"{name} · turn {hit.turn_index + 1}" if hit.turn_index is not None else f"{name} · name"
    )
    excerpt = Content(hit.excerpt)
    at = hit.excerpt.casefold().find(text.casefold().strip())
    if at >= 0:
        excerpt = excerpt.stylize("bold underline", at, at + len(text.strip()))
    return Content.assemble((where, "$primary"), "\n  ", excerpt)
