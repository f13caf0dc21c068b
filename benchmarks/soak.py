"""Load a real server with many clients, kill processes at random, and check what is left.

    python -m benchmarks.soak [--requests 10000] [--kills 200] [--clients 16]

The first half of the requests runs while engine, server, helper processes and clients are killed
with SIGKILL; the next client starts what it needs. The second half runs undisturbed, so that memory
can be compared. Each request must end exactly once, with an answer or a clear error; nothing may be
left behind: processes, sockets, temporary files; what a client was told is stored must be there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import RESULTS, command, machine, versions
from benchmarks.soak_parts.processes import Watch
from benchmarks.soak_parts.report import (
    Check,
    Requests,
    check_files,
    check_memory,
    check_stores,
    shared_memory,
)
from localgen.backends.errors import LocalgenError
from localgen.client import LocalClient
from localgen.config import ServerSettings
from localgen.machine.python_process import python_command, python_environment

# requests of a client process until a new one takes its place
_REQUESTS_PER_CLIENT = 40
_SAMPLE_S = 2.0
# a client that has logged nothing for so long hangs
_SILENT_S = 300.0
_SETTLE_S = 30.0
_VICTIMS = ("engine",) * 4 + ("server",) * 3 + ("client",) * 3 + ("helper",) * 2
# codes that a client may see because something was killed
_KILLED_CODES = {"engine_died", "server_unavailable", "load_failed"}
_EXPECTED = {
    "chat": {"answer"},
    "schema": {"answer"},
    "cancel": {"cancelled"},
    "too_long": {"context_length_exceeded"},
    "invalid": {"invalid_request"},
    "embed": {"answer"},
    "alias": {"stored"},
}


@dataclass
class ClientSlot:
    """A client process, and those before it in its place."""

    process: subprocess.Popen[bytes]
    log: Path
    requests: int
    killed: bool = False


@dataclass
class Soak:
    """One run. root: a temporary folder with everything that it writes."""

    root: Path
    clients: int
    requests: int
    kills: int
    source: random.Random
    slots: list[ClientSlot | None] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)
    done: Requests = field(default_factory=Requests)
    calm: Requests = field(default_factory=Requests)
    problems: list[str] = field(default_factory=list)
    serial: int = 0

    def __post_init__(self) -> None:
        self.settings = ServerSettings(runtime_dir=self.root / "run", state_dir=self.root / "state")
        self.settings.create_dirs()
        (self.root / "tmp").mkdir()
        (self.root / "logs").mkdir()
        self.environment = python_environment() | self.settings.to_environment()
        self.environment |= {"TMPDIR": str(self.root / "tmp"), "HF_HOME": str(self.root / "hub")}
        self.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
        self.watch = Watch(self.settings.runtime_dir)
        self.slots = [None] * self.clients

    def run(self) -> float:
        """Both halves. Returns the time at which the second begins."""
        self._phase(self.done, self.requests // 2, self.kills)
        calm_s = time.monotonic()
        self._phase(self.calm, self.requests - self.requests // 2, 0)
        return calm_s

    def _phase(self, into: Requests, requests: int, kills: int) -> None:
        """Send requests until `requests` have ended, with the kills spread over them."""
        killed, next_sample_s, shown_s = 0, 0.0, time.monotonic()
        while True:
            self._replace_ended(into, requests)
            if not any(self.slots):
                return
            ended = into.ended + self._lines()
            if killed < kills and ended >= requests * (killed + 1) / (kills + 1):
                killed += self._kill()
            now_s = time.monotonic()
            if now_s >= next_sample_s:
                next_sample_s = now_s + _SAMPLE_S
                self.watch.sample(now_s)
                self._end_silent_clients()
            if now_s - shown_s > 20:
                shown_s = now_s
                print(f"  {ended} of {requests} requests, {killed} kills", file=sys.stderr)
            time.sleep(0.05)

    def _replace_ended(self, into: Requests, requests: int) -> None:
        """Read the logs of clients that have ended, and start others for the requests left."""
        for place, slot in enumerate(self.slots):
            if slot is not None and slot.process.poll() is None:
                continue
            if slot is not None:
                if slot.process.returncode and not slot.killed:
                    errors = slot.log.with_suffix(".err").read_text(errors="replace")
                    self.problems.append(f"{slot.log.name}: status {slot.process.returncode}")
                    self.problems.append(errors[-1000:])
                if slot.log.exists():
                    into.read(slot.log, slot.killed)
            self.slots[place] = None
            running = sum(slot.requests for slot in self.slots if slot)
            count = min(_REQUESTS_PER_CLIENT, requests - into.ended - running)
            self.slots[place] = self._start(count) if count > 0 else None

    def _start(self, requests: int) -> ClientSlot:
        self.serial += 1
        log = self.root / "logs" / f"client-{self.serial}.jsonl"
        arguments = (f"c{self.serial}", str(log), str(requests))
        with log.with_suffix(".err").open("wb") as errors:
            process = subprocess.Popen(
                python_command("benchmarks.soak_parts.client_process", *arguments),
                env=self.environment,
                stdout=errors,
                stderr=errors,
            )
        return ClientSlot(process, log, requests)

    def _lines(self) -> int:
        """Requests that have ended in running clients."""
        total = 0
        for slot in self.slots:
            with suppress(OSError):
                total += slot.log.read_bytes().count(b'{"end"') if slot else 0
        return total

    def _kill(self) -> int:
        kind = self.source.choice(_VICTIMS)
        if kind == "client":
            slot = self.source.choice([slot for slot in self.slots if slot])
            slot.killed = True
            slot.process.kill()
        elif not self.watch.kill_one(kind, self.source):
            return 0
        self.killed[kind] += 1
        return 1

    def _end_silent_clients(self) -> None:
        for slot in self.slots:
            if slot is None or not slot.log.exists() or slot.killed:
                continue
            if time.time() - slot.log.stat().st_mtime > _SILENT_S:
                self.problems.append(f"{slot.log.name}: silent for {_SILENT_S:.0f} s")
                slot.killed = True
                slot.process.kill()

    def kill_all(self) -> None:
        """End what an interrupted run leaves."""
        for slot in filter(None, self.slots):
            slot.process.kill()
            slot.process.wait()
        for process in self.watch.all():
            with suppress(psutil.Error):
                process.kill()

    def settle(self) -> list[Check]:
        """Shut the server down. Nothing may be left of it, nor of those before it."""
        checks = []
        with LocalClient(self.settings) as client:
            try:
                stats = client.stats()
                busy = {one["name"]: one["active_requests"] for one in stats["models"]}
                is_idle = not stats["server"]["active_requests"] and not any(busy.values())
                checks.append(Check("the server is idle at the end", is_idle, str(busy)))
            except LocalgenError as error:
                checks.append(Check("the server answers at the end", False, error.message))
            with suppress(LocalgenError):
                client.shutdown()
        deadline_s = time.monotonic() + _SETTLE_S
        while self.watch.all() and time.monotonic() < deadline_s:
            time.sleep(0.2)
        left = [f"{one.pid} {' '.join(one.cmdline()[-3:])}" for one in self.watch.all()]
        checks.append(Check("no process is left", not left, ", ".join(left) or "none"))
        return checks


def checks_of_requests(soak: Soak) -> list[Check]:
    """Each request ends once, as its kind should; kills explain the other ends."""
    checks = []
    both = (("with kills", soak.done, _KILLED_CODES), ("without", soak.calm, set[str]()))
    for name, requests, allowed in both:
        odd = {
            f"{kind}: {outcome}": count
            for kind, counts in requests.outcomes.items()
            for outcome, count in counts.items()
            if outcome not in _EXPECTED[kind] | allowed
        }
        detail = f"{requests.ended} ended, {requests.killed} with their client; {odd or 'none odd'}"
        met = not odd and not requests.defects
        checks.append(Check(f"requests end as they should, {name}", met, detail))
        wrong = "; ".join(requests.wrong_ends)
        checks.append(Check(f"requests end once, {name}", not wrong, wrong or "all"))
    problems = "; ".join(soak.problems)
    checks.append(Check("clients end by themselves", not problems, problems[:2000] or "all"))
    return checks


def latency(requests: Requests) -> dict[str, float]:
    """Seconds from the request to its end."""
    if len(requests.seconds) < 2:
        return {}
    cuts = statistics.quantiles(requests.seconds, n=100)
    found = {"p50": cuts[49], "p99": cuts[98], "longest": max(requests.seconds)}
    return {name: round(value, 3) for name, value in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    began_s = time.monotonic()
    shared_before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="lgsoak") as folder:
        source = random.Random(options.seed)
        soak = Soak(Path(folder), options.clients, options.requests, options.kills, source)
        try:
            calm_s = soak.run()
            checks = checks_of_requests(soak) + soak.settle()
        finally:
            soak.kill_all()
        os.environ["LOCALGEN_STATE_DIR"] = str(soak.settings.state_dir)
        both = Requests(aliases=soak.done.aliases | soak.calm.aliases)
        both.turns = soak.done.turns | soak.calm.turns
        checks += check_stores(soak.settings.state_dir, both)
        checks += check_memory(soak.watch.memory, calm_s)
        dirs = (soak.settings.runtime_dir, soak.settings.state_dir)
        checks += check_files(dirs, soak.root / "tmp")
    added = shared_memory() - shared_before
    checks.append(Check("no shared memory is left", not added, ", ".join(added) or "none"))
    result = _result(options, arguments, soak, checks, time.monotonic() - began_s)
    path = options.output or RESULTS / f"soak-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for check in checks:
        print(f"{'yes' if check.met else 'NO '}  {check.name}: {check.detail}")
    print(f"written to {path}", file=sys.stderr)
    return 0 if all(check.met for check in checks) else 1


def _result(
    options: argparse.Namespace,
    arguments: Sequence[str] | None,
    soak: Soak,
    checks: list[Check],
    seconds: float,
) -> dict[str, Any]:
    halves = {"with_kills": soak.done, "without": soak.calm}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command("benchmarks.soak", arguments),
        "machine": machine(),
        "versions": versions(),
        "clients": options.clients,
        "seed": options.seed,
        "seconds": round(seconds),
        "kills": dict(soak.killed),
        "checks": [asdict(check) for check in checks],
        "seconds_per_request": {name: latency(half) for name, half in halves.items()},
        "outcomes": {
            name: {kind: dict(counts) for kind, counts in half.outcomes.items()}
            for name, half in halves.items()
        },
        "defects": soak.done.defects[:20] + soak.calm.defects[:20],
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=10_000, help="default: 10000")
    parser.add_argument("--kills", type=int, default=200, help="default: 200")
    parser.add_argument("--clients", type=int, default=16, help="default: 16")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--output", type=Path, help="default: a new file in benchmarks/results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
