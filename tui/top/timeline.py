"""The timeline of a request: how long each phase took."""

from __future__ import annotations

import textwrap
from itertools import chain, repeat
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from localgen.backends.terminal_text import one_line
from localgen.tui.gauges.samples import ServerSample
from localgen.tui.top.request_rows import RequestRow, request_rows
from localgen.tui.widgets.dialog import Dialog
from localgen.tui.widgets.numbers import (
    UNKNOWN_TEXT,
    format_duration_ms,
    format_integer,
    format_percent,
    format_rate,
)

_NAME_COLUMNS, _DURATION_COLUMNS, _DETAIL_COLUMNS, _MIN_BAR_COLUMNS = 15, 10, 28, 10
# minimum width for details in the same line as the bars
_WIDE_COLUMNS = 84
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def phase_rows(row: RequestRow) -> list[tuple[str, float, str]]:
    """(name, milliseconds, details) of each phase, in order."""
    phases = row.phases
    total_ms = phases.prefill_ms + phases.first_step_ms
    rate = row.prefilled_tokens / total_ms * 1e3 if total_ms and row.generated_tokens else None
    prefill = f"{format_integer(row.prefilled_tokens)} tokens"
    if rate:
        prefill += f", {format_rate(rate)} tok/s"
    decode = f"{format_integer(row.generated_tokens)} tokens"
    if row.tokens_per_s:
        decode += f", {format_rate(row.tokens_per_s)} tok/s"
    return [
        ("template", phases.template_ms, ""),
        ("queue", phases.queue_ms, ""),
        ("cached prefill", phases.cached_ms, f"{format_integer(row.cached_tokens)} tokens"),
        ("new prefill", phases.prefill_ms, prefill),
        ("first step", phases.first_step_ms, f"TTFT {format_duration_ms(row.ttft_ms)}"),
        ("decode", phases.decode_ms, decode),
    ]


def timeline_lines(row: RequestRow, width: int) -> list[Content]:
    """One line per phase, with bars that start where the previous one ends; then a summary."""
    phases = phase_rows(row)
    whole_ms = sum(ms for _, ms, _ in phases)
    has_detail_column = width >= _WIDE_COLUMNS
    room = max(
        _MIN_BAR_COLUMNS,
        width
        - _NAME_COLUMNS
        - _DURATION_COLUMNS
        - 1
        - (_DETAIL_COLUMNS if has_detail_column else 0),
    )
    lines, before_ms = [], 0.0
    for name, ms, detail in phases:
        bar = _bar(before_ms, ms, whole_ms, room)
        before_ms += ms
        lines.append(
            Content.assemble(
                (f"{name:<{_NAME_COLUMNS}}", "$muted"),
                (f"{format_duration_ms(ms):>{_DURATION_COLUMNS}} ", "bold"),
                (f"{detail:<{_DETAIL_COLUMNS}}" if has_detail_column else "", "$muted"),
                (bar, "$success" if name == "decode" else "$primary"),
            )
        )
        if detail and not has_detail_column:
            lines.append(
                Content.styled(" " * (_NAME_COLUMNS + _DURATION_COLUMNS + 1) + detail, "$muted")
            )
    return [
        *lines,
        Content(""),
        *_summary(row, whole_ms),
        *_wrapped("restored", row.restored, "", width),
        *_wrapped("prefix", row.prefix_break, "$warning", width),
    ]


def _bar(before_ms: float, ms: float, total_ms: float, width: int) -> str:
    """A bar that ends at a resolution of 1/8 character; at least that wide if ms > 0."""
    if total_ms <= 0 or ms <= 0:
        return ""
    start = min(width - 1, int(before_ms / total_ms * width))
    eighths = max(1, round((before_ms + ms) / total_ms * width * 8) - start * 8)
    full, rest = divmod(eighths, 8)
    return " " * start + "█" * full + (_EIGHTHS[rest] if rest else "")


def _summary(row: RequestRow, total_ms: float) -> list[Content]:
    used = row.prompt_tokens + row.generated_tokens
    facts = [
        ("total", format_duration_ms(total_ms)),
        ("state", row.state_text),
        ("prompt", f"{format_integer(row.prompt_tokens)} ({row.cached_tokens:,} cached)"),
        ("answer", format_integer(row.generated_tokens)),
        ("context", f"{format_integer(used)} of {format_integer(row.ctx or None)}"),
        ("drafts right", format_percent(row.acceptance_rate)),
        ("client", row.client or UNKNOWN_TEXT),
        ("id", one_line(row.id)),
    ]
    return [
        Content.assemble((f"{name:<{_NAME_COLUMNS}}", "$muted"), (value, ""))
        for name, value in facts
    ]


def _wrapped(name: str, text: str, style: str, width: int) -> list[Content]:
    """A fact of as many lines as it takes; none if the text is empty."""
    lines = textwrap.wrap(text, max(_MIN_BAR_COLUMNS, width - _NAME_COLUMNS))
    return [
        Content.assemble((f"{shown:<{_NAME_COLUMNS}}", "$muted"), (line, style))
        for shown, line in zip(chain([name], repeat("")), lines, strict=False)
    ]


class TimelineScreen(Dialog[None]):
    """The timeline of a request, updated while it runs."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,q", "dismiss", "Close"),
        Binding("c,delete", "app.cancel_request", "Cancel"),
    ]
    DEFAULT_CSS = """
    TimelineScreen Vertical {
        width: 90%; max-width: 110; height: auto; max-height: 95%; padding: 0 1;
        border: round $primary; background: $surface; border-title-color: $primary;
        border-subtitle-color: $muted; overflow-y: auto;
    }
    TimelineScreen Static { text-wrap: nowrap; text-overflow: ellipsis; }
    """

    def __init__(self, row: RequestRow) -> None:
        super().__init__()
        self.row = row

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = Content(f"Request to {self.row.model}")
            box.border_subtitle = "Esc closes"
            yield Static()

    def on_mount(self) -> None:
        """Watch the app's `sample`."""
        self.watch(self.app, "sample", self._follow_sample)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def _follow_sample(self, sample: ServerSample) -> None:
        rows = request_rows(sample.snapshot, include_ended=True) or []
        found = next((row for row in rows if row.id == self.row.id), None)
        if found is not None and found != self.row:
            self.row = found
            self._draw()

    def _draw(self) -> None:
        static = self.query_one(Static)
        static.update(Content("\n").join(timeline_lines(self.row, static.content_size.width)))
