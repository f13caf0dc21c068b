"""A person who chats beside a batch: their inter-token latency with it and without.

A turn is an answer of 200 tokens, as in a chat, after a pause; the first version had 60, so its
figures cannot be compared. The ITL p99 is that of all gaps of one side in one round; the ratio is
the median of those of the rounds. Each round has turns without the batch, then turns beside
`localgen run --batch`, which is killed at the end of the round and resumes in the next one; the
last run is left to end. For comparison, others send the same requests at the person's own priority.
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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import ModelLine, Report
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.bench.private_server import private_settings
from localgen.client import LocalClient
from localgen.client.responses import TextDelta
from localgen.config import ServerSettings

MODELS = ("smollm2", "tiny")
ANSWER_TOKENS, BATCH_TOKENS = 200, 24
PAUSE_S = 1.0
WORDS = ["red", "blue", "old", "new", "tall", "small", "house", "road", "sea"]


@dataclass(slots=True)
class Seen:
    """What a person waits for, in ms: the first token of each turn, and each gap after it."""

    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)

    def p99(self) -> float:
        return statistics.quantiles(self.gaps_ms, n=100, method="inclusive")[98]


class Bench:
    """A server with one model, a person and a batch of `lines` requests."""

    def __init__(self, settings: ServerSettings, folder: Path, model: str, lines: int) -> None:
        self._settings, self._model = settings, model
        self._batch, self.out = folder / "in.jsonl", folder / "out.jsonl"
        self._chance = random.Random(7)
        self._lines = [self._line(number) for number in range(lines)]
        self._batch.write_text("".join(json.dumps(line) + "\n" for line in self._lines))
        self.client = LocalClient(settings)
        self.client.connect()
        self.info = self.client.load(model, LoadOptions())

    def _line(self, number: int) -> dict[str, object]:
        words = " ".join(self._chance.choices(WORDS, k=40))
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": f"{number}: continue this text: {words}"}],
            "max_tokens": BATCH_TOKENS,
            "ignore_eos": True,
            "temperature": 0.7,
        }
        name = f"line-{number}"
        url = "/v1/chat/completions"
        return {"custom_id": name, "method": "POST", "url": url, "body": body}

    def turns(self, count: int) -> Seen:
        seen = Seen()
        for number in range(count):
            time.sleep(PAUSE_S)
            self._turn(f"{number}: tell me about a walk by the sea", seen)
        return seen

    def _turn(self, prompt: str, seen: Seen) -> None:
        params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        last_s, is_first = time.monotonic(), True
        for part in self.client.chat(self._model, [Message("user", prompt)], params):
            if not isinstance(part, TextDelta) or not part.text:
                continue
            now_s = time.monotonic()
            (seen.ttft_ms if is_first else seen.gaps_ms).append((now_s - last_s) * 1e3)
            last_s, is_first = now_s, False

    @contextmanager
    def batch(self) -> Iterator[None]:
        """`localgen run --batch` during the block, killed at its end."""
        process = self._start()
        try:
            before = self.results()
            _wait(lambda: self.results() > before or process.poll() is not None)
            yield
            assert process.poll() is None, "the batch ended too early: give more --lines"
        finally:
            process.kill()
            process.wait()

    def finish(self) -> float:
        """Leave the rest of the batch to itself; return its requests per second."""
        left, started_s = len(self._lines) - self.results(), time.monotonic()
        process = self._start()
        try:
            assert process.wait() == 0, "the batch failed"
        finally:
            process.kill()
        return left / (time.monotonic() - started_s)

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = ["run", "--batch", str(self._batch), "--out", str(self.out)]
        return subprocess.Popen(
            [sys.executable, "-m", "localgen.cli.main", *arguments],
            env=os.environ | self._settings.to_environment(),
        )

    def results(self) -> int:
        return len(self.out.read_bytes().splitlines()) if self.out.exists() else 0

    @contextmanager
    def equals(self, count: int) -> Iterator[None]:
        """Others that send the same requests during the block, at the person's priority."""
        stop = threading.Event()
        clients = [LocalClient(self._settings) for _ in range(count)]
        threads = [threading.Thread(target=self._send, args=(each, stop)) for each in clients]
        for thread in threads:
            thread.start()
        try:
            time.sleep(PAUSE_S)
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            for client in clients:
                client.close()

    def _send(self, client: LocalClient, stop: threading.Event) -> None:
        while not stop.is_set():
            body = self._chance.choice(self._lines)["body"]
            assert isinstance(body, dict)
            client.send("chat/completions", body)

    def require_complete(self) -> None:
        """Fail unless each line of the batch has exactly one result, without an error."""
        results = [json.loads(line) for line in self.out.read_text().splitlines()]
        assert [each["response"]["status_code"] for each in results] == [200] * len(self._lines)
        ids = sorted(each["custom_id"] for each in results)
        assert ids == sorted(str(line["custom_id"]) for line in self._lines)


def _wait(done: Callable[[], bool], timeout_s: float = 120.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < until_s, "the batch does not begin"
        time.sleep(0.05)


def run(bench: Bench, rounds: int, turns: int, peers: int) -> Report:
    """Measure in turn; each value of a series is of one round."""
    info = bench.info
    line = ModelLine(info.name, info.size_bytes, info.params)
    report = Report(line, rounds, False, 0, {})
    sides: dict[str, list[Seen]] = {"alone": [], "beside the batch": [], "beside equals": []}
    bench.turns(1)
    for _ in range(rounds):
        sides["alone"].append(bench.turns(turns))
        with bench.batch():
            sides["beside the batch"].append(bench.turns(turns))
        with bench.equals(peers):
            sides["beside equals"].append(bench.turns(turns))
    rate = bench.finish()
    bench.require_complete()
    p99 = {
        side: report.add("ITL p99", side, "ms", [each.p99() for each in seen])
        for side, seen in sides.items()
    }
    for side, seen in sides.items():
        medians = [statistics.median(each.gaps_ms) for each in seen]
        report.add("ITL p50", side, "ms", medians)
        report.add("TTFT, worst", side, "ms", [max(each.ttft_ms) for each in seen])
    report.add("the rest of the batch alone", "localgen run --batch", "requests/s", [rate])
    report.ratio(p99["beside the batch"], p99["alone"], 1.25, at_least=False)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.batch")
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=10, help="of the person, per side and round")
    parser.add_argument("--peers", type=int, default=8, help="others at the person's priority")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    with private_settings() as settings, tempfile.TemporaryDirectory() as folder:
        bench = Bench(settings, Path(folder), options.model, options.lines)
        try:
            report = run(bench, options.rounds, options.turns, options.peers)
        finally:
            bench.client.close()
    report.commands.append(measure.command("benchmarks.batch", arguments))
    print(report.text())
    report.save("batch", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
