"""All gauges in one column, for the side of a screen; `top` has a layout of its own."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.reactive import var

from localgen.tui.gauges.bandwidth import BandwidthGauge
from localgen.tui.gauges.latency import LatencyGauge
from localgen.tui.gauges.memory import MemoryGauge
from localgen.tui.gauges.samples import ServerSample
from localgen.tui.gauges.speculation import SpeculationGauge
from localgen.tui.gauges.speed import SpeedGauge


class GaugePanel(Vertical):
    """Distributes its `sample` to the gauges. At least 34 columns wide."""

    DEFAULT_CSS = """
    GaugePanel { width: 40; height: 1fr; min-width: 34; }
    GaugePanel > #speed { height: 2fr; min-height: 5; }
    GaugePanel > #latency { height: 2fr; min-height: 5; }
    GaugePanel > #bandwidth { height: 1fr; min-height: 4; }
    GaugePanel > #memory { height: 2fr; min-height: 5; }
    GaugePanel > #speculation { height: 5; }
    .-mid GaugePanel > #speculation, .-short GaugePanel > #speculation { display: none; }
    .-short GaugePanel > #bandwidth { display: none; }
    """
    sample: var[ServerSample] = var(ServerSample())

    def compose(self) -> ComposeResult:
        yield SpeedGauge()
        yield LatencyGauge()
        yield BandwidthGauge()
        yield MemoryGauge()
        yield SpeculationGauge()

    def watch_sample(self, sample: ServerSample) -> None:
        """Give each gauge its part of the sample."""
        if not self.children:
            return
        self.query_one(SpeedGauge).sample = sample.throughput
        self.query_one(LatencyGauge).sample = sample.latency
        self.query_one(BandwidthGauge).sample = sample.bandwidth
        self.query_one(MemoryGauge).sample = sample.memory
        self.query_one(SpeculationGauge).sample = sample.speculation

    def on_mount(self) -> None:
        """Show a sample that was set before the gauges existed."""
        self.watch_sample(self.sample)
