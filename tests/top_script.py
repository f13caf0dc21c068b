"""Scripted servers for tests of `localgen top` and the gauges: snapshots, samples, a monitor."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from textual.pilot import Pilot

from localgen.backends.engine_stats import (
    KVTierStats,
    RequestPhases,
    SequenceStats,
    SpeculationStats,
)
from localgen.backends.errors import LocalgenError
from localgen.backends.machine_stats import EndedRequest, GpuStats, MachineStats, ReadCost
from localgen.client.snapshot import LatencyStats, ModelCounters, ModelSnapshot, ServerSnapshot
from localgen.tui.gauges.sample_builder import SampleBuilder
from localgen.tui.gauges.samples import ServerSample
from localgen.tui.top.app import TopApp
from localgen.tui.top.dashboard import Dashboard
from localgen.tui.top.request_table import RequestTable

Script = Callable[[Pilot[None], TopApp], Coroutine[Any, Any, None]]

GPU = GpuStats(
    index=0,
    name="NVIDIA H200",
    total_bytes=150_000_000_000,
    used_bytes=93_000_000_000,
    busy=0.97,
    power_w=512.0,
    power_limit_w=700.0,
    temperature_c=61.0,
    clock_mhz=1980.0,
    memory_clock_mhz=3201.0,
)
MACHINE = MachineStats(
    cpu=0.87, cores=8, ram_bytes=64_000_000_000, ram_free_bytes=41_000_000_000, gpus=(GPU,)
)
PHASES = RequestPhases(
    template_ms=1.2, queue_ms=30.0, cached_ms=0.4, prefill_ms=320.0, first_step_ms=40.0,
    decode_ms=2000.0,
)  # fmt: skip

RAM_TIER = KVTierStats(
    tier="ram",
    blocks=4,
    num_bytes=512_000_000,
    limit_bytes=1_000_000_000,
    hit_tokens_total=4096,
    saved_s_total=5.0,
)
DISK_TIER = KVTierStats(
    tier="disk",
    blocks=90,
    num_bytes=1_200_000_000,
    limit_bytes=4_000_000_000,
    hit_tokens_total=12_288,
    saved_s_total=120.0,
)


def request(
    number: int, state: str = "decode", generated: int = 90, **fields: Any
) -> SequenceStats:
    """A running request."""
    is_begun = generated > 0
    known: dict[str, Any] = {
        "request_id": f"{number:024x}",
        "client": f"session-{number}",
        "state": state,
        "prompt_tokens": 1234,
        "cached_tokens": 200,
        "computed_tokens": 1234 + generated if is_begun else 800,
        "generated_tokens": generated,
        "ctx": 8192,
        "age_s": 2.4 * number,
        "draft_tokens": 30 if is_begun else 0,
        "accepted_tokens": 20 if is_begun else 0,
        "ttft_ms": 391.6 if is_begun else None,
        "phases": PHASES if is_begun else RequestPhases(template_ms=1.2, queue_ms=400.0),
    }
    return SequenceStats(**(known | fields))


def ended(number: int, outcome: str = "stop", **fields: Any) -> EndedRequest:
    """An ended request."""
    known: dict[str, Any] = {
        "request_id": f"e{number:023x}",
        "model": "llama-8b",
        "client": f"session-{number}",
        "outcome": outcome,
        "ended_ago_s": 20.0 * number,
        "prompt_tokens": 50 * number,
        "cached_tokens": 12,
        "generated_tokens": 30 * number,
        "ctx": 8192,
        "ttft_ms": 55.0,
        "tokens_per_s": 41.2,
        "phases": PHASES,
    }
    return EndedRequest(**(known | fields))


LIVE = (
    request(1),
    request(2, generated=17),
    request(3, "prefill", 0),
    request(4, "queued", 0, cached_tokens=0, computed_tokens=0),
)
ENDED = tuple(
    ended(number, outcome)
    for number, outcome in enumerate(("stop", "length", "cancelled", "queue_full"), 1)
)


def model(name: str = "llama-8b", **fields: Any) -> ModelSnapshot:
    """A loaded model with four requests."""
    known: dict[str, Any] = {
        "name": name,
        "id": f"id-{name}",
        "processor": "100% GPU",
        "ctx": 8192,
        "weights_bytes": 4_700_000_000,
        "kv_bytes": 8_000_000_000,
        "work_bytes": 300_000_000,
        "rss_bytes": 900_000_000,
        "gpu_bytes": 13_100_000_000,
        "until_s": 299.0,
        "running": 3,
        "waiting": 1,
        "kv_tokens": 65_536,
        "kv_used": 24_000,
        "kv_cached": 16_000,
        "kv_free": 25_536,
        "kv_usage": 0.366,
        "ttft": LatencyStats(last_ms=391.6, p50_ms=300.0, p99_ms=1230.0),
        "itl": LatencyStats(last_ms=22.1, p50_ms=21.0, p99_ms=40.0),
        "counters": ModelCounters(generated_tokens=0, prompt_tokens=0, steps=0, preemptions=0),
        "read_cost": ReadCost(
            weights_bytes=4_500_000_000,
            kv_token_bytes=131_072.0,
            medium="GPU 0",
            bytes_per_s=4_800_000_000_000.0,
            how="measured before",
        ),
        "speculation": SpeculationStats(
            drafters=("n-gram",), share=0.5, tokens_per_step=1.8, speedup=1.4
        ),
        "sequences": LIVE,
    }
    return ModelSnapshot(**(known | fields))


def snapshot(*models: ModelSnapshot, **fields: Any) -> ServerSnapshot:
    """A server with these models; by default one."""
    known: dict[str, Any] = {
        "server_type": "localgen",
        "version": "0.1.0",
        "uptime_s": 185.0,
        "rss_bytes": 80_000_000,
        "machine": MACHINE,
        "models": models or (model(),),
        "finished_requests": ENDED,
    }
    return ServerSnapshot(**(known | fields))


def counters(second: float) -> ModelCounters:
    """Counters after this many seconds of a changing speed."""
    generated = 60.0 * second + 200.0 * (1 - math.cos(second / 5))
    steps = 20.0 * second
    return ModelCounters(
        prompt_tokens=400.0 * second,
        generated_tokens=generated,
        steps=steps,
        step_sequences=3 * steps,
        context_tokens=3 * steps * 1300,
        preemptions=0,
        prefix_queries=400.0 * second,
        prefix_hits=260.0 * second,
        draft_tokens=30.0 * second,
        accepted_tokens=20.0 * second,
    )


def reading(seconds: float = 60.0, last: ServerSnapshot | None = None) -> ServerSample:
    """The sample after a minute of a busy server; `last`: its last snapshot."""
    record, found = SampleBuilder(), ServerSample()
    for half in range(int(seconds * 2) + 1):
        latency = LatencyStats(last_ms=300 + 90 * math.sin(half / 7), p50_ms=300.0, p99_ms=1230.0)
        gap = LatencyStats(last_ms=22.1 + half / 1000, p50_ms=21.0, p99_ms=40.0)
        each = model(counters=counters(half / 2), ttft=latency, itl=gap)
        found = record.add_snapshot(half / 2, snapshot(each))
    return found if last is None else record.add_snapshot(seconds + 0.5, last)


class ScriptedServerMonitor:
    """Each call of snapshots() plays a script: snapshots, then an error, the end of the
    server (None), or no more messages.
    """

    def __init__(self, *scripts: Sequence[ServerSnapshot | LocalgenError | None]) -> None:
        self.scripts = list(scripts)
        self.cancelled: list[str] = []
        self.closed = threading.Event()
        self.cancel_says: bool | LocalgenError = True

    def snapshots(self) -> Iterator[ServerSnapshot]:
        for each in self.scripts.pop(0) if self.scripts else ():
            if each is None:
                return
            if isinstance(each, LocalgenError):
                raise each
            yield each
        self.closed.wait(30)

    def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        if isinstance(self.cancel_says, LocalgenError):
            raise self.cancel_says
        return self.cancel_says

    def close(self) -> None:
        self.closed.set()


def top_app(watch: ScriptedServerMonitor | None = None, **settings: Any) -> TopApp:
    """TopApp over a scripted server; without one, no message ever arrives."""
    scripted = watch or ScriptedServerMonitor()
    return TopApp(
        lambda: scripted,
        "this machine",
        "localgen chat or localgen serve starts one.",
        **({"first_retry_s": 0.05} | settings),
    )


def run(
    script: Script,
    watch: ScriptedServerMonitor | None = None,
    size: tuple[int, int] = (120, 40),
    **settings: float,
) -> None:
    """Run a scene in TopApp over a scripted server; by default a busy one."""

    async def play() -> None:
        app = top_app(watch or ScriptedServerMonitor([snapshot()]), **settings)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.sample.snapshot.server_type == "localgen")
            found = table(app)
            await until(pilot, lambda: not found.display or found.content_size.height > 0)
            await pilot.pause()
            await script(pilot, app)

    asyncio.run(play())


async def until(pilot: Pilot[None], true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        await pilot.pause(0.01)
    raise AssertionError("it did not come true in time")


def table(app: TopApp) -> RequestTable:
    dashboard = next(each for each in app.screen_stack if isinstance(each, Dashboard))
    return dashboard.query_one(RequestTable)


def column(app: TopApp, key: str) -> list[str]:
    """The texts of a table column from top to bottom."""
    found = table(app)
    return [found.get_cell(row.key, key).text for row in found.ordered_rows]


def notifications(app: TopApp) -> list[str]:
    return [each.message for each in app._notifications]
