"""The transcript of a session, with the answer being generated at its end.

One widget draws all rows itself, so that a long answer costs what is visible of it: see
turn_rows.py for the rows.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from localgen.chat.conversation import Turn
from localgen.tui.chat.active_session import ActiveSession
from localgen.tui.chat.answer_stream import AnswerStream, StreamPosition
from localgen.tui.chat.markdown import RowRenderer
from localgen.tui.chat.rows import COPY, FOLD, MUTED, Row, row_text
from localgen.tui.chat.turn_rows import TurnRows

# bindings of screens that show transcripts
TRANSCRIPT_BINDINGS = (
    Binding("f5", "toggle_reasoning", "Show or hide reasoning", show=False),
    Binding("pageup", "scroll(-1)", "Scroll back", show=False, id="scroll_back"),
    Binding("pagedown", "scroll(1)", "Scroll forward", show=False, id="scroll_forward"),
    Binding("ctrl+home", "show_earlier", "Earlier turns", show=False),
    Binding("ctrl+end", "show_latest", "The latest turn", show=False),
)
# turns shown at first; earlier ones on request
_TURNS_SHOWN = 12
# pause after a repaint, as a multiple of its time: the rest is for keys and for the model
_PAUSE_PER_REPAINT = 3
_EMPTY_TEXT = "No messages yet. Type below, Enter sends. /help lists the commands, F1 the keys."


class Transcript(ScrollView, can_focus=True):
    """Shows the turns of one session; sync() updates it. Scrolled to the end, it stays there.

    rows: all of them, also those out of view.
    """

    DEFAULT_CSS = """
    Transcript {
        height: 1fr; scrollbar-size-vertical: 1; scrollbar-gutter: stable;
        overflow-x: hidden; overflow-y: auto;
    }
    Transcript:focus { background-tint: $foreground 3%; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "Scroll down", show=False),
        Binding("k", "scroll_up", "Scroll up", show=False),
        Binding("ctrl+d", "page_down", "Scroll forward", show=False),
        Binding("ctrl+u", "page_up", "Scroll back", show=False),
        Binding("g", "scroll_home", "To the start", show=False),
        Binding("G", "scroll_end", "To the end", show=False),
    ]

    class CopyRequested(Message):
        """The place to click of a code block was clicked. code: its text."""

        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._active: ActiveSession | None = None
        self._turns: list[TurnRows] = []
        self._first_turn = 0
        self._is_at_end = True
        self._live: TurnRows | None = None
        self._answer_stream: AnswerStream | None = None
        self._position = StreamPosition()
        self._next_repaint_s = 0.0
        self._renderer: RowRenderer | None = None
        self._is_following = True  # the end
        self._wanted_turn: int | None = None  # to scroll to once the rows are made
        self.rows: list[Row] = []
        self._turn_starts: list[int] = []  # index of each turn's first row

    @property
    def is_empty(self) -> bool:
        """True if there is no turn to show."""
        return self._active is None or not self.shown_turns

    def show_session(self, active: ActiveSession) -> None:
        """Show another session."""
        self._active = active
        self._show_turns(max(0, len(_turns_of(active)) - _TURNS_SHOWN))
        self.sync()

    def sync(self) -> None:
        """Show what has changed since the last call."""
        if self._active is not None and self.is_attached:
            self._sync_answer(self._active)
            self._sync_turns(self._active)

    def show_earlier(self) -> bool:
        """Show earlier turns as well. Returns False if there are none."""
        if self._first_turn == 0:
            return False
        last = None if self._is_at_end else self._end_turn
        self._show_turns(max(0, self._first_turn - _TURNS_SHOWN), last)
        self.scroll_home(animate=False)
        return True

    def scroll_to_turn(self, turn_index: int) -> None:
        """Scroll to a turn. If it is not shown, it and the next ones are, not all in between."""
        if not self._first_turn <= turn_index < self._end_turn:
            self._show_turns(max(0, turn_index - 1), turn_index + _TURNS_SHOWN)
        self._wanted_turn = turn_index
        self._lay_out()  # or later, if it is not on the screen yet

    def show_latest(self) -> None:
        """Scroll to the end and keep following it."""
        self._show_end()
        self._scroll_to_end()

    def toggle_reasoning(self) -> None:
        """Expand or collapse the reasoning of the last answer."""
        shown = self.shown_turns
        if shown:
            shown[-1].toggle_reasoning()
            self._lay_out()

    def scroll_to_start(self) -> None:
        """Scroll to the first turn shown, or show earlier ones."""
        if not self.show_earlier():
            self.scroll_home(animate=False)

    def scroll_pages(self, by: int) -> None:
        """Scroll down by a number of pages, up if it is negative."""
        page = self.scrollable_content_region.height
        self.scroll_to(y=self.scroll_y + by * page, animate=False)

    # --- the rows ---

    def on_resize(self, event: events.Resize) -> None:
        """Render for the new width; the end, or the turn at the top, stays where it is."""
        self._lay_out()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._is_following = self.is_vertical_scroll_end

    def watch_show_vertical_scrollbar(self, is_shown: bool) -> None:
        """Set the position of a scrollbar that appears: Textual sets it only while it is shown."""
        if is_shown:
            self.vertical_scrollbar.position = self.scroll_y

    def notify_style_update(self) -> None:
        """Render in the new colours."""
        super().notify_style_update()
        self._renderer = None
        if self.is_attached:
            self._lay_out()

    def render_line(self, y: int) -> Strip:
        width, base = self.scrollable_content_region.width, self.rich_style
        at = self.scroll_offset.y + y
        if at >= len(self.rows):
            return Strip.blank(width, base)
        strip = Strip(self.rows[at])
        span = self.text_selection.get_span(at) if self.text_selection is not None else None
        if span is not None:
            strip = self._with_selection(strip, *span)
        return strip.adjust_cell_length(width).apply_style(base).apply_offsets(0, at)

    @property
    def text(self) -> str:
        """The text of all rows."""
        return "\n".join(map(row_text, self.rows))

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text."""
        return selection.extract(self.text), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """Copy the code, or unfold the reasoning, under the pointer."""
        meta = event.style.meta
        if COPY in meta:
            self.post_message(self.CopyRequested(meta[COPY]))
        elif FOLD in meta:
            row = event.y + self.scroll_offset.y
            self.shown_turns[bisect_right(self._turn_starts, row) - 1].toggle_reasoning()
            self._lay_out()

    def _with_selection(self, strip: Strip, start: int, end: int) -> Strip:
        style = self.screen.get_component_rich_style("screen--selection")
        end = strip.cell_length if end == -1 else min(end, strip.cell_length)
        if start >= end:
            return strip
        before, selected, after = strip.divide([start, end, strip.cell_length])
        return Strip.join([before, selected.apply_style(style), after])

    def _lay_out(self) -> None:
        """Make the rows of all turns anew, those that have changed."""
        width = self.scrollable_content_region.width
        if not width:
            return
        if self._renderer is None or self._renderer.width != width:
            self._renderer = RowRenderer(width, self.app.theme_variables)
        top, before = self.scroll_offset.y, self.rows
        turn_at_top = max(0, bisect_right(self._turn_starts, top) - 1)
        into_turn = top - self._turn_starts[turn_at_top] if self._turn_starts else 0
        turns = self.shown_turns
        self.rows, self._turn_starts = self._note_rows(self._renderer, above=True), []
        for turn in turns:
            self._turn_starts.append(len(self.rows))
            self.rows += turn.rows(self._renderer)
        self.rows += self._note_rows(self._renderer, above=False)
        wanted, self._wanted_turn = self._wanted_turn, None
        follows = self._is_following and wanted is None
        if wanted is not None:
            turn_at_top, into_turn = wanted - self._first_turn, 0
        self._set_virtual_size(Size(width, len(self.rows)))
        if follows:
            self._scroll_to_end()
        elif turn_at_top < len(turns):
            # force: the scrollbar that allows it comes with the next layout
            self.scroll_to(y=self._turn_starts[turn_at_top] + into_turn, animate=False, force=True)
        self._refresh_changed(before)

    def _set_virtual_size(self, size: Size) -> None:
        """Set the size of all rows, without a layout of the screen if that stays as it is."""
        before = self.virtual_size
        if self.show_vertical_scrollbar and size.width == before.width and size > before:
            self.set_reactive(Transcript.virtual_size, size)
            self.vertical_scrollbar.window_virtual_size = size.height
        else:
            self.virtual_size = size

    def _refresh_changed(self, before: list[Row]) -> None:
        """Draw the visible rows from the first on that differs; a scroll has drawn them all."""
        top = self.scroll_offset.y
        bottom = min(top + self.size.height, max(len(before), len(self.rows)))
        for at in range(top, bottom):
            if at >= len(before) or at >= len(self.rows) or before[at] != self.rows[at]:
                self.refresh_lines(at, bottom - at)
                return

    def _scroll_to_end(self) -> None:
        self._is_following = True
        self.scroll_end(animate=False, immediate=True, force=True, x_axis=False)

    def _note_rows(self, renderer: RowRenderer, *, above: bool) -> list[Row]:
        """A row that says what is not shown above, or below."""
        if not above:
            assert self._active is not None
            later = len(_turns_of(self._active)) - self._end_turn
            text = f"{later:,} later turns: Ctrl+End shows them" if not self._is_at_end else ""
        elif self._first_turn:
            text = f"{self._first_turn:,} earlier turns: Ctrl+Home shows them"
        else:
            text = "" if self.shown_turns else _EMPTY_TEXT
        return renderer.text(Text(text), MUTED) if text else []

    # --- the turns ---

    @property
    def shown_turns(self) -> list[TurnRows]:
        """The turns that can be scrolled to, with the one in progress."""
        return self._turns if self._live is None else [*self._turns, self._live]

    @property
    def _end_turn(self) -> int:
        """Index after the last turn shown."""
        return self._first_turn + len(self._turns)

    def _sync_answer(self, active: ActiveSession) -> None:
        answering = active.answer_stream
        if answering is not self._answer_stream and answering is not None:
            if not self._is_at_end:  # the user is reading earlier turns
                return
            self._sync_turns(active)
            self._live, self._answer_stream = TurnRows(Turn(answering.prompt, "")), answering
            self._position, self._next_repaint_s = StreamPosition(), 0.0
            self._lay_out()
        if self._live is None or self._answer_stream is None:
            return
        started_s = time.monotonic()
        if started_s < self._next_repaint_s and not self._answer_stream.ended.is_set():
            return
        if self._append_new(self._live, self._answer_stream):
            self._lay_out()
            self.call_after_refresh(self._pause_since, started_s)

    def _pause_since(self, started_s: float) -> None:
        now_s = time.monotonic()
        self._next_repaint_s = now_s + _PAUSE_PER_REPAINT * (now_s - started_s)

    def _append_new(self, live: TurnRows, stream: AnswerStream) -> bool:
        """Append what has come since the last call; False if nothing has."""
        before = self._position
        thought, text, self._position = stream.chunks_since(before)
        has_steps = self._position.steps != before.steps
        if has_steps:  # the text so far is in them
            live = TurnRows(Turn(stream.prompt, "", steps=stream.steps[: self._position.steps]))
            self._live = live
        live.append(thought, text)
        return bool(thought or text or has_steps)

    def _sync_turns(self, active: ActiveSession) -> None:
        turns = _turns_of(active)
        if (
            active.answer_stream is None
            and self._live is not None
            and self._answer_stream is not None
        ):
            done = self._answer_stream.to_turn()
            if bool(turns) and turns[-1] == done and len(turns) == self._end_turn + 1:
                self._append_new(self._live, self._answer_stream)
                self._live.finish(done)
                self._turns.append(self._live)
            self._live = self._answer_stream = None
            self._lay_out()
        same = [each.turn for each in self._turns] == list(turns[self._first_turn : self._end_turn])
        if len(turns) < self._end_turn or not same:
            self._show_turns(max(0, len(turns) - _TURNS_SHOWN))
        elif len(turns) > self._end_turn and self._is_at_end:
            self._turns += [TurnRows(turn) for turn in turns[self._end_turn :]]
            self._is_following = True
            self._lay_out()

    def _show_end(self) -> None:
        if self._active is not None and not self._is_at_end:
            self._show_turns(max(0, len(_turns_of(self._active)) - _TURNS_SHOWN))

    def _show_turns(self, first: int, last: int | None = None) -> None:
        """Show the turns from first up to last, or up to the end if last is None; its end first."""
        assert self._active is not None
        turns = _turns_of(self._active)
        self._live, self._answer_stream, self._first_turn = None, None, first
        self._is_at_end = last is None or last >= len(turns)
        self._turns = [TurnRows(turn) for turn in turns[first:last]]
        self._is_following = True
        self._lay_out()


def _turns_of(active: ActiveSession) -> tuple[Turn, ...]:
    growing = active.record.unfinished_turn
    turns = active.chat.conversation.turns
    return turns if growing is None or active.answer_stream is not None else (*turns, growing)
