"""The gauge of speculative decoding, prefix cache hits and preemptions."""

from __future__ import annotations

from textual.content import Content

from localgen.backends.terminal_text import one_line
from localgen.tui.gauges.gauge import Gauge
from localgen.tui.gauges.samples import SpeculationSample
from localgen.tui.widgets.numbers import UNKNOWN_TEXT, format_integer, format_number, format_percent


class SpeculationGauge(Gauge[SpeculationSample]):
    def __init__(self) -> None:
        super().__init__("Drafts and prefixes", id="speculation")

    def lines(self, sample: SpeculationSample, width: int, height: int) -> list[Content]:
        """If there are no drafts, the reason given by the server replaces the figures."""
        stats = sample.stats
        who = one_line(", ".join(stats.drafters)) if stats else ""
        lines = [_line("drafts", who or ("none" if stats else UNKNOWN_TEXT))]
        if stats and (stats.share or not stats.reason):
            lines.append(
                Content.assemble(
                    ("right ", "$muted"),
                    (format_percent(sample.acceptance_rate), "bold"),
                    (" a step ", "$muted"),
                    (format_number(stats.tokens_per_step or None), "bold"),
                    (" speed ×", "$muted"),
                    (format_number(stats.speedup or None), "bold"),
                )
            )
        elif stats:
            lines.append(Content.styled(f"not now: {one_line(stats.reason)}", "$muted"))
        elif sample.acceptance_rate is not None:
            right = (format_percent(sample.acceptance_rate), "bold")
            lines.append(Content.assemble(("right ", "$muted"), right))
        lines.append(
            Content.assemble(
                ("prefix hits ", "$muted"),
                (format_percent(sample.prefix_hit_rate), "bold"),
                ("  preempted ", "$muted"),
                (format_integer(sample.preemptions), "bold"),
            )
        )
        return lines


def _line(name: str, value: str) -> Content:
    return Content.assemble((f"{name} ", "$muted"), (value, "bold"))
