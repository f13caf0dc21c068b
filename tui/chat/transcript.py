"""The transcript of a session, with the answer being generated at its end."""

from __future__ import annotations

import asyncio
import time

from textual import events
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Static

from localgen.chat.conversation import Turn
from localgen.tui.chat.active_session import ActiveSession
from localgen.tui.chat.answer_stream import AnswerStream, StreamPosition
from localgen.tui.chat.turn_view import TurnView

# bindings of screens that show transcripts
TRANSCRIPT_BINDINGS = (
    Binding("f5", "toggle_reasoning", "Show or hide reasoning", show=False),
    Binding("pageup", "scroll(-1)", "Scroll back", show=False),
    Binding("pagedown", "scroll(1)", "Scroll forward", show=False),
    Binding("ctrl+home", "show_earlier", "Earlier turns", show=False),
    Binding("ctrl+end", "show_latest", "The latest turn", show=False),
)
# turns mounted at first; earlier ones on request
_TURNS_SHOWN = 12
# a long answer takes longer to draw: the pause between repaints grows with its length
_CHARS_PER_PAUSE = 10_000
_REPAINT_PAUSE_S = 0.066


class Transcript(VerticalScroll):
    """Shows the turns of one session; sync() updates it."""

    DEFAULT_CSS = """
    Transcript { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; }
    Transcript > .note { height: auto; color: $text-muted; padding: 0 1; }
    Transcript:focus { background-tint: $foreground 3%; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._active: ActiveSession | None = None
        self._views: list[TurnView] = []
        self._first_turn = 0
        self._is_at_end = True
        self._live_view: TurnView | None = None
        self._answer_stream: AnswerStream | None = None
        # the last stream shown, even if its live view is gone
        self._last_shown_stream: AnswerStream | None = None
        self._position = StreamPosition()
        self._next_repaint_s = 0.0
        self._num_chars = self._height = 0
        self._lock = asyncio.Lock()

    def on_resize(self, event: events.Resize) -> None:
        """Lay out again on a height change: scrolling to the end would use the old height."""
        if event.container_size.height != self._height:
            self._height = event.container_size.height
            self.refresh(layout=True)

    async def show_session(self, active: ActiveSession) -> None:
        """Show another session."""
        async with self._lock:
            self._active, self._last_shown_stream = active, None
            await self._rebuild(max(0, len(_turns_of(active)) - _TURNS_SHOWN))
        await self.sync()

    async def sync(self) -> None:
        """Show what has changed since the last call."""
        async with self._lock:
            if self._active is None or not self.is_attached:
                return
            await self._sync_answer(self._active)
            await self._sync_turns(self._active)

    async def show_earlier(self) -> bool:
        """Mount earlier turns. Returns False if there are none."""
        async with self._lock:
            if self._first_turn == 0:
                return False
            last = None if self._is_at_end else self._end_turn
            await self._rebuild(max(0, self._first_turn - _TURNS_SHOWN), last)
            self.release_anchor()
            self.scroll_home(animate=False)
            return True

    async def scroll_to_turn(self, turn_index: int) -> None:
        """Scroll to a turn, mounting the turns around it if necessary."""
        async with self._lock:
            if not self._first_turn <= turn_index < self._end_turn:
                # mount only the turns around it, not the whole conversation
                await self._rebuild(max(0, turn_index - 1), turn_index + _TURNS_SHOWN)
            at = turn_index - self._first_turn
            if at < len(self._views):
                self.release_anchor()
                self.call_after_refresh(self._views[at].scroll_visible, animate=False, top=True)

    async def show_latest(self) -> None:
        """Scroll to the end and keep following it."""
        async with self._lock:
            await self._show_end()
            self.anchor()

    def toggle_reasoning(self) -> None:
        """Expand or collapse the reasoning of the last answer."""
        views = [*self._views, *([self._live_view] if self._live_view else [])]
        if views:
            views[-1].toggle_reasoning()

    async def scroll_to_start(self) -> None:
        """Scroll to the first mounted turn, or mount earlier ones."""
        if not await self.show_earlier():
            self.scroll_home(animate=False)

    def scroll_pages(self, by: int) -> None:
        """Scroll down by a number of pages, up if it is negative."""
        page = self.scrollable_content_region.height
        self.scroll_to(y=self.scroll_y + by * page, animate=False)

    async def _sync_answer(self, active: ActiveSession) -> None:
        answering = active.answer_stream
        if answering is not self._answer_stream and answering is not None:
            is_new = answering is not self._last_shown_stream
            if is_new:
                await self._show_end()
            elif not self._is_at_end:  # the user is reading earlier turns
                return
            self._last_shown_stream = answering
            await self._sync_turns(active)
            await self._finish_live_view(None)
            self._answer_stream, self._position, self._num_chars, self._next_repaint_s = (
                answering,
                StreamPosition(),
                0,
                0.0,
            )
            self._live_view = TurnView(Turn(answering.prompt, ""))
            await self._clear_notes()
            await self.mount(self._live_view)
            if is_new:
                self.anchor()
        if self._live_view is None or self._answer_stream is None:
            return
        if time.monotonic() < self._next_repaint_s and not self._answer_stream.ended.is_set():
            return
        thought, text, self._position = self._answer_stream.chunks_since(self._position)
        self._num_chars += len(text) + len(thought)
        self._next_repaint_s = time.monotonic() + _REPAINT_PAUSE_S * (
            self._num_chars // _CHARS_PER_PAUSE
        )
        await self._live_view.append(thought, text)

    async def _sync_turns(self, active: ActiveSession) -> None:
        turns = _turns_of(active)
        if (
            active.answer_stream is None
            and self._live_view is not None
            and self._answer_stream is not None
        ):
            done = self._answer_stream.to_turn()
            is_kept = bool(turns) and turns[-1] == done and len(turns) == self._end_turn + 1
            await self._finish_live_view(done if is_kept else None)
            self._answer_stream = None
        same = [view.turn for view in self._views] == list(turns[self._first_turn : self._end_turn])
        if len(turns) < self._end_turn or not same:
            await self._rebuild(max(0, len(turns) - _TURNS_SHOWN))
        elif len(turns) > self._end_turn and self._is_at_end:
            new = [TurnView(turn) for turn in turns[self._end_turn :]]
            self._views += new
            await self._clear_notes()
            await self.mount_all(new, before=self._live_view)
            self.anchor()

    @property
    def _end_turn(self) -> int:
        """Index after the last mounted turn."""
        return self._first_turn + len(self._views)

    async def _finish_live_view(self, turn: Turn | None) -> None:
        """Turn the live view into a regular one; None removes it, since it is drawn again."""
        live, self._live_view = self._live_view, None
        if live is None:
            return
        if turn is None:
            await live.remove()
            return
        assert self._answer_stream is not None
        thought, text, self._position = self._answer_stream.chunks_since(self._position)
        await live.append(thought, text)
        await live.finish(turn)
        self._views.append(live)

    async def _show_end(self) -> None:
        if self._active is not None and not self._is_at_end:
            await self._rebuild(max(0, len(_turns_of(self._active)) - _TURNS_SHOWN))

    async def _rebuild(self, first: int, last: int | None = None) -> None:
        """Mount the turns from first up to last, or up to the end if last is None."""
        assert self._active is not None
        turns = _turns_of(self._active)
        self._live_view, self._answer_stream, self._first_turn = None, None, first
        self._is_at_end = last is None or last >= len(turns)
        self._views = [TurnView(turn) for turn in turns[first:last]]
        later = len(turns) - self._end_turn
        above = f"{first:,} earlier turns: Ctrl+Home shows them" if first else ""
        below = f"{later:,} later turns: Ctrl+End shows them" if later else ""
        with self.app.batch_update():
            await self.remove_children()
            await self.mount_all(
                [*_note(above if turns else _EMPTY_TEXT), *self._views, *_note(below)]
            )
        self.anchor()

    async def _clear_notes(self) -> None:
        if self._first_turn == 0:
            await self.query(".note").remove()


_EMPTY_TEXT = "No messages yet. Type below, Enter sends. /help lists the commands, F1 the keys."


def _note(text: str) -> list[Static]:
    return [Static(text, classes="note", markup=False)] if text else []


def _turns_of(active: ActiveSession) -> tuple[Turn, ...]:
    growing = active.record.unfinished_turn
    turns = active.chat.conversation.turns
    return turns if growing is None or active.answer_stream is not None else (*turns, growing)
