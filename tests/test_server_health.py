"""/health says whether the server takes requests, /livez whether it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from serving import ServerHarness, chat_body, in_thread, server_harness, wait_until
from tcp_server import KEY, TcpServer, free_port, tcp_server

from localgen.client import LocalClient
from localgen.machine.python_process import python_environment

NOT_READY = 503


@pytest.fixture
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        yield built


def begin(
    served: ServerHarness, model: str, monkeypatch: pytest.MonkeyPatch
) -> subprocess.Popen[bytes]:
    """A server that loads a model at start, returned as soon as it answers."""
    monkeypatch.setenv("TEST_MODEL", model)
    monkeypatch.setattr(ServerHarness, "healthy", lambda _: answers(served))
    return served.start()


def answers(served: ServerHarness) -> bool:
    try:
        return served.http.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


def test_not_ready_while_its_first_model_loads(
    served: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(served, served.model("first", load_s=2), monkeypatch)
    reply = served.http.get("/health")
    assert (reply.status_code, reply.json()["status"]) == (NOT_READY, "loading")
    assert int(reply.headers["retry-after"]) >= 1
    assert served.http.get("/livez").json() == {"status": "alive"}
    wait_until(lambda: served.http.get("/health").status_code == 200)
    assert served.loaded() == ["first"]


def test_our_clients_find_a_server_that_loads(
    served: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = begin(served, served.model("first", load_s=2), monkeypatch)
    client = served.client()
    client.connect()
    found = client.health()
    assert found is not None
    assert (found.pid, found.status) == (process.pid, "loading")
    # it says so before its engine is started
    wait_until(lambda: [running.name for running in client.running_models()] == ["first"])
    # and use it
    assert served.chat(served.model("other"), "a b").status_code == 200


def test_other_models_that_load_make_nobody_wait(served: ServerHarness) -> None:
    served.start()
    reply = served.http.get("/health")
    assert reply.status_code == 200
    assert reply.json()["status"] == "ok"
    assert reply.json()["pid"] == served.processes[0].pid
    slow = served.model("slow", load_s=1)
    thread = in_thread(lambda: served.chat(slow, "a"))
    wait_until(lambda: "slow" in served.loaded())
    assert served.http.get("/health").status_code == 200
    thread.join(timeout=10)


def test_a_first_model_that_cannot_be_loaded_ends_the_server(
    served: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_MODEL", served.model("bad", fail="the file is damaged"))
    monkeypatch.setattr(ServerHarness, "healthy", lambda _: False)
    process = served.start()
    assert process.wait(timeout=10) == 1
    assert process.stderr is not None
    assert process.stderr.read().decode() == "error: the file is damaged\n"
    assert not served.settings.socket_path.exists()


def test_stop_while_the_first_model_loads(
    served: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = begin(served, served.model("first", load_s=60), monkeypatch)
    process.terminate()
    assert process.wait(timeout=5) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_health_while_stopping(served: ServerHarness) -> None:
    port = free_port()
    process = served.start(port=port)
    model = served.model(token_s=0.02)
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http,
        served.http.stream(
            "POST", "/v1/chat/completions", json=chat_body(model, "word " * 100, stream=True)
        ) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        process.terminate()
        wait_until(lambda: http.get("/health").status_code == NOT_READY)
        told = http.get("/health")
        assert told.json() == {"status": "stopping"}
        assert int(told.headers["retry-after"]) >= 1
        assert http.get("/livez").status_code == 200
        # the running answer is finished nevertheless
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(timeout=5) == 0


def test_our_clients_leave_one_that_stops_alone(served: ServerHarness) -> None:
    process = served.start()
    events = served.events(served.model(token_s=0.02), "word " * 100)
    next(events)
    with LocalClient(served.settings) as client:
        client.connect()  # the connection stays open when the socket is gone
        process.terminate()
        wait_until(lambda: client.health() is None)
    assert list(events)[-1] == "[DONE]"


def test_health_without_a_key_has_no_details() -> None:
    with tcp_server(keys=[KEY]) as opened:
        for path in ("/health", "/livez"):
            assert list(opened.http.get(path).json()) == ["status"], path


def test_shutdown_is_accepted_on_the_socket_only() -> None:
    with tcp_server() as opened:
        assert_refused(opened)
        assert opened.harness.http.post("/v1/shutdown").status_code == 200


def assert_refused(opened: TcpServer) -> None:
    reply = opened.http.post("/v1/shutdown")
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "forbidden"
    assert opened.chat().status_code == 200


def test_serve_with_a_model_that_is_not_there(served: ServerHarness) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "localgen.cli.main", "serve", "./nothing.gguf"],
        env=python_environment() | served.settings.to_environment() | {"HOME": os.devnull},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 6
    assert done.stderr.splitlines()[-1].startswith("localgen: there is no file /")
    assert "Traceback" not in done.stderr
