"""The main screen of `localgen top`: gauges above, requests below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, Static

from localgen.tui.gauges.bandwidth import BandwidthGauge
from localgen.tui.gauges.gauge import TIME_SPANS, Gauge
from localgen.tui.gauges.latency import LatencyGauge
from localgen.tui.gauges.memory import MemoryGauge
from localgen.tui.gauges.samples import ServerSample
from localgen.tui.gauges.speculation import SpeculationGauge
from localgen.tui.gauges.speed import SpeedGauge
from localgen.tui.key_file import with_names
from localgen.tui.preferences import Preferences
from localgen.tui.top.banner import Banner
from localgen.tui.top.column_choice import ColumnChoice
from localgen.tui.top.request_rows import request_rows
from localgen.tui.top.request_table import RequestTable
from localgen.tui.top.service_level import LatencyGoal, service_level
from localgen.tui.widgets.footer import KeyFooter
from localgen.tui.widgets.notice import Notice

_REQUESTS_NOT_LISTED = "this server does not list its requests"
_NO_REQUESTS = "no requests yet"
_REQUESTS = "Requests"


# in the order that fills a grid of three columns; a number key hides and shows each
PANELS = ("speed", "latency", "memory", "bandwidth", "speculation")


class RequestFilter(Input):
    """A line that filters the requests while it is typed into; Esc removes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "screen.clear_filter", "Show all"),
        Binding("down", "screen.leave_filter", "To the requests", show=False),
    ]


class Dashboard(Screen[None]):
    """Lays out banner, gauges and request table, and distributes samples to them."""

    AUTO_FOCUS = ""  # after a dialog it would be the hidden filter, if nothing has the focus
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (23, "-mid"), (36, "-tall"), (52, "-high")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = with_names(
        Binding("c,delete", "app.cancel_request", "Cancel"),
        Binding("s", "sort", "Sort"),
        Binding("S,r", "reverse_sort", "Reverse the order", show=False),
        Binding("e", "toggle_ended", "Ended"),
        Binding("space", "app.pause", "Pause"),
        *(
            Binding(
                str(number),
                f"toggle_panel('{panel}')",
                f"Hide or show {panel}",
                show=False,
                id=f"toggle_{panel}",
            )
            for number, panel in enumerate(PANELS, 1)
        ),
        Binding("t", "app.retry", "Reconnect now", show=False),
        Binding("q", "app.quit", "Quit"),
        Binding("slash", "filter", "Filter"),
        Binding("o", "columns", "Choose columns", show=False),
        Binding("plus,equals_sign", "zoom(-1)", "Shorter plots", show=False, id="zoom_in"),
        Binding("minus", "zoom(1)", "Longer plots", show=False, id="zoom_out"),
        Binding("x", "app.export", "Export the figures to a file", show=False),
    )
    DEFAULT_CSS = """
    Dashboard #gauges { layout: grid; grid-size: 2; grid-rows: 5 5; height: 10; }
    Dashboard #gauges > * { height: 100%; }
    Dashboard #speculation { display: none; }
    Dashboard.-mid #gauges { grid-rows: 6 6; height: 12; }
    Dashboard.-tall #gauges { grid-rows: 9 8; height: 17; }
    Dashboard.-wide #gauges { grid-size: 3; }
    Dashboard.-wide #memory { row-span: 2; }
    Dashboard.-wide #speculation { display: block; }
    Dashboard.-high #gauges { grid-rows: 14 10; height: 24; }
    Dashboard.-wide.-tall #gauges { grid-rows: 11 6; height: 17; }
    Dashboard.-wide.-high #gauges { grid-rows: 16 8; height: 24; }
    Dashboard #list { height: 1fr; border: round $border; border-title-color: $primary;
                      border-title-style: bold; border-subtitle-color: $muted; }
    Dashboard #list:focus-within { border: round $primary; }
    Dashboard RequestTable { height: 1fr; background: $background; scrollbar-size: 1 1; }
    Dashboard RequestFilter { display: none; height: 1; }
    Dashboard RequestFilter.-shown { display: block; }
    Dashboard .-hidden { display: none; }
    Dashboard.-wide #speculation.-hidden { display: none; }
    Dashboard #empty { color: $muted; padding: 0 1; height: 1fr; }
    Dashboard.-stale #gauges, Dashboard.-stale #list { opacity: 60%; }
    """

    def __init__(
        self, server_label: str, preferences: Preferences, goals: Sequence[LatencyGoal] = ()
    ) -> None:
        super().__init__()
        self._server_label, self._preferences, self._goals = server_label, preferences, goals
        self._includes_ended = True
        self._filter = self._service_level = ""
        self._list_texts: tuple[str, str] = (_NO_REQUESTS, "")

    def compose(self) -> ComposeResult:
        yield Banner(self._server_label)
        yield Notice()
        with Container(id="gauges"):
            yield SpeedGauge()
            yield LatencyGauge()
            yield MemoryGauge()
            yield BandwidthGauge()
            yield SpeculationGauge()
        with Vertical(id="list") as box:
            box.border_title = _REQUESTS
            yield RequestFilter(
                placeholder="model, state, client or id", compact=True, select_on_focus=False
            )
            yield RequestTable(self._preferences.hidden_columns())
            yield Static(_NO_REQUESTS, id="empty", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        """Watch the app's `sample`."""
        self.watch(self.app, "sample", self.show_sample)
        self.query_one(RequestTable).focus()

    def show_sample(self, sample: ServerSample) -> None:
        """Pass each part of a sample to its widget."""
        self.query_one(SpeedGauge).sample = sample.throughput
        self.query_one(LatencyGauge).sample = sample.latency
        self.query_one(MemoryGauge).sample = sample.memory
        self.query_one(BandwidthGauge).sample = sample.bandwidth
        self.query_one(SpeculationGauge).sample = sample.speculation
        if sample.snapshot.server_type:
            self.query_one(Banner).show(sample.snapshot)
        self._show_requests(sample)
        level = service_level(sample.snapshot, self._goals)
        if level != self._service_level:
            self._service_level = level
            self.query_one("#list").border_title = Content.assemble(
                _REQUESTS, (f"  {level}" if level else "", "not bold $muted")
            )

    def show_status(self, status: str, notice: str = "") -> None:
        """Show the connection status; figures of a lost server are dimmed."""
        self.query_one(Banner).status = status
        self.query_one(Notice).show_message(notice)
        self.set_class(status == "LOST", "-stale")

    def _show_requests(self, sample: ServerSample) -> None:
        rows = request_rows(sample.snapshot, include_ended=self._includes_ended)
        if rows is not None and self._filter:
            rows = [row for row in rows if row.matches(self._filter)]
        table, empty = self.query_one(RequestTable), self.query_one("#empty", Static)
        table.show_requests(rows or [])
        live = sum(row.is_live for row in rows or ())
        counts = f"{live} live"
        if self._includes_ended:
            counts += f", {len(rows or ()) - live} ended"
        if rows is None:
            none = _REQUESTS_NOT_LISTED
        else:
            none = f"no request matches {self._filter}" if self._filter else _NO_REQUESTS
        texts = (none, counts if rows else "")
        if table.display != bool(rows) or texts != self._list_texts:  # avoid a needless layout
            self._list_texts = texts
            table.display, empty.display = bool(rows), not rows
            empty.update(texts[0])
            self.query_one("#list").border_subtitle = texts[1]

    def on_request_table_request_selected(self, event: RequestTable.RequestSelected) -> None:
        self.action_timeline()

    def action_timeline(self) -> None:
        """Open the timeline of the request under the cursor."""
        row = self.query_one(RequestTable).cursor_request
        if row is not None:
            from localgen.tui.top.timeline import TimelineScreen

            self.app.push_screen(TimelineScreen(row))

    def action_sort(self) -> None:
        self.query_one(RequestTable).sort_by_next_column()

    def action_reverse_sort(self) -> None:
        self.query_one(RequestTable).reverse_sort()

    def action_toggle_ended(self) -> None:
        """Show or hide ended requests."""
        self._includes_ended = not self._includes_ended
        self._show_requests_again()

    def action_toggle_panel(self, panel: str) -> None:
        """Hide or show a gauge; the requests take the room of all of them."""
        self.query_one(f"#{panel}").toggle_class("-hidden")
        gauges = self.query_one("#gauges")
        gauges.set_class(all(each.has_class("-hidden") for each in gauges.children), "-hidden")

    def action_columns(self) -> None:
        """Have the user choose the columns of the requests."""
        table = self.query_one(RequestTable)

        def chosen(hidden: frozenset[str] | None) -> None:
            if hidden is not None:
                table.hide_columns(hidden)
                self._preferences.save_hidden_columns(hidden)

        self.app.push_screen(ColumnChoice(table.hidden_columns), chosen)

    def action_zoom(self, by: int) -> None:
        """Show a longer (1) or shorter (-1) time in the plots."""
        spans = list(TIME_SPANS)
        for gauge in self.query(Gauge):
            at = spans.index(gauge.time_span) + by
            gauge.time_span = spans[max(0, min(at, len(spans) - 1))]
            gauge.watch_sample()

    def action_filter(self) -> None:
        """Open the line that filters the requests."""
        field = self.query_one(RequestFilter)
        field.add_class("-shown")
        field.focus()

    def action_clear_filter(self) -> None:
        """Show all requests again."""
        field = self.query_one(RequestFilter)
        field.value = self._filter = ""
        field.remove_class("-shown")
        self._show_requests_again()
        self.action_leave_filter()

    def action_leave_filter(self) -> None:
        """Go on with the keys of the requests; the filter stays."""
        table = self.query_one(RequestTable)
        self.set_focus(table if table.display else None)

    def on_input_submitted(self) -> None:
        self.action_leave_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter = event.value.strip()
        self._show_requests_again()

    def _show_requests_again(self) -> None:
        self._show_requests(getattr(self.app, "sample"))  # noqa: B009 - TopApp would be a circular import
