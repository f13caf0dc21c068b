"""`localgen top`: what a server does, at a glance."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from textual.binding import Binding, BindingType
from textual.reactive import var

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.tui.base_app import Shell
from localgen.tui.feed import FIRST_RETRY_S, Feed, Lost, Seen, Watch
from localgen.tui.gauges.samples import Reading
from localgen.tui.themes import ThemeChoice
from localgen.tui.top.dashboard import Dashboard
from localgen.tui.top.requests import RequestRow
from localgen.tui.top.table import RequestTable
from localgen.tui.top.timeline import TimelineScreen
from localgen.tui.widgets.dialog import Confirm


class TopWatch(Watch, Protocol):
    """A way to look at a server that can also end a request."""

    def cancel(self, request_id: str) -> bool:
        """End it; False: it has ended."""


class TopApp(Shell):
    """watch: makes the way to the server, in a thread. where: what the user calls it; way_out:
    what to do while none answers."""

    TITLE = "localgen top"
    HELP_NOTES = (
        "↑ and ↓ choose a request. A click on a heading sorts by it.\n"
        "█ used  ▓ kept prefixes  ░ free.\n"
        "— is what the server does not tell."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True)
    ]
    # not a reactive: that would repaint the whole screen each time
    reading: var[Reading] = var(Reading(), init=False)

    def __init__(
        self,
        watch: Callable[[], TopWatch],
        where: str,
        way_out: str,
        choice: ThemeChoice | None = None,
        *,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        super().__init__(choice)
        self._make_watch = watch
        self._way_out = way_out
        self._watch: TopWatch | None = None
        self._was_seen = self._is_lost = self._is_paused = False
        self._dashboard = Dashboard(where)
        self._feed = Feed(self._open, self.post_message, first_retry_s=first_retry_s)

    def get_default_screen(self) -> Dashboard:
        """The only one that is no dialog."""
        return self._dashboard

    def on_ready(self) -> None:
        """Paint first, then look: what talks to servers takes its time to import."""
        self._feed.start()

    def on_unmount(self) -> None:
        self._feed.stop()

    def _open(self) -> TopWatch:
        self._watch = self._make_watch()
        return self._watch

    def on_seen(self, message: Seen) -> None:
        """A new reading."""
        back = self._is_lost and self._was_seen
        self._was_seen, self._is_lost = True, False
        if back:
            self.notify("The server is back.", timeout=4)
        if not self._is_paused:
            self.reading = message.reading
        self._dashboard.say("PAUSED" if self._is_paused else "LIVE")

    def on_lost(self, message: Lost) -> None:
        """Nobody answers: said, and tried again."""
        self._is_lost = True
        again = f"Trying again in {message.retry_s:.3g} s, t: now."
        status = "LOST" if self._was_seen else "WAITING"
        self._dashboard.say(status, f"{one_line(message.why)}. {self._way_out} {again}")

    def action_pause(self) -> None:
        """Hold what is shown, or go on."""
        self._is_paused = not self._is_paused
        if not self._is_lost:
            self._dashboard.say("PAUSED" if self._is_paused else "LIVE")

    def action_retry(self) -> None:
        """Try at once."""
        self._feed.retry()

    def action_cancel_request(self) -> None:
        """Cancel the request under the cursor, or the one whose timeline is open, when sure."""
        row = self._meant()
        if row is None or not row.is_live:
            said = "It has ended already." if row else "There is no request under the cursor."
            self.notify(said, severity="warning", timeout=4)
            return

        def answered(sure: bool | None) -> None:
            if sure:
                self.run_worker(lambda: self._cancel(row), thread=True, group="cancel")

        question = f"Cancel this request to {row.model}, {row.generated_tokens:,} tokens in? "
        question += "Its client gets what is written so far."
        self.push_screen(Confirm(question, yes="Cancel it", no="Leave it"), answered)

    def _meant(self) -> RequestRow | None:
        if isinstance(self.screen, TimelineScreen):
            return self.screen.row
        return self._dashboard.query_one(RequestTable).under_cursor

    def _cancel(self, row: RequestRow) -> None:
        """In a thread: the server may take its time."""
        try:
            assert self._watch is not None
            done = self._watch.cancel(row.id)
            said, severity = ("Cancelled.", "information") if done else ("It has ended.", "warning")
        except LocalgenError as error:
            said, severity = one_line(error.message), "error"
        self.call_from_thread(self.notify, said, severity=severity, timeout=4, markup=False)
