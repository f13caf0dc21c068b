"""`kill -9` of a cluster's processes under load: how each request ends, and when new ones work.

Streams run all the time while one process after another is killed: a replica's server, its actor,
the gateway, the controller of Ray Serve, the raylet, the head. The number of streams changes, so
that replicas come and go meanwhile. Every second round waits with each kill until one starts.
Needs localgen[cluster]: run it with the Python of .venv/cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from benchmarks.cluster import REPLICA_ACTOR, Cluster, command_line, running_cluster
from benchmarks.measure import ModelLine, Report, command

# by a part of the command line, which Ray sets
VICTIMS = {
    "server": "localgen.cluster.replica_server",
    "actor": REPLICA_ACTOR,
    "gateway": "ray::ServeReplica:localgen:GatewayServer",
    "controller": "ray::ServeController",
    "raylet": "raylet/raylet",
    "head": "localgen.cluster.head",
}
_MODEL, _STREAM_TOKENS = "tiny", 300
# the load alternates between these, for so long each
_FEW_STREAMS, _MANY_STREAMS, _PHASE_S = 2, 8, 15.0
_MIN_REPLICAS = 2
_SETTINGS = (
    f"min_replicas = {_MIN_REPLICAS}\nmax_replicas = {_MIN_REPLICAS + 1}\n"
    "target_requests = 2\ndownscale_delay_s = 3\n"
)
_HANG_S, _RECOVERY_S = 60.0, 120.0
_PROBE_PERIOD_S = 0.1
# a process that dies may take others with it some seconds later
_WATCH_S = 6.0
# an answer after so long has waited for a process that was killed
_SLOW_S = 1.0
_BETWEEN_KILLS_S = 3.0
# while all works, a replica starts within this time
_SCALING_S = 4 * _PHASE_S


@dataclass(frozen=True, slots=True)
class Ended:
    """A request. outcome: whole, error event, cut, refused, or a fault: hung, twice, unfinished."""

    began_s: float
    ended_s: float
    outcome: str


@dataclass(slots=True)
class Load:
    """Streams that are asked again and again, some of them only half of the time."""

    url: str
    ended: list[Ended] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        """Ask until stopped. number: of the stream."""
        with open_client(self.url) as client:
            for turn in itertools.count():
                if self.stop.is_set():
                    return
                if number >= _FEW_STREAMS and int(time.monotonic() / _PHASE_S) % 2:
                    time.sleep(_PROBE_PERIOD_S)
                    continue
                began_s = time.monotonic()
                outcome = stream_outcome(client, f"Stream {number}, story {turn}", _STREAM_TOKENS)
                self.ended.append(Ended(began_s, time.monotonic(), outcome))
                if outcome != "whole":
                    time.sleep(_PROBE_PERIOD_S)


def open_client(url: str) -> httpx.Client:
    """A client that asks again and again: opening one takes 20 ms of a core, as it reads the
    certificates, which slows what starts meanwhile."""
    return httpx.Client(base_url=url, timeout=_HANG_S)


def stream_outcome(client: httpx.Client, text: str, tokens: int) -> str:
    """Ask for a stream, and say how it ended."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    ends = []
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                return "refused"
            for line in reply.iter_lines():
                if line == "data: [DONE]":
                    ends.append("whole")
                elif line.startswith("data: ") and "error" in json.loads(line[6:]):
                    ends.append("error event")
    except httpx.TimeoutException:
        return "hung"
    except httpx.TransportError as error:
        return "refused" if isinstance(error, httpx.ConnectError) else "cut"
    return {0: "unfinished", 1: ends[0] if ends else ""}.get(len(ends), "twice")


def recovered_s(client: httpx.Client, killed_s: float) -> float:
    """Seconds from the kill until new requests are answered, and go on to be for _WATCH_S.

    A request that waits for long counts as one that was refused. Raises TimeoutError if that takes
    too long.
    """
    recovery_s, works = 0.0, True
    while time.monotonic() < killed_s + _WATCH_S or not works:
        asked_s = time.monotonic()
        if asked_s > killed_s + _RECOVERY_S:
            raise TimeoutError(f"no answer within {_RECOVERY_S:.0f} s")
        worked, works = works, stream_outcome(client, "Hello", 1) == "whole"
        answered_s = time.monotonic()
        if works and (not worked or answered_s > asked_s + _SLOW_S):
            recovery_s = answered_s - killed_s
        time.sleep(_PROBE_PERIOD_S)
    return recovery_s


def kill(cluster: Cluster, victim: str) -> float:
    """Kill the oldest process of a kind, as a second head waits; returns when.

    Waits until there is one.
    """
    while True:
        found = [each for each in cluster.family() if VICTIMS[victim] in command_line(each)]
        with contextlib.suppress(psutil.Error, ValueError):
            min(found, key=psutil.Process.create_time).kill()
            return time.monotonic()
        time.sleep(_PROBE_PERIOD_S)


def wait_for_start(cluster: Cluster) -> bool:
    """Wait until a replica starts, other than in place of one that was killed; False if none does.

    That is: their number grows after it has been the same for a while.
    """
    count, since_s = cluster.num_replicas(), time.monotonic()
    deadline_s = since_s + _SCALING_S
    while time.monotonic() < deadline_s:
        last, count = count, cluster.num_replicas()
        if count > last >= _MIN_REPLICAS and time.monotonic() > since_s + _WATCH_S:
            return True
        if count != last:
            since_s = time.monotonic()
        time.sleep(_PROBE_PERIOD_S)
    return False


@dataclass(slots=True)
class Kills:
    """Measurements by victim and moment.

    error_s: from the kill to the end of a request that was running.
    """

    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    error_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, victim: str, killed_s: float, recovery_s: float, ended: list[Ended]) -> None:
        self.recovery_s[victim].append(recovery_s)
        for each in ended:
            if each.ended_s < killed_s:
                continue
            self.outcomes[victim][each.outcome] += 1
            if each.began_s < killed_s and each.outcome != "whole":
                self.error_s[victim].append(each.ended_s - killed_s)

    def add_to(self, report: Report) -> None:
        """Print the figures and add them to the report."""
        for victim in self.recovery_s:
            outcomes = self.outcomes[victim]
            counts = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
            recovery, errors = self.recovery_s[victim], self.error_s[victim]
            print(
                f"{victim}: {len(recovery)} kills; new requests after median "
                f"{statistics.median(recovery):.1f} s, at most {max(recovery):.1f} s; broken ones "
                f"ended after at most {max(errors, default=0.0):.2f} s; {counts}",
                flush=True,
            )
            report.add("new requests work after", victim, "s", recovery)
            if errors:
                report.add("a broken request ends after", victim, "s", errors)
            for outcome, count in outcomes.items():
                report.add(f"requests that ended after the kill: {outcome}", victim, "", [count])


def run(cluster: Cluster, kills: int, victims: list[str]) -> tuple[Kills, set[psutil.Process]]:
    """Kill processes under load. Returns the measurements, and all processes of the cluster."""
    found, seen = Kills(), set[psutil.Process]()
    load = Load(cluster.url)
    threads = [threading.Thread(target=load.run, args=(n,)) for n in range(_MANY_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        with open_client(cluster.url) as client:
            for number, victim in zip(range(kills), itertools.cycle(victims), strict=False):
                time.sleep(_BETWEEN_KILLS_S + number % 3)
                seen |= set(cluster.family())
                is_start = number // len(victims) % 2 == 1 and wait_for_start(cluster)
                first = len(load.ended)
                killed_s = kill(cluster, victim)
                recovery_s = recovered_s(client, killed_s)
                label = f"{victim}, while a replica starts" if is_start else victim
                found.add(label, killed_s, recovery_s, load.ended[first:])
                print(f"{number + 1}: {label}: {recovery_s:.1f} s", flush=True)
    finally:
        load.stop.set()
        for thread in threads:
            thread.join()
    seen |= set(cluster.family())
    return found, seen


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 1 if a process is left at the end, or a request did not end."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.cluster_kills")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    report = Report(ModelLine(_MODEL, 0, 0), options.kills, False, 0, {})
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(_SETTINGS)
        file.flush()
        with running_cluster(_MIN_REPLICAS, _MODEL, "-f", file.name) as cluster:
            found, seen = run(cluster, options.kills, options.victims)
    _, left = psutil.wait_procs(seen, timeout=10.0)
    found.add_to(report)
    names = [" ".join(each.cmdline())[:80] for each in left]
    print(f"processes left: {len(left)} {names or ''}")
    report.add("processes left", "all", "", [float(len(left))])
    report.commands.append(command("benchmarks.cluster_kills", arguments))
    report.save("cluster-kills", options.output)
    total = Counter[str]()
    for outcomes in found.outcomes.values():
        total.update(outcomes)
    return 1 if left or total["hung"] or total["twice"] or total["unfinished"] else 0


if __name__ == "__main__":
    sys.exit(main())
