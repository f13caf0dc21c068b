"""Whether the gauges are true: decode speed and TTFT in the TUI beside those at a client.

One answer of the real small model on localgen, one on llama-server. The gauge's speed is the median
of what it showed from two seconds after the first token, its averaging period, to the last token.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import httpcore
import httpx

from benchmarks import llamacpp_tools
from benchmarks.llamacpp_tools import ToolFailed, Tools
from benchmarks.measure import RATE, ModelLine, Report, command
from benchmarks.servers import Localgen, llama_server
from benchmarks.streams import BenchClient, HttpBenchClient, LocalgenBenchClient, StreamFailed
from localgen.backends.errors import LocalgenError
from localgen.backends.memory.system import num_physical_cores
from localgen.backends.model_info import LoadOptions
from localgen.bench.private_server import private_settings
from localgen.client.endpoints import resolve_endpoint
from localgen.client.server_monitor import LocalServerMonitor, RemoteServerMonitor
from localgen.hub.packaged import packaged_model
from localgen.tui.feed import ServerMonitor
from localgen.tui.gauges.sample_builder import RATE_WINDOW_S, SampleBuilder
from localgen.tui.gauges.samples import ServerSample

PROMPT = "Tell me a very long story about a fox, a bear and the sea."


class GaugeWatch:
    """Builds the gauges' samples in a thread, as the TUI does."""

    def __init__(self, monitor: ServerMonitor) -> None:
        self.samples: list[tuple[float, ServerSample]] = []
        self._monitor = monitor
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        builder = SampleBuilder()
        # it ends with an error once the monitor is closed
        with contextlib.suppress(LocalgenError, OSError, httpx.HTTPError, httpcore.NetworkError):
            for snapshot in self._monitor.snapshots():
                now_s = time.perf_counter()
                self.samples.append((now_s, builder.add_snapshot(now_s, snapshot)))


def compare(
    report: Report, side: str, client: BenchClient, monitor: ServerMonitor, tokens: int
) -> None:
    """Ask once, and enter both figures and their difference."""
    client.ask("Hello.", 2)
    watch = GaugeWatch(monitor)
    time.sleep(1.5)
    stream = client.ask(PROMPT, tokens)
    time.sleep(2.5)  # until the statistics of an idle engine have come
    began_s, ended_s = stream.first_s + RATE_WINDOW_S, stream.last_s
    shown = [
        sample.throughput.decode_per_s
        for at_s, sample in watch.samples
        if began_s < at_s <= ended_s and sample.throughput.decode_per_s is not None
    ]
    if not shown:
        raise StreamFailed(f"{side}: the answer was too short for the gauge")
    rate = (tokens - 1) / (stream.last_s - stream.first_s)
    report.add(f"{side}: decode", "client", RATE, [rate])
    gauge = report.add(f"{side}: decode", "gauge", RATE, [statistics.median(shown)])
    print(f"{side}: decode {rate:.2f} at the client, {gauge.median:.2f} at the gauge", flush=True)
    ttft_ms = watch.samples[-1][1].latency.ttft.last_ms
    if ttft_ms is not None:
        at_client = (stream.first_s - stream.sent_s) * 1e3
        report.add(f"{side}: TTFT", "client", "ms", [at_client])
        report.add(f"{side}: TTFT", "gauge", "ms", [ttft_ms])
        print(f"{side}: TTFT {at_client:.1f} ms at the client, {ttft_ms:.1f} at the gauge")


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0 whatever the differences are."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.gauges")
    parser.add_argument("--tools", type=Path, help="folder with llama-server")
    parser.add_argument("--no-peer", action="store_true", help="measure localgen alone")
    parser.add_argument("--tokens", type=int, default=400, help="of the answer")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    model = packaged_model("smollm2").path
    try:
        tools = None if options.no_peer else Tools(options.tools or llamacpp_tools.build())
        with private_settings() as settings:
            server = Localgen(settings, model, LoadOptions(draft="none"))
            info = server.info
            report = Report(
                ModelLine(info.description, info.size_bytes, info.params), 1, False,
                info.options.threads or 0, {},
            )  # fmt: skip
            run: Callable[..., None] = partial(compare, report, tokens=options.tokens)
            with closing(LocalServerMonitor(settings)) as monitor:
                run("localgen", LocalgenBenchClient(server.client(), server.model), monitor)
            server.unload()
            server.close()
        if tools is not None:
            threads = num_physical_cores()
            with llama_server(
                tools, model, slots=1, slot_ctx=4096, threads=threads, more=("--metrics",)
            ) as http:
                endpoint = resolve_endpoint(f"{http.base_url}/v1".replace("//v1", "/v1"))
                with closing(RemoteServerMonitor(endpoint)) as remote:
                    run("llama-server", HttpBenchClient(http), remote)
    except (ToolFailed, StreamFailed, LocalgenError, httpx.HTTPError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report.commands += [
        command("benchmarks.gauges", arguments),
        *(tools.commands if tools is not None else ()),
    ]
    print(report.text())
    report.save("gauges", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
