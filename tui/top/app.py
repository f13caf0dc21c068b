"""`localgen top`: live statistics of a server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, Protocol

from textual.binding import Binding, BindingType
from textual.reactive import var

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.client.snapshot import ServerSnapshot
from localgen.tui.base_app import BaseApp
from localgen.tui.feed import FIRST_RETRY_S, SampleFeed, SampleReceived, ServerLost, ServerMonitor
from localgen.tui.gauges.samples import ServerSample
from localgen.tui.preferences import Preferences
from localgen.tui.top.dashboard import Dashboard
from localgen.tui.top.problems import problems
from localgen.tui.top.request_rows import RequestRow
from localgen.tui.top.request_table import RequestTable
from localgen.tui.top.service_level import LatencyGoal
from localgen.tui.top.timeline import TimelineScreen
from localgen.tui.widgets.dialog import ConfirmDialog


class TopServerMonitor(ServerMonitor, Protocol):
    """A ServerMonitor that can also cancel requests."""

    def cancel(self, request_id: str) -> bool:
        """Cancel a request. Returns False if it has already ended."""


class TopApp(BaseApp):
    """The `localgen top` app.

    make_monitor: connects to the server; called in a thread. server_label: the server's name in the
    title line. start_hint: advice shown while no server responds. goals: of latency, of which the
    share of requests that meet them is shown.
    """

    TITLE = "localgen top"
    HELP_NOTES = (
        "↑ and ↓ choose a request. A click on a heading sorts by it.\n"
        "1 to 5 hide and show the panels above. + and - change how far the plots go back.\n"
        "Course: · waits  ░ cached  ▒ prompt  █ answer.\n"
        "█ used  ▓ cached prefixes  ░ free.\n"
        "— unknown: the server does not report it."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True)
    ]
    KEY_TABLE = "top"
    KEY_OWNERS = (Dashboard.BINDINGS,)
    # var, not reactive: a reactive would repaint the whole screen on each sample
    sample: var[ServerSample] = var(ServerSample(), init=False)

    def __init__(
        self,
        make_monitor: Callable[[], TopServerMonitor],
        server_label: str,
        start_hint: str,
        preferences: Preferences | None = None,
        *,
        first_retry_s: float = FIRST_RETRY_S,
        goals: Sequence[LatencyGoal] = (),
    ) -> None:
        super().__init__(preferences)
        self._make_monitor = make_monitor
        self._start_hint = start_hint
        self._monitor: TopServerMonitor | None = None
        self._has_connected = self._is_lost = self._is_paused = False
        self._dashboard = Dashboard(server_label, self.preferences, goals)
        self._feed = SampleFeed(self._open_monitor, self.post_message, first_retry_s=first_retry_s)

    def get_default_screen(self) -> Dashboard:
        return self._dashboard

    def on_ready(self) -> None:
        """Start the feed after the first paint: the client modules are slow to import."""
        self._feed.start()

    def on_unmount(self) -> None:
        self._feed.stop()

    def _open_monitor(self) -> TopServerMonitor:
        self._monitor = self._make_monitor()
        return self._monitor

    def on_sample_received(self, message: SampleReceived) -> None:
        """Show a new sample."""
        back = self._is_lost and self._has_connected
        self._has_connected, self._is_lost = True, False
        if back:
            self.notify("The server is back.", timeout=4)
        if not self._is_paused:
            self.sample = message.sample
        self._show_live(message.sample.snapshot)

    def _show_live(self, snapshot: ServerSnapshot) -> None:
        status = "PAUSED" if self._is_paused else "LIVE"
        self._dashboard.show_status(status, "; ".join(problems(snapshot)))

    def on_server_lost(self, message: ServerLost) -> None:
        """Show the error and when the feed retries."""
        self._is_lost = True
        again = f"Retrying in {message.retry_s:.3g} s, t: now."
        start_hint = "" if message.is_hung else f"{self._start_hint} "
        status = "LOST" if self._has_connected else "WAITING"
        self._dashboard.show_status(status, f"{one_line(message.reason)}. {start_hint}{again}")

    def action_pause(self) -> None:
        """Pause or resume updates of the screen."""
        self._is_paused = not self._is_paused
        if not self._is_lost:
            self._show_live(self.sample.snapshot)

    def action_export(self) -> None:
        """Write the figures on the screen to a JSON file in the current folder."""
        path = Path(time.strftime("localgen-top-%Y%m%d-%H%M%S.json")).absolute()
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(asdict(self.sample), file, indent=1)
        except OSError as error:
            self.notify(f"cannot write {path}: {error.strerror}", severity="error", markup=False)
        else:
            self.notify(f"written to {path}", timeout=6, markup=False)

    def action_retry(self) -> None:
        self._feed.retry()

    def action_cancel_request(self) -> None:
        """Cancel the request under the cursor or in the open timeline, after confirmation."""
        row = self._target_request()
        if row is None or not row.is_live:
            message = "It has ended already." if row else "There is no request under the cursor."
            self.notify(message, severity="warning", timeout=4)
            return

        def answered(sure: bool | None) -> None:
            if sure:
                self.run_worker(lambda: self._cancel(row), thread=True, group="cancel")

        question = f"Cancel this request to {row.model}, {row.generated_tokens:,} tokens in? "
        question += "Its client gets the text so far."
        self.push_screen(ConfirmDialog(question, yes="Cancel it", no="Leave it"), answered)

    def _target_request(self) -> RequestRow | None:
        if isinstance(self.screen, TimelineScreen):
            return self.screen.row
        return self._dashboard.query_one(RequestTable).cursor_request

    def _cancel(self, row: RequestRow) -> None:
        """Cancel a request and show the outcome; runs in a thread, as the server may be slow."""
        try:
            assert self._monitor is not None
            done = self._monitor.cancel(row.id)
            message, severity = (
                ("Cancelled.", "information") if done else ("It has ended.", "warning")
            )
        except LocalgenError as error:
            message, severity = one_line(error.message), "error"
        self.call_from_thread(self.notify, message, severity=severity, timeout=4, markup=False)
