"""`localgen cluster`: what the gateway adds to a request, and what routing by prefix saves.

Replicas of the built-in model on this machine, without a tier on disk, which they would share. The
same requests go to the gateway and to the
servers of its replicas: to one of them for what the gateway adds, to all in turn (round robin) for
what routing saves. Needs localgen[cluster]: run it with the Python of .venv/cluster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.measure import ModelLine, Report, Series, command
from localgen.backends.types import Message
from localgen.bench.measured_request import MeasuredRequest, Target
from localgen.client import Client
from localgen.client.connection import EndpointConnection
from localgen.client.endpoints import Endpoint
from localgen.server.http.access import AccessPolicy, open_tcp_socket

_MODEL, _PROMPT_WORDS, _ANSWER_TOKENS = "tiny", 1480, 32
_NUM_STREAMS, _STREAM_TOKENS = 4, 400
# part of the command line of a replica's actor, which Ray sets
REPLICA_ACTOR = "ray::ServeReplica:localgen:EngineReplica"
_WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """gateway: a client of the gateway. replicas: clients of the servers behind it.

    url: of the gateway. runtime_dirs: of the servers. folder: of all its files.
    """

    gateway: Target
    replicas: tuple[Target, ...]
    gateway_process: psutil.Process
    url: str
    runtime_dirs: tuple[Path, ...]
    folder: Path

    def family(self) -> list[psutil.Process]:
        """Its owner, and all processes below."""
        state = json.loads((self.folder / "run" / "cluster.json").read_text())
        owner = psutil.Process(state["pid"])
        return [owner, *owner.children(recursive=True)]

    def add_model(self, path: str, name: str) -> Target:
        """Give a GGUF file another name, under which no replica has loaded it. Returns a client of
        the gateway for it."""
        copied = shutil.copy(path, self.folder / f"{name}.gguf")
        program = [sys.executable, "-m", "localgen", "cp", str(copied), name]
        subprocess.run(program, env=_environment(self.folder), check=True, stdout=sys.stderr)
        return _target(int(self.url.rpartition(":")[2]), name)

    def num_replicas(self) -> int:
        """Replicas that occupy this machine: also those that start, or end after their answers."""
        return sum(_has(each, REPLICA_ACTOR) for each in self.family())


@contextmanager
def running_cluster(num_replicas: int, model: str = _MODEL, *options: str) -> Iterator[Cluster]:
    """A cluster with folders of its own. options: of `localgen cluster up`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open_tcp_socket(AccessPolicy(port=0)) as sock:
            port = sock.getsockname()[1]

        def run(*arguments: str) -> None:
            program = [sys.executable, "-m", "localgen", "cluster", *arguments]
            subprocess.run(program, env=_environment(folder), check=True)

        run(
            "up",
            model,
            "--port",
            str(port),
            "--replicas",
            str(num_replicas),
            "--kv-disk",
            "0",
            *options,
        )
        try:
            servers = [each for each in _own_processes(folder) if _has(each, "replica_server")]
            (gateway,) = [each for each in _own_processes(folder) if _has(each, "GatewayServer")]
            ports = [_tcp_port(each) for each in servers]
            yield Cluster(
                _target(port, model),
                tuple(_target(port, model) for port in ports),
                gateway,
                f"http://127.0.0.1:{port}",
                tuple(Path(each.environ()["LOCALGEN_RUNTIME_DIR"]) for each in servers),
                folder,
            )
        finally:
            run("down")


def _environment(folder: Path) -> dict[str, str]:
    """Folders of its own, also for the names of models."""
    return os.environ | {
        "LOCALGEN_RUNTIME_DIR": f"{folder}/run",
        "LOCALGEN_STATE_DIR": f"{folder}/state",
        "LOCALGEN_CONFIG_DIR": f"{folder}/config",
    }


def _own_processes(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LOCALGEN_STATE_DIR") == f"{folder}/state":
                found.append(process)
        except psutil.Error:
            continue
    return found


def _tcp_port(process: psutil.Process) -> int:
    (port,) = {
        each.laddr.port
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }
    return int(port)


def _has(process: psutil.Process, word: str) -> bool:
    return word in command_line(process)


def command_line(process: psutil.Process) -> str:
    """Empty if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _target(port: int, model: str) -> Target:
    endpoint = Endpoint(f"http://127.0.0.1:{port}/v1")
    return Target(Client(EndpointConnection(endpoint, print)), model, None, is_chat=True)


def ask(target: Target, system: str, question: str, tokens: int) -> MeasuredRequest:
    """Raises RuntimeError if there is no answer."""
    request = target.ask([Message("system", system), Message("user", question)], tokens)
    if request.error:
        raise RuntimeError(request.error)
    return request


def ttft_ms(request: MeasuredRequest) -> float:
    return (request.first_s - request.sent_s) * 1e3


def added_ms(cluster: Cluster, rounds: int) -> tuple[list[float], list[float]]:
    """Times to the first token of one short prompt that is cached: by the gateway, and directly."""
    by_gateway, direct = [], []
    for number in range(rounds + 3):
        pair = [ttft_ms(ask(each, "Be brief.", "Hello", 2)) for each in _both(cluster)]
        if number >= 3:  # caches and connections are warm
            by_gateway.append(pair[0])
            direct.append(pair[1])
    return by_gateway, direct


def _both(cluster: Cluster) -> tuple[Target, Target]:
    return cluster.gateway, cluster.replicas[0]


def gateway_cores(cluster: Cluster) -> tuple[float, float]:
    """Tokens/s of several streams, and the cores that the gateway takes meanwhile."""
    before, began_s = _cpu_s(cluster.gateway_process), time.monotonic()
    with ThreadPoolExecutor(_NUM_STREAMS) as pool:
        streams = list(
            pool.map(
                lambda n: ask(cluster.gateway, f"You are number {n}.", "Count.", _STREAM_TOKENS),
                range(_NUM_STREAMS),
            )
        )
    tokens = sum(stream.completion_tokens for stream in streams)
    took_s = time.monotonic() - began_s
    return tokens / took_s, (_cpu_s(cluster.gateway_process) - before) / took_s


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclass(slots=True)
class SharedPrompts:
    """Long prompts that are asked several times, by one side.

    tag: makes the prompts those of this side. targets: asked in turn, beginning with another one
    each round: as there are even numbers of prompts and targets, each prompt would come to one
    target by accident. times_ms: to the first token.
    """

    tag: str
    targets: Sequence[Target]
    times_ms: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0

    def ask(self, number: int, at: int) -> None:
        """Ask one of the prompts. number: of the round. at: of the prompt."""
        system = f"{self.tag} {_WORDS[at]} " * (_PROMPT_WORDS // 2)
        target = self.targets[(number * len(_WORDS) + at + number) % len(self.targets)]
        request = ask(target, system, f"Question {number}", _ANSWER_TOKENS)
        self.times_ms.append(ttft_ms(request))
        self.cached_tokens += request.cached_tokens
        self.prompt_tokens += request.prompt_tokens


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; prints a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.cluster")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="of each prompt")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    line = ModelLine(_MODEL, 0, 0)
    report = Report(line, options.rounds, False, 0, {})

    def add(test: str, side: str, unit: str, values: Sequence[float]) -> None:
        print(f"{test}, {side}: median {statistics.median(values):.3f} {unit}", flush=True)
        report.series.append(Series(test, side, unit, tuple(values), line))

    # with drafts, a piece of a stream would have several tokens
    with running_cluster(options.replicas, _MODEL, "--draft", "none") as cluster:
        by_gateway, direct = added_ms(cluster, 40 * options.rounds)
        add("TTFT of a short cached prompt", "gateway", "ms", by_gateway)
        add("TTFT of a short cached prompt", "replica", "ms", direct)
        for _ in range(2):
            rate, cores = gateway_cores(cluster)
        add(f"{_NUM_STREAMS} streams", "gateway", "tokens/s", [rate])
        add(f"{_NUM_STREAMS} streams: the gateway's CPU", "gateway", "cores", [cores])
        test = f"8 long prompts, {options.rounds} times, {options.replicas} replicas"
        sides = {
            "gateway": SharedPrompts("A", [cluster.gateway]),
            "round robin": SharedPrompts("B", cluster.replicas),
        }
        # the sides take turns, so that both meet the same speed of the machine
        for number, at in itertools.product(range(options.rounds), range(len(_WORDS))):
            for side in sides.values():
                side.ask(number, at)
        for name, side in sides.items():
            share = side.cached_tokens / side.prompt_tokens
            add(f"{test}: TTFT", name, "ms", side.times_ms)
            add(f"{test}: mean TTFT", name, "ms", [statistics.mean(side.times_ms)])
            add(f"{test}: share of the prompts that was cached", name, "of 1", [share])
    report.commands.append(command("benchmarks.cluster", arguments))
    report.save("cluster", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
