"""The screen of `localgen tui` while long Markdown answers arrive: gaps, echo, CPU, memory.

The TUI runs in a pseudo terminal against a scripted server of OpenAI's protocol, which sends
Markdown at a fixed rate. At most 25 ms pass between reads, which bounds the error of a time.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import shlex
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from benchmarks.measure import ModelLine, Report, Series, command

COLUMNS, LINES = 120, 40
# each key is a letter that no answer contains, so that its echo can be told apart
_LETTERS = "БГДЖЗИЛПФЦЧШЩЫЭЮЯ"
_LOCALGEN = [sys.executable, "-m", "localgen"]
# a write of so many bytes is a screen; less are questions to the terminal
_SCREEN_BYTES, _SETTLE_S, _IDLE_S = 1_000, 4.0, 5.0
_KEY_PAUSE_S, _ECHO_CUTOFF_S, _START_CUTOFF_S = 0.1, 5.0, 60.0
_PAGE = """## Part {n}: what was measured

The cache holds **keys and values** of each token, so that `decode` reads them once a step.
It grows with the text, by a page at a time.

| type | size | speed |
|------|------|-------|
| Q4_K | 4.9 GB | 12.1 tok/s |
| Q8_0 | 8.5 GB | 7.4 tok/s |

```python
def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    scores = query @ keys.T / sqrt(query.shape[-1])
    return softmax(scores) @ values  # one row for each head
```

1. Read the *weights* of a layer.
2. Multiply, add, normalize.
    - as often as there are layers

"""


def markdown_tokens(count: int) -> list[str]:
    """Markdown with tables, code and lists, in `count` pieces of about four characters."""
    text = ""
    while len(text) < 4 * count:
        text += _PAGE.format(n=text.count("## ") + 1)
    return [text[at : at + 4] for at in range(0, 4 * count, 4)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    tokens: list[str]
    rate: float

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "script"}]} if found else {}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        began_s, sent = time.monotonic(), 0
        while sent < len(self.tokens):
            due = min(len(self.tokens), int((time.monotonic() - began_s) * self.rate) + 1)
            self.wfile.write(b"".join(_event(text) for text in self.tokens[sent:due]))
            self.wfile.flush()
            sent = due
            time.sleep(0.005)
        self.wfile.write(_event("", "stop") + b"data: [DONE]\n\n")


def _event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    body = {"id": "x", "object": "chat.completion.chunk", "model": "script", "choices": [choice]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@contextmanager
def scripted_server(tokens: list[str], rate: float) -> Iterator[str]:
    """Serve one answer of `tokens` at `rate` tokens/s; yields the base URL."""
    handler = type("Handler", (_Handler,), {"tokens": tokens, "rate": rate})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}/v1"
    finally:
        http.shutdown()
        http.server_close()


@dataclass
class Window:
    """Figures of one part of the answer: times in s, bytes written to the terminal."""

    gaps_s: list[float] = field(default_factory=list)
    echo_s: list[float] = field(default_factory=list)
    bytes_written: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    rss_bytes: int = 0


class Terminal:
    """A program in a pseudo terminal, with folders of its own for localgen's files."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self._terminal, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        environment = os.environ | {
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "XDG_RUNTIME_DIR": str(folder),
            "XDG_CONFIG_HOME": str(folder),
            "LOCALGEN_STATE_DIR": str(folder / "state"),
        }
        self._started_s = time.monotonic()
        self._process = subprocess.Popen(
            arguments,
            stdin=child,
            stdout=child,
            stderr=child,
            env=environment,
            start_new_session=True,
        )
        os.close(child)
        self._usage = psutil.Process(self._process.pid)

    def read(self, timeout_s: float) -> bytes:
        """Output of the TUI since the last call; empty if there is none for timeout_s."""
        if not select.select([self._terminal], [], [], timeout_s)[0]:
            return b""
        return os.read(self._terminal, 1 << 16)

    def write(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def first_paint_s(self) -> float:
        """Wait for the prompt, whose first letter is the cursor; returns s since the start.

        Raises TimeoutError.
        """
        seen = b""
        while b"sk something" not in seen:
            if time.monotonic() - self._started_s > _START_CUTOFF_S:
                raise TimeoutError(f"no prompt within {_START_CUTOFF_S:.0f} s")
            seen += self.read(0.025)
        return time.monotonic() - self._started_s

    def first_screen_s(self) -> float:
        """Wait for the first screen, a write of some length; returns s since the start.

        Raises TimeoutError.
        """
        while time.monotonic() - self._started_s < _START_CUTOFF_S:
            if len(self.read(0.005)) >= _SCREEN_BYTES:
                return time.monotonic() - self._started_s
        raise TimeoutError(f"no screen within {_START_CUTOFF_S:.0f} s")

    def idle_cores(self, seconds: float) -> float:
        """CPU time per second while nothing is typed."""
        before, began_s = self._cpu_s(), time.monotonic()
        self.settle(seconds)
        return (self._cpu_s() - before) / (time.monotonic() - began_s)

    def rss_bytes(self) -> int:
        return int(self._usage.memory_info().rss)

    def settle(self, seconds: float) -> None:
        """Read what the start still writes; the blinking cursor never ends."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.read(0.025)

    def watch(self, seconds: float) -> Window:
        """Type letters and measure for some seconds."""
        window, letters, pending = Window(), 0, b""
        began_s = last_s = time.monotonic()
        typed_s = 0.0
        cpu_before = self._cpu_s()
        while (now_s := time.monotonic()) < began_s + seconds:
            if pending and now_s - typed_s > _ECHO_CUTOFF_S:
                window.echo_s.append(now_s - typed_s)
                pending = b""
            if not pending and now_s - typed_s > _KEY_PAUSE_S:
                letter = _LETTERS[letters % len(_LETTERS)]
                # the prompt is cleared now and then, since a long one takes longer to draw
                self.write(("\x15" if letters % 17 == 16 else "") + letter)
                letters, pending, typed_s = letters + 1, letter.encode(), now_s
            written = self.read(0.025)
            if written:
                now_s = time.monotonic()
                window.gaps_s.append(now_s - last_s)
                window.bytes_written += len(written)
                last_s = now_s
                if pending and pending in written:
                    window.echo_s.append(now_s - typed_s)
                    pending = b""
        window.gaps_s.append(time.monotonic() - last_s)
        window.cpu_s, window.wall_s = self._cpu_s() - cpu_before, time.monotonic() - began_s
        window.rss_bytes = self.rss_bytes()
        return window

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)

    def _cpu_s(self) -> float:
        times = self._usage.cpu_times()
        return times.user + times.system


def p99(values: list[float]) -> float:
    return sorted(values)[max(0, -(-len(values) * 99 // 100) - 1)]


def measure(tokens: int, rate: float, window_s: float) -> dict[str, list[float]]:
    """One answer; returns each figure by the window of the answer, in order, and of all of it."""
    figures: dict[str, list[float]] = {}
    echo_s: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        scripted_server(markdown_tokens(tokens), rate) as url,
    ):
        terminal = Terminal([*_LOCALGEN, "tui", "--url", url], Path(folder))
        try:
            figures["start to first paint, s"] = [terminal.first_paint_s()]
            terminal.settle(2.0)
            terminal.write("Ask\r")
            for _ in range(max(1, round(tokens / rate / window_s))):
                window = terminal.watch(window_s)
                print(_line(window, rate), flush=True)
                echo_s += window.echo_s
                for name, value in _figures(window, rate).items():
                    figures.setdefault(name, []).append(value)
        finally:
            with suppress(ProcessLookupError):
                terminal.close()
    # a window has about 65 keys, so its p99 is its slowest
    figures["echo p99 of the answer, s"] = [p99(echo_s or [_ECHO_CUTOFF_S])]
    print(f"{len(echo_s)} keys, echo p99 {figures['echo p99 of the answer, s'][0]:.3f} s")
    return figures


def start_and_idle(command: list[str]) -> dict[str, float]:
    """First screen, then CPU and memory of a program that waits."""
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(command, Path(folder))
        try:
            first_s = terminal.first_screen_s()
            terminal.settle(_SETTLE_S)
            idle = terminal.idle_cores(_IDLE_S)
            return {
                "start to first screen, s": first_s,
                "idle CPU, cores": idle,
                "idle RSS, MB": terminal.rss_bytes() / 1e6,
            }
        finally:
            with suppress(ProcessLookupError):
                terminal.close()


def _figures(window: Window, rate: float) -> dict[str, float]:
    return {
        "longest gap, s": max(window.gaps_s),
        "gap p99, s": p99(window.gaps_s),
        "echo p50, s": statistics.median(window.echo_s or [_ECHO_CUTOFF_S]),
        "echo p99, s": p99(window.echo_s or [_ECHO_CUTOFF_S]),
        "bytes per token": window.bytes_written / (rate * window.wall_s),
        "CPU, cores": window.cpu_s / window.wall_s,
        "RSS, MB": window.rss_bytes / 1e6,
    }


def _line(window: Window, rate: float) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in _figures(window, rate).items())


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; prints a line for each window of an answer."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.tui")
    parser.add_argument("--quick", action="store_true", help="one short answer")
    parser.add_argument("--rates", default="100,1000", help="tokens/s, comma separated")
    parser.add_argument("--tokens", type=int, default=0, help="0: as many as 20 s take")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each window")
    parser.add_argument(
        "--peers", nargs="*", default=[], help="other programs to start, beside localgen's two"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of starting")
    parser.add_argument("--side", default="localgen tui", help="name of what is measured")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    rates = [1000.0] if options.quick else [float(rate) for rate in options.rates.split(",")]
    line = ModelLine("scripted answer", 0, 0)
    report = Report(line, 1, options.quick, 0, {})
    for rate in rates:
        tokens = 2_000 if options.quick else options.tokens or int(20 * rate)
        seconds = 1.0 if options.quick else options.seconds
        for name, values in measure(tokens, rate, seconds).items():
            figure, unit = name.rsplit(", ", 1) if ", " in name else (name, "bytes")
            test = f"{figure}, {tokens:,} tokens at {rate:,.0f}/s"
            report.series.append(Series(test, options.side, unit, tuple(values), line))
    programs = {f"localgen {name}": [*_LOCALGEN, name] for name in ("tui", "top")}
    programs |= {peer: shlex.split(peer) for peer in options.peers}
    for side, program in programs.items():
        rounds = [start_and_idle(program) for _ in range(1 if options.quick else options.rounds)]
        print(side, rounds, flush=True)
        for name in rounds[0]:
            figure, unit = name.rsplit(", ", 1)
            timed = tuple(each[name] for each in rounds)
            report.series.append(Series(figure, Path(side).name, unit, timed, line))
    report.commands.append(command("benchmarks.tui", arguments))
    report.save("tui", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
