"""What saves work: drafts that were right, prompts that were known; and what undoes it."""

from __future__ import annotations

from textual.content import Content

from localgen.backends.terminal_text import one_line
from localgen.tui.gauges.gauge import Gauge
from localgen.tui.gauges.samples import Drafts as DraftsReading
from localgen.tui.widgets import numbers


class DraftsGauge(Gauge[DraftsReading]):
    """Speculation, prefix cache and preemptions."""

    def __init__(self) -> None:
        super().__init__("Drafts and prefixes", id="drafts")

    def lines(self, reading: DraftsReading, width: int, height: int) -> list[Content]:
        """Where nothing is drafted it says why, as far as the server does."""
        stats = reading.stats
        who = one_line(", ".join(stats.drafters)) if stats else ""
        lines = [_line("drafts", who or ("none" if stats else numbers.UNKNOWN))]
        if stats and (stats.share or not stats.reason):
            lines.append(
                Content.assemble(
                    ("right ", "$muted"),
                    (numbers.percent(reading.acceptance), "bold"),
                    (" a step ", "$muted"),
                    (numbers.number(stats.tokens_per_step or None), "bold"),
                    (" speed ×", "$muted"),
                    (numbers.number(stats.speedup or None), "bold"),
                )
            )
        elif stats:
            lines.append(Content.styled(f"not now: {one_line(stats.reason)}", "$muted"))
        elif reading.acceptance is not None:
            right = (numbers.percent(reading.acceptance), "bold")
            lines.append(Content.assemble(("right ", "$muted"), right))
        lines.append(
            Content.assemble(
                ("prefix hits ", "$muted"),
                (numbers.percent(reading.prefix_hits), "bold"),
                ("  preempted ", "$muted"),
                (numbers.count(reading.preemptions), "bold"),
            )
        )
        return lines


def _line(name: str, value: str) -> Content:
    return Content.assemble((f"{name} ", "$muted"), (value, "bold"))
