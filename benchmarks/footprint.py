"""Overhead of localgen around the engine: time to first token, start-up time, memory."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.measure import Report
from benchmarks.servers import Localgen
from benchmarks.streams import LocalgenBenchClient, StreamFailed
from localgen.backends.engine.engine import Engine
from localgen.backends.engine.input_processor import InputProcessor
from localgen.backends.engine.loaded_model import LoadedModel
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message, Request, StepEvents
from localgen.machine.python_process import python_command, python_environment

OVERHEAD_MS, HELP_MS, MEMORY_MB = 5.0, 200.0, 150.0
_ANSWER_TOKENS = 8
_CHAT_TOKENS = 400
_CHAT_S = 60.0


def overhead(report: Report, server: Localgen, loaded: LoadedModel, requests: int) -> None:
    """Compare the TTFT of a client of `server` with that of the engine alone.

    loaded: the same model loaded in this process, without server and socket.
    """
    client, engine = LocalgenBenchClient(server.client(), server.model), InProcess(loaded)
    at_client, in_engine, alone = [], [], []
    for number in range(-3, requests):  # the first three are warm-up
        prompt = (Message("user", f"What is {number} + 25?"),)
        stream = client.ask(prompt, _ANSWER_TOKENS)
        ttft_ms = engine.ttft_ms(prompt)
        if number >= 0:
            assert stream.timings is not None
            at_client.append(stream.ttft_s * 1e3)
            in_engine.append(stream.timings.ttft_ms)
            alone.append(ttft_ms)
    name = server.info.name
    whole = report.add(f"TTFT, {name}", "client", "ms", at_client)
    report.add(f"TTFT, {name}", "engine, from its timings", "ms", in_engine)
    report.add(f"TTFT, {name}", "engine in this process", "ms", alone)
    for what, others in (("timings", in_engine), ("engine in process", alone)):
        added = [mine - other for mine, other in zip(whole.values, others, strict=True)]
        report.most(report.add("added to TTFT", f"client − {what}", "ms", added), OVERHEAD_MS)


class InProcess:
    """An engine run by the calling thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._first_s: float | None = None
        self._ended = False
        self._engine = Engine(
            loaded.runner,
            InputProcessor(
                limits=loaded.runner.limits,
                tokenizer=loaded.tokenizer,
                template=loaded.template,
                defaults=loaded.info.sampling,
            ),
            itl_target_ms=loaded.info.options.itl_target_ms or 0.0,
            max_queue=1,
            publish=self._take,
        )

    def _take(self, events: StepEvents) -> None:
        if events.failed:
            raise StreamFailed(events.failed[0].message)
        if events.deltas and self._first_s is None:
            self._first_s = time.perf_counter()
        self._ended = self._ended or bool(events.finished)

    def ttft_ms(self, prompt: tuple[Message, ...]) -> float:
        """Submit a request; return the time to its first text."""
        params = SamplingParams(temperature=0.0, max_tokens=_ANSWER_TOKENS, ignore_eos=True)
        self._first_s, self._ended = None, False
        started_s = time.perf_counter()
        self._engine.submit(
            Request(id=f"{started_s}", messages=prompt, params=params, arrived_s=time.monotonic())
        )
        while not self._ended:
            self._engine.step(wait=True)
        assert self._first_s is not None
        return (self._first_s - started_s) * 1e3


def help_time(report: Report, runs: int) -> None:
    """Measure `localgen --help`, including the interpreter's start."""
    took_ms = []
    for number in range(-1, runs):  # the first run fills the page cache
        started_s = time.perf_counter()
        subprocess.run(_localgen("--help"), check=True, capture_output=True, env=_environment())
        if number >= 0:
            took_ms.append((time.perf_counter() - started_s) * 1e3)
    report.most(report.add("localgen --help", "localgen", "ms", took_ms), HELP_MS)


def memory(report: Report, server: Localgen) -> None:
    """Measure peak memory of the server and of `localgen chat` while answering.

    The engine process is not included.
    """
    with server.client() as client:
        health = client.health()
    assert health is not None
    peaks: dict[str, dict[str, int]] = {"server": {}, "chat": {}}
    for pid in _chatting(server):
        for name, process in (("server", health.pid), ("chat", pid)):
            _raise_peak(peaks[name], psutil.Process(process))
    for name, peak in peaks.items():
        for kind, size in peak.items():
            report.add(f"memory while chatting, {kind}", name, "MB", [size / 1e6])
    for kind in ("RSS", "USS"):
        both = (peaks["server"][kind] + peaks["chat"][kind]) / 1e6
        series = report.add(f"memory while chatting, {kind}", "server + chat", "MB", [both])
        report.most(series, MEMORY_MB)


def _raise_peak(peak: dict[str, int], process: psutil.Process) -> None:
    found = process.memory_full_info()
    for kind, size in (("RSS", found.rss), ("USS", found.uss)):
        peak[kind] = max(peak.get(kind, 0), size)


def _chatting(server: Localgen) -> Iterator[int]:
    """Run a chat; yield its process id every 50 ms while it answers.

    Raises StreamFailed if it exits or does not answer in time.
    """
    terminal, theirs = pty.openpty()
    options = ["--temp", "0", "--ignore-eos", "-n", str(_CHAT_TOKENS)]
    command = _localgen("chat", *([server.model] if server.model else []), *options)
    environment = _environment() | server.settings.to_environment() | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    output = bytearray()
    threading.Thread(target=_read_all, args=(terminal, output), daemon=True).start()
    try:
        time.sleep(2.0)  # wait for the prompt
        os.write(terminal, b"Tell me a story.\r")
        deadline = time.monotonic() + _CHAT_S
        while b"TTFT" not in output or _is_answering(server):
            if process.poll() is not None or time.monotonic() > deadline:
                raise StreamFailed(f"chat did not answer: {bytes(output[-300:])!r}")
            yield process.pid
            time.sleep(0.05)
    finally:
        process.terminate()
        process.wait()


def _is_answering(server: Localgen) -> bool:
    with server.client() as client:
        return any(model.active_requests for model in client.running_models())


def _read_all(terminal: int, output: bytearray) -> None:
    try:
        while piece := os.read(terminal, 4096):
            output += piece
    except OSError:
        return  # the chat has closed the terminal


def _localgen(*arguments: str) -> list[str]:
    script = Path(sys.executable).with_name("localgen")
    if script.exists():
        return [str(script), *arguments]
    return python_command("localgen.cli.main", *arguments)


def _environment() -> dict[str, str]:
    return python_environment()
