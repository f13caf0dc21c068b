"""What was said in a session, with the answer that grows at its end."""

from __future__ import annotations

import asyncio
import time

from textual import events
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Static

from localgen.chat.conversation import Turn
from localgen.tui.chat.active_session import OpenSession
from localgen.tui.chat.answer_stream import Answering, Position
from localgen.tui.chat.turn_view import TurnView

# what screens with transcripts bind
READING = (
    Binding("f5", "thought", "Thoughts of the last answer", show=False),
    Binding("pageup", "scroll(-1)", "Scroll back", show=False),
    Binding("pagedown", "scroll(1)", "Scroll on", show=False),
    Binding("ctrl+home", "earlier", "Earlier turns", show=False),
    Binding("ctrl+end", "latest", "The latest turn", show=False),
)
# a long conversation is drawn from here on, the rest when it is asked for
_TURNS_SHOWN = 12
# long answers take longer to draw: so many more characters, so much longer between two repaints
_CHARS_PER_PAUSE = 10_000
_PAUSE_S = 0.066


class Transcript(VerticalScroll):
    """Shows one session. sync() makes it what the session is by now."""

    DEFAULT_CSS = """
    Transcript { height: 1fr; padding: 0 1; scrollbar-size-vertical: 1; }
    Transcript > .note { height: auto; color: $text-muted; padding: 0 1; }
    Transcript:focus { background-tint: $foreground 3%; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._opened: OpenSession | None = None
        self._views: list[TurnView] = []
        self._first = 0
        self._shows_end = True
        self._live: TurnView | None = None
        self._answering: Answering | None = None
        self._begun: Answering | None = None  # which has been on the screen, and may be no more
        self._read = Position()
        self._next_s = 0.0
        self._chars = self._height = 0
        self._lock = asyncio.Lock()

    def on_resize(self, event: events.Resize) -> None:
        """Stay at the end: what gets another height is scrolled by the old one at first."""
        if event.container_size.height != self._height:
            self._height = event.container_size.height
            self.refresh(layout=True)

    async def show(self, opened: OpenSession) -> None:
        """Another session."""
        async with self._lock:
            self._opened, self._begun = opened, None
            await self._rebuild(max(0, len(_turns(opened)) - _TURNS_SHOWN))
        await self.sync()

    async def sync(self) -> None:
        """What is new since the last time."""
        async with self._lock:
            if self._opened is None or not self.is_attached:
                return
            await self._follow_answer(self._opened)
            await self._follow_turns(self._opened)

    async def show_earlier(self) -> bool:
        """Turns before those that are drawn; whether there were any."""
        async with self._lock:
            if self._first == 0:
                return False
            last = None if self._shows_end else self._count
            await self._rebuild(max(0, self._first - _TURNS_SHOWN), last)
            self.release_anchor()
            self.scroll_home(animate=False)
            return True

    async def go_to(self, place: int) -> None:
        """Scroll to a turn of the session."""
        async with self._lock:
            if not self._first <= place < self._count:
                # a long conversation is not drawn as a whole for one turn of it
                await self._rebuild(max(0, place - 1), place + _TURNS_SHOWN)
            at = place - self._first
            if at < len(self._views):
                self.release_anchor()
                self.call_after_refresh(self._views[at].scroll_visible, animate=False, top=True)

    async def show_latest(self) -> None:
        """Go to the end, and stay there."""
        async with self._lock:
            await self._show_end()
            self.anchor()

    def toggle_thought(self) -> None:
        """Open or close what was thought before the last answer."""
        views = [*self._views, *([self._live] if self._live else [])]
        if views:
            views[-1].toggle_thought()

    async def to_beginning(self) -> None:
        """To the first turn that is drawn, or to some before it if there are any."""
        if not await self.show_earlier():
            self.scroll_home(animate=False)

    def page(self, by: int) -> None:
        """Scroll so many pages on."""
        page = self.scrollable_content_region.height
        self.scroll_to(y=self.scroll_y + by * page, animate=False)

    async def _follow_answer(self, opened: OpenSession) -> None:
        answering = opened.answering
        if answering is not self._answering and answering is not None:
            is_new = answering is not self._begun
            if is_new:
                await self._show_end()
            elif not self._shows_end:  # what is read stands before it
                return
            self._begun = answering
            await self._follow_turns(opened)
            await self._end_live(None)
            self._answering, self._read, self._chars, self._next_s = answering, Position(), 0, 0.0
            self._live = TurnView(Turn(answering.prompt, ""))
            await self._clear_notes()
            await self.mount(self._live)
            if is_new:
                self.anchor()
        if self._live is None or self._answering is None:
            return
        if time.monotonic() < self._next_s and not self._answering.ended.is_set():
            return
        thought, text, self._read = self._answering.since(self._read)
        self._chars += len(text) + len(thought)
        self._next_s = time.monotonic() + _PAUSE_S * (self._chars // _CHARS_PER_PAUSE)
        await self._live.add(thought, text)

    async def _follow_turns(self, opened: OpenSession) -> None:
        turns = _turns(opened)
        if opened.answering is None and self._live is not None and self._answering is not None:
            done = self._answering.turn()
            is_kept = bool(turns) and turns[-1] == done and len(turns) == self._count + 1
            await self._end_live(done if is_kept else None)
            self._answering = None
        same = [view.turn for view in self._views] == list(turns[self._first : self._count])
        if len(turns) < self._count or not same:
            await self._rebuild(max(0, len(turns) - _TURNS_SHOWN))
        elif len(turns) > self._count and self._shows_end:
            new = [TurnView(turn) for turn in turns[self._count :]]
            self._views += new
            await self._clear_notes()
            await self.mount_all(new, before=self._live)
            self.anchor()

    @property
    def _count(self) -> int:
        """Turns of the session that are drawn, or left out before them."""
        return self._first + len(self._views)

    async def _end_live(self, turn: Turn | None) -> None:
        """Make a turn of the answer that grew; None: take it away, it is drawn anew."""
        live, self._live = self._live, None
        if live is None:
            return
        if turn is None:
            await live.remove()
            return
        assert self._answering is not None
        thought, text, self._read = self._answering.since(self._read)
        await live.add(thought, text)
        await live.finish(turn)
        self._views.append(live)

    async def _show_end(self) -> None:
        if self._opened is not None and not self._shows_end:
            await self._rebuild(max(0, len(_turns(self._opened)) - _TURNS_SHOWN))

    async def _rebuild(self, first: int, last: int | None = None) -> None:
        """Draw the turns from first on, to before last; None: to the end, and what comes there."""
        assert self._opened is not None
        turns = _turns(self._opened)
        self._live, self._answering, self._first = None, None, first
        self._shows_end = last is None or last >= len(turns)
        self._views = [TurnView(turn) for turn in turns[first:last]]
        later = len(turns) - self._count
        above = f"{first:,} earlier turns: Ctrl+Home shows them" if first else ""
        below = f"{later:,} later turns: Ctrl+End shows them" if later else ""
        with self.app.batch_update():
            await self.remove_children()
            await self.mount_all([*_note(above if turns else _EMPTY), *self._views, *_note(below)])
        self.anchor()

    async def _clear_notes(self) -> None:
        if self._first == 0:
            await self.query(".note").remove()


_EMPTY = (
    "Nothing has been said yet. Type below, Enter sends. /help lists the commands, F1 the keys."
)


def _note(text: str) -> list[Static]:
    return [Static(text, classes="note", markup=False)] if text else []


def _turns(opened: OpenSession) -> tuple[Turn, ...]:
    growing = opened.kept.growing
    said = opened.session.conversation.turns
    return said if growing is None or opened.answering is not None else (*said, growing)
