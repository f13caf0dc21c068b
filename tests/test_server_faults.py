"""Engine processes that die, models that are loaded and evicted, servers that end."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
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

from localgen.placement.footprint import estimate_footprint

# minimum memory of a model, however small its file
LEAST = estimate_footprint(0, None).need_bytes()


@pytest.fixture
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        yield built


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerHarness]:
    with server_harness() as built:
        yield built


@pytest.fixture
def running(shared: ServerHarness) -> Iterator[ServerHarness]:
    """A server that other tests have used, without models."""
    yield from running_alone(shared)


def collect(served: ServerHarness, model: str, into: list[Any], text: str = MANY_WORDS) -> None:
    into.extend(served.events(model, text))


def test_a_killed_engine_ends_its_streams_and_no_others(running: ServerHarness) -> None:
    model, other = running.model("victim", token_s=0.02), running.model("other", token_s=0.02)
    running.chat(model, "hello")  # from here on it is loaded
    streams: list[list[Any]] = [[], [], []]
    threads = [in_thread(partial(collect, running, model, got)) for got in streams]
    bystander = running.events(other, "a b c " * 30)
    next(bystander)
    wait_until(lambda: running.stats(model)["active_requests"] == 3)
    time.sleep(0.2)
    killed_s = time.monotonic()
    os.kill(running.stats(model)["pid"], signal.SIGKILL)
    for thread in threads:
        thread.join(timeout=5)
    assert time.monotonic() - killed_s < 1.0
    for got in streams:
        assert got[-1]["error"]["code"] == "engine_died"
        assert "SIGKILL" in got[-1]["error"]["message"]
    assert running.chat(model, "a b").json()["choices"][0]["message"]["content"] == "a b"
    assert list(bystander)[-1] == "[DONE]"


def test_engine_crash_is_an_error_and_is_replaced(running: ServerHarness) -> None:
    model = running.model(token_s=0.01)
    assert running.chat(model, "!die").status_code == 502
    *_, last = running.events(model, "a b !die")
    assert last["error"]["code"] == "engine_died"
    assert "status 9" in last["error"]["message"]
    reply = running.chat(model, "a b !die")
    assert reply.status_code == 502
    assert running.chat(model, "a b").status_code == 200


def test_engine_killed_while_loading_is_an_error(running: ServerHarness) -> None:
    model = running.model(load_s=5)
    replies: list[Any] = []
    thread = in_thread(lambda: replies.append(running.chat(model)))
    wait_until(lambda: running.loads(model) == 1)
    os.kill(running.stats(model)["pid"], signal.SIGKILL)
    thread.join(timeout=5)
    assert replies[0].status_code == 500
    assert replies[0].json()["error"]["code"] == "load_failed"
    assert running.loaded() == []


def test_code_that_crashes_on_this_processor_gets_a_second_try(running: ServerHarness) -> None:
    model = running.model("repacked", crash_repacked=True)
    repacked = {"model": model, "options": {"repack": True}}
    assert running.chat(model, "a b").json()["choices"][0]["message"]["content"] == "a b"
    assert running.loads(model) == 2
    notes = running.stats(model)["info"]["notes"]
    assert any("crashes with weights repacked" in note for note in notes)
    reply = running.http.post("/v1/models/load", json=repacked)
    assert reply.json()["error"]["code"] == "model_busy"
    running.http.post("/v1/models/unload", json={"model": model})
    reply = running.http.post("/v1/models/load", json=repacked)
    assert reply.json()["error"]["code"] == "load_failed"
    assert "SIGILL" in reply.json()["error"]["message"]


def test_unload_ends_streams_and_the_engine(running: ServerHarness) -> None:
    model = running.model(token_s=0.02)
    got: list[Any] = []
    thread = in_thread(lambda: collect(running, model, got))
    wait_until(lambda: len(got) > 3)
    pid = running.stats(model)["pid"]
    assert running.http.post("/v1/models/unload", json={"model": "echo"}).json()["unloaded"] is True
    thread.join(timeout=5)
    assert "localgen stop" in got[-1]["error"]["message"]
    assert not psutil.pid_exists(pid)
    again = running.http.post("/v1/models/unload", json={"model": "echo"})
    assert again.json()["unloaded"] is False


def test_least_recently_used_model_is_evicted(served: ServerHarness) -> None:
    served.settings = type(served.settings)(
        runtime_dir=served.settings.runtime_dir,
        state_dir=served.settings.state_dir,
        memory_limit=LEAST * 2 + 10_000_000,
    )
    served.start()
    kv = {"kv_bytes": LEAST}
    a, b, c = (served.model(name, token_s=0.02, **kv) for name in "abc")
    for model in (a, b, a):
        served.chat(model, "x")
    served.chat(c, "x")
    assert served.loaded() == ["a", "c"], "b was used least recently"
    events = served.events(a, MANY_WORDS)
    next(events)
    served.chat(b, "x")
    assert served.loaded() == ["a", "b"], "a is in use"
    others = served.events(b, MANY_WORDS)
    next(others)
    body = {"model": c, "stream": True}
    with served.http.stream("POST", "/v1/models/load", json=body) as reply:
        lines = reply.iter_lines()
        waiting = json.loads(next(lines).removeprefix("data: "))["waiting"]
        assert waiting == "c needs about 67.1 MB, 10.0 MB is available; in use: a, b"
        assert served.loaded() == ["a", "b"]
        assert served.http.get("/v1/stats").json()["server"]["waiting_for_memory"] == {"c": 1}
        events.close()
        assert any('"model"' in line for line in lines)
    assert served.loaded() == ["b", "c"]
    others.close()
    huge = served.folder / "huge.gguf"
    with open(huge, "wb") as file:
        file.truncate(1 << 30)
    refused = served.chat(str(huge), "x")
    assert refused.status_code == 507
    assert "huge needs about 1.3 GB, 144 MB is available" in refused.json()["error"]["message"]
    assert served.loaded() == ["b", "c"], "nothing was unloaded for what cannot fit"


def test_idle_models_are_unloaded() -> None:
    with server_harness(keep_alive_s=0.0) as served:
        served.start()
        model = served.model()
        served.chat(model, "a")

        def is_unloaded() -> bool:
            try:
                return served.loaded() == []
            except httpx.TransportError:
                return True  # the server has ended, and its engines with it

        wait_until(is_unloaded)


def test_the_server_leaves_when_idle() -> None:
    with server_harness(keep_alive_s=1.0) as served:
        process = served.start()
        model = served.model(token_s=0.05)
        assert len(list(served.events(model, "word " * 50))) > 50, "2.5 s of work keep it"
        assert process.wait(timeout=5) == 0
        assert not served.settings.socket_path.exists()


def test_socket_and_folders_are_private(running: ServerHarness) -> None:
    assert stat.S_IMODE(running.settings.socket_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(running.settings.runtime_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(running.settings.server_lock_path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect(running: ServerHarness) -> None:
    code = (
        "import os,socket,sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
        "except PermissionError: sys.exit(7)"
    )
    command = [sys.executable, "-c", code, str(running.settings.socket_path)]
    assert subprocess.run(command, check=False).returncode == 7


def test_a_stale_socket_is_replaced(served: ServerHarness) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(served.settings.socket_path))
    assert not served.healthy()
    served.start()
    assert served.healthy()


def test_a_second_server_gives_way(served: ServerHarness) -> None:
    first = served.start()
    second = served.start()
    assert second.wait(timeout=60) == 1
    assert second.stderr is not None
    said = second.stderr.read().decode().strip()
    assert said == (
        f"error: A server is already running (pid {first.pid}); stop it with `localgen stop`"
    )
    assert served.pid() == first.pid


def test_sigterm_lets_answers_end(served: ServerHarness) -> None:
    process = served.start()
    model = served.model(token_s=0.02)
    got: list[Any] = []
    thread = in_thread(lambda: collect(served, model, got, "word " * 60))
    wait_until(lambda: len(got) > 3)
    engine = served.stats(model)["pid"]
    process.terminate()
    thread.join(timeout=5)
    assert got[-1] == "[DONE]"
    assert process.wait(timeout=5) == 0
    log = served.settings.log_path.read_text()
    assert "shutting down: waiting up to 5 s for 1 request" in log
    assert not psutil.pid_exists(engine)
    assert not served.settings.socket_path.exists()


def test_sigterm_tells_those_that_take_too_long(served: ServerHarness) -> None:
    process = served.start()
    got: list[Any] = []
    model = served.model(token_s=0.05)
    thread = in_thread(lambda: collect(served, model, got))
    wait_until(lambda: len(got) > 3)
    process.terminate()
    thread.join(timeout=10)
    assert got[-1]["error"]["code"] == "server_unavailable"
    assert process.wait(timeout=5) == 0


def test_statistics_are_streamed_until_the_server_exits(served: ServerHarness) -> None:
    process = served.start()
    model = served.model(token_s=0.05)
    stream = served.events(model)
    next(stream)
    with ServerHarness(served.folder).http as http:
        http.get("/health")  # new connections go to the next server
        process.terminate()
        wait_until(lambda: http.get("/health").status_code == 503)
        reply = http.get("/v1/stats?stream=true")
    assert reply.status_code == 200
    assert '"status":"stopping"' in reply.text
    stream.close()


def test_a_killed_server_takes_its_engines_along(served: ServerHarness) -> None:
    process = served.start()
    model = served.model()
    served.chat(model, "a")
    engine = served.stats(model)["pid"]
    process.kill()
    process.wait()
    wait_until(lambda: not psutil.pid_exists(engine) or _zombie(engine), timeout_s=2)
    served.start()
    assert served.chat(model, "a").status_code == 200


def _zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_what_engines_print_is_in_the_log(running: ServerHarness) -> None:
    model = running.model("chatty")
    running.chat(model, "a")
    wait_until(
        lambda: f"chatty: fake engine loads {model}" in running.settings.log_path.read_text()
    )


def test_memory_of_the_server_stays_flat(served: ServerHarness) -> None:
    process = served.start()
    model = served.model()
    for _ in range(50):
        served.chat(model, "a b c")
    before = psutil.Process(process.pid).memory_info().rss
    for number in range(400):
        events = served.events(model, "a b c d e f")
        for _ in range(number % 5):
            next(events)
        events.close()
    wait_until(lambda: served.stats(model)["active_requests"] == 0)
    assert psutil.Process(process.pid).memory_info().rss - before < 4_000_000
    assert before < 80_000_000
