"""Engines that send nothing, because they are stopped or hang: told to everybody, then replaced."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import ollama
import psutil
import pytest
from serving import (
    MANY_WORDS,
    ServerHarness,
    in_thread,
    running_alone,
    server_harness,
    wait_until,
)

from localgen.backends.engine import wire
from localgen.backends.engine.engine import IDLE_STATS_INTERVAL_S
from localgen.backends.engine.process import HEARTBEAT_S
from localgen.backends.errors import EngineDied, LoadFailed
from localgen.backends.messages import FrameSocket
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message, PromptProgress
from localgen.client import Completion, TextDelta
from localgen.client.stream import _read_comment, iter_sse_data
from localgen.server.models.engine_client import ProcessUsage, Silence
from localgen.server.models.engine_process import EngineProcess
from localgen.server.models.engine_watch import SILENT_AFTER_S, EngineWatch
from localgen.server.models.request_stream import EngineSilent, RequestStream

# a hang guard: what is waited for happens within seconds on an idle machine
LONG_S = 60.0


@dataclass
class FakeEngine:
    """Also its resident model."""

    processor: str = "100% CPU"
    has_requests: bool = True
    is_loading: bool = False
    cpu_s: float = 0.0
    read_bytes: int = 0
    pid: int = 1
    name: str = "fake"
    silence: Silence = field(default_factory=Silence)
    announced: list[float] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)

    @property
    def engine(self) -> FakeEngine:
        return self

    file = engine

    @property
    def info(self) -> FakeEngine | None:
        return None if self.is_loading else self

    def announce_silence(self) -> None:
        self.announced.append(self.silence.silent_s)

    async def kill(self, reason: str) -> None:
        self.killed.append(reason)


def watch_for(
    engine: FakeEngine,
    seconds: int,
    *,
    hang_timeout_s: float | None = 60.0,
    each_s: Callable[[int], object] = lambda second: None,
    step_s: float = 1.0,
) -> float:
    """Watch an engine until it is killed; return the seconds that took, or `seconds`."""
    resident: Any = engine

    def read_usage(_pid: int) -> ProcessUsage:
        return ProcessUsage(engine.cpu_s, (engine.read_bytes,))

    watch = EngineWatch(lambda: [resident], hang_timeout_s, read_usage=read_usage)

    async def run() -> float:
        watch.check(0.0)
        for second in range(1, seconds + 1):
            each_s(second)
            watch.check(second * step_s)
            await asyncio.sleep(0)
            if engine.killed:
                return second * step_s
        return seconds * step_s

    return asyncio.run(run())


def test_an_idle_engine_sends_often_enough() -> None:
    assert 2 * IDLE_STATS_INTERVAL_S <= SILENT_AFTER_S


def test_an_engine_with_requests_is_killed_after_the_hang_timeout() -> None:
    engine = FakeEngine()
    assert watch_for(engine, 200) == 60.0
    assert engine.announced[0] == SILENT_AFTER_S
    assert "sent nothing for 60 s" in engine.killed[0]
    assert "hang timeout 60 s" in engine.killed[0]


def test_a_hang_timeout_of_none_kills_nothing() -> None:
    engine = FakeEngine()
    watch_for(engine, 2000, hang_timeout_s=None)
    assert not engine.killed
    assert engine.announced


def test_a_message_ends_the_silence() -> None:
    engine = FakeEngine()

    def speak(second: int) -> None:
        if second % 9 == 0:
            engine.silence = Silence()

    watch_for(engine, 500, each_s=speak)
    assert not engine.announced
    assert not engine.killed


def test_an_idle_engine_is_killed_only_when_it_is_needed() -> None:
    engine = FakeEngine(has_requests=False)

    def request(second: int) -> None:
        engine.has_requests = second > 300

    assert watch_for(engine, 1000, each_s=request) == 360.0
    assert engine.announced[0] == 301.0, "told at once how long it has sent nothing"


def test_clients_that_give_up_and_try_again_do_not_save_a_hung_engine() -> None:
    engine = FakeEngine()

    def request(second: int) -> None:
        engine.has_requests = second % 20 != 0

    assert watch_for(engine, 200, each_s=request) < 70


def test_a_long_step_on_the_processor_has_ten_times_as_long() -> None:
    def compute(engine: FakeEngine, _second: int) -> None:
        engine.cpu_s += 0.5

    on_cpu, on_gpu = FakeEngine(), FakeEngine(processor="100% GPU")
    assert watch_for(on_cpu, 2000, each_s=partial(compute, on_cpu)) > 400
    assert on_cpu.announced[0] == SILENT_AFTER_S, "told nevertheless"
    assert on_cpu.killed, "an endless loop ends as well"
    assert watch_for(on_gpu, 2000, each_s=partial(compute, on_gpu)) == 60.0


def test_an_engine_that_is_stopped_while_it_loads_is_killed() -> None:
    engine = FakeEngine(is_loading=True, has_requests=False)
    assert watch_for(engine, 200) == 60.0
    assert engine.announced[0] == SILENT_AFTER_S
    assert "sent nothing for 60 s while loading" in engine.killed[0]


@pytest.mark.parametrize("used", ["cpu_s", "read_bytes"])
def test_a_load_without_heartbeats_that_computes_or_reads_is_only_told(used: str) -> None:
    engine = FakeEngine(is_loading=True, has_requests=False)

    def work(second: int) -> None:
        if second % 50 == 0:
            setattr(engine, used, getattr(engine, used) + 1)

    assert watch_for(engine, 3000, each_s=work) == 3000
    assert not engine.killed
    assert engine.announced[0] == SILENT_AFTER_S
    assert watch_for(engine, 200) == 60.0, "once it does no more"


def test_a_heartbeat_ends_the_silence_of_a_load() -> None:
    engine = FakeEngine(is_loading=True, has_requests=False)

    def beat(second: int) -> None:
        engine.silence = Silence()

    watch_for(engine, 500, each_s=beat)
    assert not engine.announced
    assert not engine.killed
    assert 2 * HEARTBEAT_S <= SILENT_AFTER_S


def test_a_loading_engine_sends_heartbeats_while_native_code_runs() -> None:
    code = (
        "import sys, time\n"
        "from localgen.backends.engine import process\n"
        "process.HEARTBEAT_S = 0.01\n"
        "process.main(int(sys.argv[1]), lambda request, on_progress: time.sleep(600))"
    )
    started = EngineProcess.start([sys.executable, "-c", code])
    sock, deadline_s = FrameSocket(started.sock), time.monotonic() + LONG_S
    sock.send(wire.CODEC.encode(ModelLoadRequest("m", "m.gguf", LoadOptions())))
    messages = [wire.CODEC.decode(sock.receive(deadline_s)) for _ in range(3)]
    assert messages == [wire.LoadProgress(0.0)] * 3
    started.kill()
    started.process.communicate()
    started.sock.close()


def test_a_stopped_server_does_not_take_its_engines_for_hung() -> None:
    engine = FakeEngine()
    watch_for(engine, 4, step_s=1000.0)
    assert not engine.announced
    assert not engine.killed


def test_a_stream_is_told_each_time_that_the_silence_has_doubled() -> None:
    nothing: Any = None
    stream = RequestStream(["a"], "", abort=nothing, cancel=nothing)
    for second in range(10, 200):
        stream.announce_silence(float(second))
    events = asyncio.run(stream.next_events())
    assert events == [EngineSilent(float(seconds)) for seconds in (10, 20, 40, 80, 160)]


def test_a_killed_engine_takes_its_children_along() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    started = EngineProcess.start([sys.executable, "-c", code])
    assert started.process.stdout is not None
    child = psutil.Process(int(started.process.stdout.readline()))
    child.suspend()
    started.kill()
    assert started.process.wait(timeout=LONG_S) == -signal.SIGKILL
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, LONG_S)
    started.process.stdout.close()
    started.sock.close()


def test_comments_of_other_servers_say_nothing_about_an_engine() -> None:
    heard: list[float | PromptProgress] = []
    chunks = [b": ping\n\n: engine silent for 12 s\n\n: engine silent for ", b"a s\ndata: x\n\n"]
    chunks += [b": prompt 512 of 4000 tokens\n: prompt 5 of tokens\n: prompt -1 of 5 tokens\n"]
    found = iter_sse_data(chunks, partial(_read_comment, heard.append, heard.append))
    assert list(found) == [b"x"]
    assert heard == [12.0, PromptProgress(512, 4000)]


# -- with processes ---------------------------------------------------------------------------


@contextmanager
def silent_after_2_s(hang_timeout_s: float | None) -> Iterator[ServerHarness]:
    """A server that takes an engine for silent after 2 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_SILENT_S", "2")
        with server_harness(hang_timeout_s=hang_timeout_s) as built:
            built.http.timeout = LONG_S
            built.start()
            yield built


@pytest.fixture(scope="module")
def killing_server() -> Iterator[ServerHarness]:
    with silent_after_2_s(6.0) as built:
        yield built


@pytest.fixture
def served(killing_server: ServerHarness) -> Iterator[ServerHarness]:
    """A server without models that kills an engine after 6 s of silence."""
    yield from running_alone(killing_server)


@pytest.fixture(scope="module")
def patient_server() -> Iterator[ServerHarness]:
    with silent_after_2_s(None) as built:
        yield built


@pytest.fixture
def patient(patient_server: ServerHarness) -> Iterator[ServerHarness]:
    """A server without models that kills no engine."""
    yield from running_alone(patient_server)


def raw_lines(served: ServerHarness, model: str, into: list[str], text: str = MANY_WORDS) -> None:
    """Lines of a streamed chat as they come, comments included."""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": text}]}
    with served.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        into.extend(line for line in reply.iter_lines() if line)


def ask_in_vain(served: ServerHarness, model: str) -> None:
    """A chat that the test does not wait for."""
    with suppress(httpx.HTTPError):
        served.chat(model, MANY_WORDS)


def ps(served: ServerHarness) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "localgen.cli.main", "ps"],
        env=os.environ | served.settings.to_environment(),
        capture_output=True,
        text=True,
        check=True,
    )


def run_on_pipes(served: ServerHarness, model: str) -> subprocess.Popen[str]:
    """`localgen run` with a long answer."""
    return subprocess.Popen(
        [sys.executable, "-m", "localgen.cli.main", "run", model, MANY_WORDS],
        env=os.environ | served.settings.to_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_answering(served: ServerHarness, model: str) -> bool:
    """True once the model is loaded and runs a request."""
    return bool(served.loaded()) and bool((served.stats(model)["stats"] or {}).get("running"))


def health(served: ServerHarness) -> dict[str, Any]:
    reply = served.http.get("/health")
    assert reply.status_code == 200, "other models answer"
    found: dict[str, Any] = reply.json()
    return found


def test_a_stopped_engine_is_told_and_replaced(served: ServerHarness) -> None:
    model = served.model("victim", token_s=0.02)
    client = served.client()
    lines: list[str] = []
    streaming = in_thread(lambda: raw_lines(served, model, lines))
    wait_until(lambda: is_answering(served, model), LONG_S)
    embedded: list[Any] = []
    body = {"model": model, "input": ["w " * 400] * 4}
    embedding = in_thread(lambda: embedded.append(served.http.post("/v1/embeddings", json=body)))
    wait_until(lambda: served.stats(model)["active_requests"] == 2, LONG_S)
    assert served.stats(model)["silent_s"] is None
    pid = served.stats(model)["pid"]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: health(served)["status"] == "degraded", LONG_S)
    assert health(served)["silent_models"] == ["victim"]
    assert (client.running_models()[0].silent_s or 0) >= 2.0
    streaming.join(timeout=LONG_S)
    embedding.join(timeout=LONG_S)
    assert any(line.startswith(": engine silent for ") for line in lines)
    assert "s and was killed (hang timeout 6 s)" in lines[-1]
    assert "engine_died" in lines[-1]
    assert embedded[0].status_code == 502
    assert "hang timeout" in embedded[0].json()["error"]["message"]
    wait_until(lambda: not psutil.pid_exists(pid), LONG_S)
    assert served.chat(model, "a b").json()["choices"][0]["message"]["content"] == "a b"
    assert served.loads(model) == 2
    assert health(served)["status"] == "ok"


def test_a_request_to_an_engine_that_was_stopped_while_idle(served: ServerHarness) -> None:
    model = served.model("victim")
    served.chat(model, "a")
    os.kill(served.stats(model)["pid"], signal.SIGSTOP)
    wait_until(lambda: health(served)["status"] == "degraded", LONG_S)
    said: list[str] = []
    client = served.client(said.append)
    with pytest.raises(EngineDied, match="hang timeout 6 s"):
        list(client.chat(model, [Message("user", "a b")], SamplingParams()))
    assert any(line.startswith("no answer of the engine for ") for line in said)
    assert served.chat(model, "a b").status_code == 200


def test_an_engine_that_is_stopped_while_it_loads_is_told_and_replaced(
    served: ServerHarness,
) -> None:
    model = served.model("victim", load_s=10)
    said: list[str] = []
    client = served.client(said.append)
    errors: list[LoadFailed] = []

    def load() -> None:
        with pytest.raises(LoadFailed, match="while loading") as failed:
            client.load(model, LoadOptions())
        errors.append(failed.value)

    loading = in_thread(load)
    lines: list[str] = []
    streaming = in_thread(lambda: raw_lines(served, model, lines))
    wait_until(lambda: served.loaded() and served.stats(model)["active_requests"] == 2, LONG_S)
    pid = served.stats(model)["pid"]
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: health(served)["status"] == "degraded", LONG_S)
    assert health(served)["silent_models"] == ["victim"]
    assert (client.running_models()[0].silent_s or 0) >= 2.0
    loading.join(timeout=LONG_S)
    assert "hang timeout 6 s" in errors[0].message
    assert any(line.startswith("no answer of the engine for ") for line in said)
    streaming.join(timeout=LONG_S)
    assert lines[0].startswith(": engine silent for ")
    assert "load_failed" in lines[-1]
    assert not psutil.pid_exists(pid)
    model = served.model("victim")
    assert served.chat(model, "a b").status_code == 200
    assert health(served)["status"] == "ok"


def test_ps_says_that_a_model_loads(served: ServerHarness) -> None:
    model = served.model("victim", load_s=30)
    in_thread(partial(ask_in_vain, served, model))
    wait_until(served.loaded, LONG_S)
    _, row = ps(served).stdout.splitlines()
    assert row.startswith("victim")
    assert re.search(r" -\s+-\s+loading \(\d+%\)$", row)


def test_requests_age_while_their_engine_hangs(served: ServerHarness) -> None:
    model = served.model("victim", token_s=0.02)
    in_thread(partial(ask_in_vain, served, model))
    wait_until(lambda: is_answering(served, model), LONG_S)
    pid = served.stats(model)["pid"]
    os.kill(pid, signal.SIGSTOP)

    def age_s() -> float:
        (request,) = served.stats(model)["stats"]["sequences"]
        return float(request["age_s"])

    try:
        before_s = age_s()
        wait_until(lambda: age_s() > before_s + 1.0, LONG_S)
    finally:  # a stopped engine does not notice the end of its server
        os.kill(pid, signal.SIGCONT)


def test_a_long_step_is_told_and_ends_well(served: ServerHarness) -> None:
    model = served.model(spin_s=8.0)
    lines: list[str] = []
    raw_lines(served, model, lines, "a !spin b")
    assert any(line.startswith(": engine silent for ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_an_engine_that_goes_on_is_no_longer_silent(patient: ServerHarness) -> None:
    model = patient.model(token_s=0.02)
    lines: list[str] = []
    streaming = in_thread(lambda: raw_lines(patient, model, lines, "word " * 150))
    wait_until(lambda: is_answering(patient, model), LONG_S)
    pid = patient.stats(model)["pid"]
    os.kill(pid, signal.SIGSTOP)
    # the server kills nothing, so it is told more than once
    wait_until(lambda: (patient.stats(model)["silent_s"] or 0) > 4.5, LONG_S)
    os.kill(pid, signal.SIGCONT)
    streaming.join(timeout=LONG_S)
    assert len([line for line in lines if line.startswith(":")]) >= 2
    assert lines[-1] == "data: [DONE]"
    assert health(patient)["status"] == "ok"


def test_a_whole_answer_fails_with_the_reason(served: ServerHarness) -> None:
    model = served.model("victim", token_s=0.02)
    replies: list[Any] = []
    chatting = in_thread(lambda: replies.append(served.chat(model, MANY_WORDS)))
    wait_until(lambda: is_answering(served, model), LONG_S)
    os.kill(served.stats(model)["pid"], signal.SIGSTOP)
    chatting.join(timeout=LONG_S)
    assert replies[0].status_code == 502
    assert "hang timeout" in replies[0].json()["error"]["message"]


def test_ollama_clients_are_told_in_chunks_without_text(served: ServerHarness) -> None:
    name, model = served.named("asked", token_s=0.02), str(served.folder / "asked.gguf")
    lines: list[dict[str, Any]] = []

    def stream() -> None:
        body = {"model": name, "messages": [{"role": "user", "content": MANY_WORDS}]}
        with served.http.stream("POST", "/api/chat", json=body) as reply:
            lines.extend(map(json.loads, reply.iter_lines()))

    streaming = in_thread(stream)
    wait_until(lambda: is_answering(served, model), LONG_S)
    os.kill(served.stats(model)["pid"], signal.SIGSTOP)
    streaming.join(timeout=LONG_S)
    *chunks, error = lines
    notices = [chunk for chunk in chunks if "localgen" in chunk]
    assert notices[0]["localgen"]["silent_s"] >= 2.0
    assert (notices[0]["message"]["content"], notices[0]["done"]) == ("", False)
    assert notices[0].keys() - {"localgen"} == chunks[0].keys()
    assert "hang timeout" in error["error"]


@pytest.mark.parametrize("route", ["chat", "generate"])
def test_ollamas_own_client_goes_on_after_a_silence(route: str, patient: ServerHarness) -> None:
    text = " ".join(["word"] * 150)
    name = patient.named(f"asked-by-{route}", token_s=0.02)
    model = str(patient.folder / f"{name}.gguf")
    socket_path = str(patient.settings.socket_path)
    with httpx.HTTPTransport(uds=socket_path) as transport:
        client = ollama.Client("http://test", transport=transport, timeout=LONG_S)
        texts: list[str] = []

        def stream() -> None:
            if route == "chat":
                messages = [{"role": "user", "content": text}]
                parts = client.chat(name, messages, stream=True)
                texts.extend(part.message.content or "" for part in parts)
            else:
                pieces = client.generate(name, text, stream=True)
                texts.extend(piece.response or "" for piece in pieces)

        streaming = in_thread(stream)
        wait_until(lambda: is_answering(patient, model), LONG_S)
        pid = patient.stats(model)["pid"]
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: (patient.stats(model)["silent_s"] or 0) > 2.5, LONG_S)
        os.kill(pid, signal.SIGCONT)
        streaming.join(timeout=LONG_S)
    assert "".join(texts) == text
    assert "" in texts[:-1], "the notice"


def test_a_stopped_llamacpp_engine_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_REAL_ENGINE", "1")
    with silent_after_2_s(6.0) as served:
        said: list[str] = []
        client = served.client(said.append)
        params = SamplingParams(ignore_eos=True, max_tokens=1500, temperature=0.0)
        answer = client.chat("tiny", [Message("user", "Tell a story.")], params)
        assert isinstance(next(answer), TextDelta)
        os.kill(client.running_models()[0].pid, signal.SIGSTOP)
        with pytest.raises(EngineDied, match="hang timeout 6 s"):
            list(answer)
        assert said[0].startswith("no answer of the engine for ")
        params = SamplingParams(max_tokens=3)
        *_, end = client.chat("tiny", [Message("user", "Hi")], params)
        assert isinstance(end, Completion)


def test_run_says_on_a_pipe_that_an_engine_is_silent() -> None:
    with silent_after_2_s(6.0) as served:
        model = served.model("victim", token_s=0.02)
        running = run_on_pipes(served, model)
        assert running.stdout is not None
        assert running.stdout.read(3) == "0 1"
        os.kill(served.stats(model)["pid"], signal.SIGSTOP)
        _, err = running.communicate(timeout=LONG_S)
        note, first, *_, last = err.splitlines()
        assert note == "a fake", "a note of the model that it loaded"
        assert re.fullmatch(r"no answer of the engine for \d+ s; Ctrl\+C stops", first)
        assert last.startswith("localgen: ")
        assert "hang timeout 6 s" in last


def test_ps_says_which_engine_does_not_answer(served: ServerHarness) -> None:
    model = served.model("victim")
    served.chat(model, "a")
    os.kill(served.stats(model)["pid"], signal.SIGSTOP)
    wait_until(lambda: served.stats(model)["silent_s"], LONG_S)
    shown = ps(served)
    assert "victim" in shown.stdout
    assert shown.stderr.startswith("no answer of the engine of victim for ")
    assert "localgen stop victim ends it" in shown.stderr
    assert served.client().unload("victim") is True
