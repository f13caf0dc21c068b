"""The screen of `localgen top`: gauges above, requests below."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.screen import Screen
from textual.widgets import Static

from localgen.tui.gauges.bandwidth import BandwidthGauge
from localgen.tui.gauges.latency import LatencyGauge
from localgen.tui.gauges.memory import MemoryGauge
from localgen.tui.gauges.samples import Reading
from localgen.tui.gauges.speculation import DraftsGauge
from localgen.tui.gauges.speed import SpeedGauge
from localgen.tui.top.banner import Banner
from localgen.tui.top.requests import rows_of
from localgen.tui.top.table import RequestTable
from localgen.tui.widgets.footer import Keys
from localgen.tui.widgets.notice import Notice

_NO_LIST = "this server does not list its requests"
_NO_REQUESTS = "no requests yet"


class Dashboard(Screen[None]):
    """Composes; what it shows is handed on to who draws it."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (23, "-mid"), (36, "-tall"), (52, "-high")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c,delete", "app.cancel_request", "Cancel"),
        Binding("s", "sort", "Sort"),
        Binding("S,r", "reverse", "Sort the other way round", show=False),
        Binding("e", "ended", "Ended"),
        Binding("space", "app.pause", "Pause"),
        Binding("t", "app.retry", "Try the server again now", show=False),
        Binding("q", "app.quit", "Quit"),
    ]
    DEFAULT_CSS = """
    Dashboard #gauges { layout: grid; grid-size: 2; grid-rows: 5 5; height: 10; }
    Dashboard #gauges > * { height: 100%; }
    Dashboard #drafts { display: none; }
    Dashboard.-mid #gauges { grid-rows: 6 6; height: 12; }
    Dashboard.-tall #gauges { grid-rows: 9 8; height: 17; }
    Dashboard.-wide #gauges { grid-size: 3; }
    Dashboard.-wide #memory { row-span: 2; }
    Dashboard.-wide #drafts { display: block; }
    Dashboard.-high #gauges { grid-rows: 14 10; height: 24; }
    Dashboard.-wide.-tall #gauges { grid-rows: 11 6; height: 17; }
    Dashboard.-wide.-high #gauges { grid-rows: 16 8; height: 24; }
    Dashboard #list { height: 1fr; border: round $border; border-title-color: $primary;
                      border-title-style: bold; border-subtitle-color: $muted; }
    Dashboard #list:focus-within { border: round $primary; }
    Dashboard RequestTable { height: 1fr; background: $background; scrollbar-size: 1 1; }
    Dashboard #empty { color: $muted; padding: 0 1; height: 1fr; }
    Dashboard.-stale #gauges, Dashboard.-stale #list { opacity: 60%; }
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where
        self._with_ended = True
        self._told: tuple[str, str] = (_NO_REQUESTS, "")

    def compose(self) -> ComposeResult:
        yield Banner(self._where)
        yield Notice()
        with Container(id="gauges"):
            # in the order in which a grid of three columns is filled
            yield SpeedGauge()
            yield LatencyGauge()
            yield MemoryGauge()
            yield BandwidthGauge()
            yield DraftsGauge()
        with Vertical(id="list") as box:
            box.border_title = "Requests"
            yield RequestTable()
            yield Static(_NO_REQUESTS, id="empty", markup=False)
        yield Keys()

    def on_mount(self) -> None:
        """Follow what the application reads."""
        self.watch(self.app, "reading", self.read)
        self.query_one(RequestTable).focus()

    def read(self, reading: Reading) -> None:
        """Hand everybody his part."""
        self.query_one(SpeedGauge).reading = reading.rates
        self.query_one(LatencyGauge).reading = reading.latencies
        self.query_one(MemoryGauge).reading = reading.memory
        self.query_one(BandwidthGauge).reading = reading.bandwidth
        self.query_one(DraftsGauge).reading = reading.drafts
        if reading.snapshot.kind:
            self.query_one(Banner).show(reading.snapshot)
        self._list(reading)

    def say(self, status: str, notice: str = "") -> None:
        """How it stands with the server. Figures of one that is gone are dimmed."""
        self.query_one(Banner).status = status
        self.query_one(Notice).say(notice)
        self.set_class(status == "LOST", "-stale")

    def _list(self, reading: Reading) -> None:
        rows = rows_of(reading.snapshot, with_ended=self._with_ended)
        table, empty = self.query_one(RequestTable), self.query_one("#empty", Static)
        table.show(rows or [])
        live = sum(row.is_live for row in rows or ())
        counts = f"{live} live"
        if self._with_ended:
            counts += f", {len(rows or ()) - live} ended"
        told = (_NO_LIST if rows is None else _NO_REQUESTS, counts if rows else "")
        if table.display != bool(rows) or told != self._told:  # or all is laid out for nothing
            self._told = told
            table.display, empty.display = bool(rows), not rows
            empty.update(told[0])
            self.query_one("#list").border_subtitle = told[1]

    def on_request_table_chosen(self, event: RequestTable.Chosen) -> None:
        self.action_timeline()

    def action_timeline(self) -> None:
        """Show where the time of the request under the cursor goes."""
        row = self.query_one(RequestTable).under_cursor
        if row is not None:
            from localgen.tui.top.timeline import TimelineScreen

            self.app.push_screen(TimelineScreen(row))

    def action_sort(self) -> None:
        """Sort by the next column."""
        self.query_one(RequestTable).sort_by_next()

    def action_reverse(self) -> None:
        """Sort the other way round."""
        self.query_one(RequestTable).reverse()

    def action_ended(self) -> None:
        """Show or hide the requests that have ended."""
        self._with_ended = not self._with_ended
        self._list(getattr(self.app, "reading"))  # noqa: B009 - the application's type is above us
