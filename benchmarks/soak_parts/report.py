"""Judge what a soak left behind: logs of clients, stores, processes, files, memory."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak_parts.processes import Sample

# of the last quarter against the first
MAX_GROWTH = 0.10
MAX_GROWTH_BYTES = 16 << 20


@dataclass
class Check:
    """name: what must hold. detail: figures, or what was found instead."""

    name: str
    met: bool
    detail: str


@dataclass
class Requests:
    """Requests as the clients logged them.

    outcomes: by kind of request. killed: requests in flight in a client that was killed.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)
    wrong_ends: list[str] = field(default_factory=list)
    killed: int = 0
    aliases: dict[str, bool] = field(default_factory=dict)
    turns: dict[int, int] = field(default_factory=dict)

    @property
    def ended(self) -> int:
        return sum(counts.total() for counts in self.outcomes.values())

    def read(self, path: Path, was_killed: bool) -> None:
        """Add the log of one client process, which has ended."""
        begun: dict[int, str] = {}
        ends: Counter[int] = Counter()
        for line in path.read_text().splitlines():
            entry: dict[str, Any] = json.loads(line)
            if "begin" in entry:
                begun[entry["begin"]] = entry["kind"].strip("_")
            elif "end" in entry:
                ends[entry["end"]] += 1
                kind = begun[entry["end"]]
                self.outcomes.setdefault(kind, Counter())[entry["outcome"]] += 1
                self.seconds.append(entry["seconds"])
            elif "defect" in entry:
                self.defects.append(f"{path.name}: {entry['defect']}")
            elif "alias" in entry:
                self.aliases[entry["alias"]] = True
            elif "removing" in entry:
                # it may be there or not, if the client was killed meanwhile
                self.aliases.pop(entry["removing"])
            elif "turns" in entry:
                self.turns[entry["session"]] = entry["turns"]
        open_requests = [number for number in begun if not ends[number]]
        twice = [number for number, count in ends.items() if count > 1]
        allowed = 1 if was_killed else 0
        self.killed += min(allowed, len(open_requests))
        if len(open_requests) > allowed or twice:
            self.wrong_ends.append(f"{path.name}: no end {open_requests}, several {twice}")


def check_stores(state_dir: Path, requests: Requests) -> list[Check]:
    """The sessions and names that clients had stored must be there."""
    from localgen.hub.aliases import load_aliases

    checks = []
    with contextlib.closing(sqlite3.connect(state_dir / "sessions.db")) as database:
        (integrity,) = database.execute("PRAGMA integrity_check").fetchone()
        query = "SELECT session, count(*) FROM turns GROUP BY session"
        stored = dict(database.execute(query))
    short = {one: count for one, count in requests.turns.items() if stored.get(one, 0) < count}
    total = sum(requests.turns.values())
    detail = f"{integrity}, {total - sum(short.values())} of {total} turns: {short}"
    checks.append(Check("sessions are whole", integrity == "ok" and not short, detail))
    known = load_aliases()
    lost = [name for name in requests.aliases if name not in known]
    detail = f"{len(requests.aliases) - len(lost)} of {len(requests.aliases)} names: {lost[:5]}"
    checks.append(Check("names are whole", not lost, detail))
    return checks


def check_files(settings_dirs: tuple[Path, Path], temporary: Path) -> list[Check]:
    """After the shutdown: no socket, no temporary file, no half-written file."""
    runtime_dir, state_dir = settings_dirs
    left = [str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()]
    left += [path.name for path in runtime_dir.iterdir() if not path.name.endswith(".lock")]
    left += [
        path.name
        for path in state_dir.iterdir()
        if path.suffix in (".new", ".partial", ".tmp") or path.name.endswith("-journal")
    ]
    return [Check("no file is left behind", not left, ", ".join(left[:10]) or "none")]


def check_memory(memory: dict[tuple[str, int], list[Sample]], since_s: float) -> list[Check]:
    """Memory of the processes that ran through the part without kills."""
    checks = []
    for kind in ("server", "engine"):
        series = max(
            (
                [one.bytes for one in samples if one.at_s >= since_s]
                for (name, _), samples in memory.items()
                if name == kind
            ),
            key=len,
            default=[],
        )
        if len(series) < 8:
            checks.append(Check(f"memory of the {kind} is flat", False, "too few samples"))
            continue
        quarter = len(series) // 4
        first = statistics.median(series[quarter : 2 * quarter])  # after the warm-up
        last = statistics.median(series[-quarter:])
        growth = last - first
        is_flat = growth <= max(MAX_GROWTH * first, MAX_GROWTH_BYTES)
        detail = (
            f"{first / 1e6:.1f} MB in the second quarter, {last / 1e6:.1f} MB in the last, "
            f"peak {max(series) / 1e6:.1f} MB, {len(series)} samples"
        )
        checks.append(Check(f"memory of the {kind} is flat", is_flat, detail))
    return checks


def shared_memory() -> set[str]:
    """Names in /dev/shm, empty where there is none."""
    try:
        return set(os.listdir("/dev/shm"))
    except OSError:
        return set()
