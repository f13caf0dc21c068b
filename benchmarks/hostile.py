"""First token of a client while others send requests that take long to prepare.

python -m benchmarks.hostile [--quick] [--rounds N] [--clients N] [--seconds S] [--output FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from benchmarks.measure import ModelLine, Report, command
from benchmarks.servers import Localgen
from localgen.backends.model_info import LoadOptions
from localgen.bench.private_server import private_settings
from localgen.config import ServerSettings

# seconds that the 99th percentile may be above that without load
TARGET_S = 1.0
_PATH = "/v1/chat/completions"
_JSON = {"Content-Type": "application/json"}
_TURN = {"role": "user", "content": "a"}
_ALTERNATIVES = " | ".join(f'"w{number}"' for number in range(60_000))
_PROPERTIES = {f"p{number}": {"type": "string"} for number in range(16_000)}
# the fields of one request of each load
LOADS: Mapping[str, dict[str, Any]] = {
    "16,000 messages": {"messages": [_TURN] * 16_000},
    "grammar of 60,000 alternatives": {"grammar": f"root ::= {_ALTERNATIVES}"},
    "schema of 16,000 properties": {
        "json_schema": {"type": "object", "properties": _PROPERTIES},
    },
}


def _connect(settings: ServerSettings) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(settings.socket_path))
    return httpx.Client(base_url="http://localgen", transport=transport, timeout=None)


def _body(**fields: Any) -> bytes:
    # greedy: a sampled answer may end without a token
    return json.dumps({"messages": [_TURN], "max_tokens": 1, "temperature": 0, **fields}).encode()


def first_token_s(http: httpx.Client) -> float:
    """Seconds from a request to its first token."""
    sent_s, first_s = time.monotonic(), 0.0
    with http.stream("POST", _PATH, content=_body(stream=True), headers=_JSON) as reply:
        for line in reply.iter_lines():
            if not first_s and '"num_tokens"' in line:
                first_s = time.monotonic() - sent_s
    if not first_s:
        raise RuntimeError(f"an answer without a token, status {reply.status_code}")
    return first_s


@contextlib.contextmanager
def load(settings: ServerSettings, body: bytes, clients: int) -> Iterator[None]:
    """Within the block, each client sends one request after the other, on its own connection."""
    ended = threading.Event()

    def send() -> None:
        with _connect(settings) as http:
            while not ended.is_set():
                http.post(_PATH, content=body, headers=_JSON)

    threads = [threading.Thread(target=send, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def percentile_s(http: httpx.Client, seconds: float) -> float:
    """The 99th percentile of first tokens, asked for one after the other for so long."""
    end_s, found = time.monotonic() + seconds, [first_token_s(http)]
    while time.monotonic() < end_s:
        found.append(first_token_s(http))
    return sorted(found)[int(len(found) * 0.99)]


def run(
    report: Report, settings: ServerSettings, clients: int, seconds: float, rounds: int
) -> None:
    """Measure each load in rounds, each next to a time without load."""
    with _connect(settings) as http:
        for name, fields in LOADS.items():
            without, added = [], []
            for _ in range(rounds):
                without.append(percentile_s(http, seconds))
                with load(settings, _body(**fields), clients):
                    added.append(percentile_s(http, seconds) - without[-1])
            report.add(f"first token, p99, before {name}", "no load", "s", without)
            test = f"first token, p99 above that without load: {name} × {clients}"
            report.most(report.add(test, "localgen", "s", added), TARGET_S)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.hostile")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=10, help="that send such requests")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    rounds, seconds = (1, 1.0) if options.quick else (options.rounds, options.seconds)
    with private_settings() as settings:
        localgen = Localgen(settings, None, LoadOptions())
        info = localgen.info
        line = ModelLine(info.description, info.size_bytes, info.params)
        report = Report(line, rounds, options.quick, info.options.threads or 0, {})
        run(report, settings, options.clients, seconds, rounds)
        localgen.close()
    report.commands.append(command("benchmarks.hostile", arguments))
    print(report.text())
    report.save("hostile", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
