"""Many clients at once on the built-in model: does every request end once, does memory stay?

python -m benchmarks.load [--clients 200] [--seconds 120] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx

from benchmarks.measure import ModelLine, Report
from benchmarks.servers import Localgen, private_settings
from localgen.backends.model_info import LoadOptions

RESULTS = Path(__file__).parent / "results"
MAX_QUEUE = 64
# of the requests that begin to be answered, this share is left by its client
LEAVING = 0.1
MAX_TOKENS = (4, 48)
ADMISSION_P99_MS = 50.0
# memory of the last quarter of the run by that of the second: the first fills the pool
FLAT = 1.05
_SAMPLE_S = 1.0
_COUNTED = re.compile(
    r"^localgen:request_(?:success|failure)_total{.*"
    r'(?:finished_reason|outcome)="([a-z_]+)".*} (.+)$',
    re.MULTILINE,
)
_WORDS = ("sum", "story", "sea", "winter", "seven", "why", "count", "red", "house", "tell")


@dataclass
class Tally:
    """What the clients saw. twice: answers with more or fewer than one end."""

    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    twice: int = 0
    tokens: int = 0
    refused_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)


@dataclass
class Watch:
    """What the server said of itself, once a second."""

    server_bytes: list[int] = field(default_factory=list)
    engine_bytes: list[int] = field(default_factory=list)
    most_waiting: int = 0
    most_running: int = 0


def _body(chance: random.Random) -> dict[str, object]:
    words = " ".join(chance.choices(_WORDS, k=chance.randint(2, 60)))
    return {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": chance.randint(*MAX_TOKENS),
        "seed": chance.getrandbits(31),
        "stream": True,
    }


async def _client(http: httpx.AsyncClient, tally: Tally, until_s: float, seed: int) -> None:
    """Ask again and again; leave a tenth of the answers after a random number of events."""
    chance = random.Random(seed)
    await asyncio.sleep(chance.random() / 2)  # nobody's terminals start in the same millisecond
    while time.monotonic() < until_s:
        leave_after = chance.randint(1, 20) if chance.random() < LEAVING else None
        tally.sent += 1
        outcome, wait_s = await _ask(http, tally, _body(chance), leave_after)
        tally.outcomes[outcome] += 1
        if wait_s:
            await asyncio.sleep(wait_s * (0.5 + chance.random()))


async def _ask(
    http: httpx.AsyncClient, tally: Tally, body: dict[str, object], leave_after: int | None
) -> tuple[str, float]:
    """One request: how it ended for its client, and seconds to wait before the next."""
    started_s = time.perf_counter()
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            await reply.aread()
            code = str(reply.json()["error"]["code"])
            if code == "queue_full":
                tally.refused_ms.append((time.perf_counter() - started_s) * 1e3)
            return code, float(reply.headers.get("retry-after", 0))
        ends = events = 0
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            events += 1
            if events == 2:  # the first says who speaks
                tally.ttft_ms.append((time.perf_counter() - started_s) * 1e3)
            if line == "data: [DONE]":
                break
            event = json.loads(line.removeprefix("data: "))
            ends += "error" in event or event["choices"][0]["finish_reason"] is not None
            if events == leave_after and not ends:
                return "left", 0.0
        tally.twice += ends != 1
        tally.tokens += max(0, events - 2)
        return "finished", 0.0


async def _watch(http: httpx.AsyncClient, watch: Watch, until_s: float) -> None:
    while time.monotonic() < until_s:
        said = (await http.get("/v1/stats")).json()
        (model,) = said["models"]
        watch.server_bytes.append(said["server"]["rss_bytes"])
        watch.engine_bytes.append(model["rss_bytes"])
        if model["stats"]:
            watch.most_waiting = max(watch.most_waiting, model["stats"]["waiting"])
            watch.most_running = max(watch.most_running, model["stats"]["running"])
        await asyncio.sleep(_SAMPLE_S)


async def _run(socket: Path, clients: int, seconds: float) -> tuple[Tally, Watch, Counter[str]]:
    tally, watch = Tally(), Watch()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    transport = httpx.AsyncHTTPTransport(uds=str(socket), limits=limits)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://localgen", timeout=None, trust_env=False
    ) as http:
        until_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(_watch(http, watch, until_s))
            for number in range(clients):
                group.create_task(_client(http, tally, until_s, number))
        await _idle(http)
        return tally, watch, _ends_entered(await http.get("/metrics"))


async def _idle(http: httpx.AsyncClient) -> None:
    """Until the server has seen the last client leave."""
    for _ in range(200):
        said = (await http.get("/v1/stats")).json()
        if not said["models"][0]["active_requests"]:
            return
        await asyncio.sleep(0.05)
    raise SystemExit("requests are left in the engine after their clients have gone")


def _ends_entered(metrics: httpx.Response) -> Counter[str]:
    """Requests by how they ended, as the server counted them."""
    ends: Counter[str] = Counter()
    for name, value in _COUNTED.findall(metrics.text):
        ends[name] += int(float(value))
    return ends


def _quantile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=1000)[round(share * 1000) - 1] if len(values) > 1 else 0.0


def _growth(sizes: list[int]) -> float:
    """Median of the last quarter of the samples by that of the second."""
    quarter = len(sizes) // 4
    return statistics.median(sizes[-quarter:]) / statistics.median(sizes[quarter : 2 * quarter])


def _enter(report: Report, clients: int, tally: Tally, watch: Watch, ends: Counter[str]) -> None:
    test = f"{clients} clients"
    for name, value in {**tally.outcomes, "sent": tally.sent, "tokens": tally.tokens}.items():
        report.add(test, name, "", [value])
    for name, value in ends.items():
        report.add(test, f"server: {name}", "", [value])
    for name, times in (("TTFT", tally.ttft_ms), ("refusal", tally.refused_ms)):
        for share in (0.5, 0.99):
            report.add(test, f"{name} p{100 * share:.0f}", "ms", [_quantile(times, share)])
    report.add(test, "most running", "", [watch.most_running])
    lost = abs(sum(ends.values()) - tally.sent) + tally.twice
    for name, value, most in (
        ("requests without exactly one end", lost, 0),
        ("most waiting", watch.most_waiting, MAX_QUEUE),
        ("refusal p99, ms", _quantile(tally.refused_ms, 0.99), ADMISSION_P99_MS),
        ("memory of the server, last quarter ÷ second", _growth(watch.server_bytes), FLAT),
        ("memory of the engine, last quarter ÷ second", _growth(watch.engine_bytes), FLAT),
    ):
        report.most(report.add(test, name, "", [value]), most)


def main(arguments: list[str] | None = None) -> int:
    """Run it; 1 if a check is not met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--quick", action="store_true", help="20 clients for 8 seconds")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.clients, options.seconds = 20, 8.0
    with private_settings() as settings:
        server = Localgen(settings, None, LoadOptions(max_queue=MAX_QUEUE))
        info = server.info
        found = asyncio.run(_run(settings.socket_path, options.clients, options.seconds))
        server.close()
    report = Report(
        ModelLine(info.description, info.size_bytes, info.params),
        1,
        options.quick,
        threads=info.options.threads or 0,
        load_options={"max_queue": MAX_QUEUE},
    )
    _enter(report, options.clients, *found)
    report.commands.append(
        f"python -m benchmarks.load --clients {options.clients} --seconds {options.seconds:g}"
    )
    print(report.text())
    target = options.output or RESULTS / f"load-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    report.write(target)
    print(f"written to {target}", file=sys.stderr)
    return 0 if all(check.met for check in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
