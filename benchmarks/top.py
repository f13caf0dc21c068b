"""What `localgen top` takes: CPU, memory, time to the first paint, and from a key to its effect.

python -m benchmarks.top [--seconds 20] [--quick]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import localgen
from benchmarks.measure import ModelLine, Report
from benchmarks.terminal import Screen
from localgen.backends.machine_stats import EndedRequest, MachineStats, ReadCost
from localgen.backends.types import EngineStats, RequestPhases, SequenceStats, SpeculationStats
from localgen.config import ServerSettings

RESULTS = Path(__file__).parent / "results"
SIZES = ((120, 40), (200, 60))
TOKENS_PER_S, SESSIONS, ENDED = 1000, 8, 50
_PERIOD_S = 0.25
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
# what is measured on the way to a steady state does not count
_SETTLE_S = 5.0
_ROUNDS = 5
_PRESSES = 20


def _session(number: int, elapsed_s: float) -> SequenceStats:
    generated = int(elapsed_s * TOKENS_PER_S / SESSIONS) % 4000
    return SequenceStats(
        request_id=f"{number:024x}",
        client=f"session-{number}",
        state="decode",
        prompt_tokens=1200 + number,
        cached_tokens=400,
        computed_tokens=1200 + number + generated,
        generated_tokens=generated,
        ctx=8192,
        age_s=elapsed_s,
        draft_tokens=generated // 2,
        accepted_tokens=generated // 3,
        ttft_ms=120.0 + number,
        phases=RequestPhases(
            queue_ms=3.0, prefill_ms=90.0, first_step_ms=25.0, decode_ms=elapsed_s * 1e3
        ),
    )


def _snapshot(elapsed_s: float, *, busy: bool) -> dict[str, Any]:
    tokens = int(elapsed_s * TOKENS_PER_S) if busy else 0
    steps = tokens // SESSIONS
    sessions = tuple(_session(n, elapsed_s) for n in range(SESSIONS)) if busy else ()
    stats = EngineStats(
        running=len(sessions),
        kv_tokens=65_536,
        kv_used=9_600 * len(sessions) // SESSIONS,
        kv_cached=12_000,
        kv_free=65_536 - 12_000 - 9_600 * len(sessions) // SESSIONS,
        ttft_last_ms=120.0,
        ttft_p50_ms=110.0,
        ttft_p99_ms=300.0,
        itl_last_ms=7.0 + (elapsed_s % 1 if busy else 0),
        itl_p50_ms=8.0,
        itl_p99_ms=15.0,
        steps_total=steps,
        step_sequences=(*[0] * SESSIONS, steps),
        context_tokens_total=steps * SESSIONS * 2000,
        prompt_tokens_total=tokens // 3,
        generation_tokens_total=tokens,
        speculation=SpeculationStats(drafters=("n-gram",), share=0.4, tokens_per_step=1.6),
        sequences=sessions,
    )
    ended = [
        EndedRequest(
            request_id=f"e{n}", model="llama-8b", client="x", outcome="stop", ended_ago_s=60.0 + n,
            prompt_tokens=100, generated_tokens=200, ctx=8192, ttft_ms=99.0, tokens_per_s=120.0,
        )
        for n in range(ENDED)
    ]  # fmt: skip
    read = ReadCost(
        weights_bytes=4_500_000_000, kv_token_bytes=131_072.0, medium="GPU 0",
        bytes_per_s=4.8e12, how="measured before",
    )  # fmt: skip
    model = {
        "name": "llama-8b", "id": "a1", "state": "loaded", "rss_bytes": 900_000_000,
        "size_bytes": 4_700_000_000, "processor": "100% GPU", "ctx": 8192,
        "read": asdict(read), "stats": asdict(stats),
    }  # fmt: skip
    machine = MachineStats(cpu=0.4, cores=8, ram_bytes=64 << 30, ram_free_bytes=40 << 30)
    server = {"status": "ok", "version": localgen.__version__, "uptime_s": elapsed_s}
    return {
        "server": server,
        "machine": asdict(machine),
        "models": [model],
        "ended": [asdict(each) for each in ended],
    }


def serve(path: str, busy: bool) -> None:
    """A server that tells of `TOKENS_PER_S` tokens a second, or of nothing; four times a second."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        client, _ = listener.accept()
        client.recv(1 << 16)
        started_s = time.monotonic()
        try:
            client.sendall(_HEAD)
            while True:
                told = json.dumps(_snapshot(time.monotonic() - started_s, busy=busy))
                event = f"data: {told}\n\n".encode()
                client.sendall(b"%x\r\n%s\r\n" % (len(event), event))
                time.sleep(_PERIOD_S)
        except OSError:
            client.close()


@contextmanager
def _scripted(*, busy: bool) -> Iterator[ServerSettings]:
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        root = Path(folder)
        settings = ServerSettings(runtime_dir=root / "run", state_dir=root / "state")
        settings.create_dirs()
        server = multiprocessing.get_context("fork").Process(
            target=serve, args=(str(settings.socket_path), busy), daemon=True
        )
        server.start()
        while not settings.socket_path.exists():
            time.sleep(0.01)
        try:
            yield settings
        finally:
            server.terminate()
            server.join()


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one round. cpu: share of a core. written_per_s: bytes to the terminal."""

    first_paint_s: float
    cpu: float
    rss_bytes: int
    written_per_s: float
    key_ms: tuple[float, ...]


def _round(
    settings: ServerSettings, size: tuple[int, int], seconds: float, *, keys: int
) -> Figures:
    screen = Screen(settings, size, "top")
    try:
        painted_s = screen.read(screen.started_s + 30, b"Requests")
        assert painted_s is not None, "nothing was painted"
        assert screen.read(time.monotonic() + 30, b"LIVE") is not None, "it found no server"
        screen.read(time.monotonic() + min(_SETTLE_S, seconds))
        before, bytes_before, since_s = screen.usage.cpu_times(), screen.received, time.monotonic()
        screen.read(since_s + seconds)
        after, took_s = screen.usage.cpu_times(), time.monotonic() - since_s
        busy_s = after.user + after.system - before.user - before.system
        return Figures(
            first_paint_s=painted_s - screen.started_s,
            cpu=busy_s / took_s,
            rss_bytes=screen.usage.memory_info().rss,
            written_per_s=(screen.received - bytes_before) / took_s,
            key_ms=tuple(_key_ms(screen, press) for press in range(keys)),
        )
    finally:
        screen.close()


def _key_ms(screen: Screen, press: int) -> float:
    """From a key to what it does on the screen: `e` hides what has ended, and shows it again."""
    screen.read(time.monotonic() + 0.2)
    wanted = b"live \xe2" if press % 2 == 0 else b"ended"
    since_s = time.monotonic()
    screen.press(b"e")
    seen_s = screen.read(since_s + 5, wanted)
    assert seen_s is not None, "the key did nothing"
    return (seen_s - since_s) * 1e3


def _enter(report: Report, size: tuple[int, int], busy: bool, rounds: list[Figures]) -> None:
    test = f"{size[0]}×{size[1]}, " + (f"{TOKENS_PER_S:,} tokens/s" if busy else "idle")
    cpu = report.add(test, "CPU of a core", "%", [100 * each.cpu for each in rounds])
    report.most(cpu, 15.0 if busy else 3.0)
    report.most(report.add(test, "RSS", "MB", [each.rss_bytes / 1e6 for each in rounds]), 120.0)
    paint = report.add(test, "first paint", "s", [each.first_paint_s for each in rounds])
    report.most(paint, 0.5)
    report.add(test, "to the terminal", "kB/s", [each.written_per_s / 1e3 for each in rounds])
    keys = [ms for each in rounds for ms in each.key_ms]
    if keys:
        report.most(report.add(test, "key to its effect", "ms", keys), 50.0)


def main() -> int:
    """The exit status: 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--quick", action="store_true", help="one short round of one size")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    seconds, rounds = (2.0, 1) if asked.quick else (asked.seconds, asked.rounds)
    # no model: the server is made up
    report = Report(ModelLine("scripted", 0, 0), rounds, asked.quick, threads=0, load_options={})
    for size in SIZES[:1] if asked.quick else SIZES:
        for busy in (False, True):
            keys = (2 if asked.quick else _PRESSES) if busy else 0
            with _scripted(busy=busy) as settings:
                found = [_round(settings, size, seconds, keys=keys) for _ in range(rounds)]
            _enter(report, size, busy, found)
    report.commands.append(f"python -m benchmarks.top --seconds {seconds:g} --rounds {rounds}")
    print(report.text())
    target = asked.output or RESULTS / f"top-{datetime.now(UTC):%Y%m%d}.json"
    report.write(target)
    print(f"written to {target}", file=sys.stderr)
    return 0 if all(check.met for check in report.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
