"""All gauges in a column, for the side of another screen; `top` lays them out itself."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.reactive import var

from localgen.tui.gauges.bandwidth import BandwidthGauge
from localgen.tui.gauges.latency import LatencyGauge
from localgen.tui.gauges.memory import MemoryGauge
from localgen.tui.gauges.samples import Reading
from localgen.tui.gauges.speculation import DraftsGauge
from localgen.tui.gauges.speed import SpeedGauge


class Gauges(Vertical):
    """Set `reading`: each gauge takes its part of it. 34 columns at least."""

    DEFAULT_CSS = """
    Gauges { width: 40; height: 1fr; min-width: 34; }
    Gauges > #speed { height: 2fr; min-height: 5; }
    Gauges > #latency { height: 2fr; min-height: 5; }
    Gauges > #bandwidth { height: 1fr; min-height: 4; }
    Gauges > #memory { height: 2fr; min-height: 5; }
    Gauges > #drafts { height: 5; }
    .-mid Gauges > #drafts, .-short Gauges > #drafts, .-short Gauges > #bandwidth { display: none; }
    """
    reading: var[Reading] = var(Reading())

    def compose(self) -> ComposeResult:
        yield SpeedGauge()
        yield LatencyGauge()
        yield BandwidthGauge()
        yield MemoryGauge()
        yield DraftsGauge()

    def watch_reading(self, reading: Reading) -> None:
        """Hand each gauge its part."""
        if not self.children:
            return
        self.query_one(SpeedGauge).reading = reading.rates
        self.query_one(LatencyGauge).reading = reading.latencies
        self.query_one(BandwidthGauge).reading = reading.bandwidth
        self.query_one(MemoryGauge).reading = reading.memory
        self.query_one(DraftsGauge).reading = reading.drafts

    def on_mount(self) -> None:
        """A reading may have been set before."""
        self.watch_reading(self.reading)
