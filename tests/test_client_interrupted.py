"""Another thread aborts a client's call."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from plain_openai import PlainServer, Response, plain_server
from serving import MANY_WORDS, ServerHarness, server_harness, wait_until

from localgen.backends.errors import LocalgenError, ServerUnavailable
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.client import Client, LocalClient
from localgen.client.connection import EndpointConnection
from localgen.client.endpoints import Endpoint
from localgen.client.launch import start_lock

ASKED = [Message("user", MANY_WORDS)]


@pytest.fixture
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        yield built


@pytest.fixture
def server() -> Iterator[PlainServer]:
    with plain_server() as running:
        yield running


def cut_during(client: Client, call: Callable[[], object], when: Callable[[], object]) -> None:
    """Abort the client once `when` holds during the call, which must end with an error."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(when)
    client.abort()
    thread.join(timeout=5)
    assert not thread.is_alive()
    (error,) = failures
    assert isinstance(error, LocalgenError), error


def test_abort_during_an_answer(served: ServerHarness) -> None:
    client = served.client()
    client.connect()
    model = served.model(token_s=0.05)
    events = client.chat(model, ASKED, SamplingParams())
    next(events)
    cut_during(client, lambda: list(events), lambda: True)
    watching = served.client()
    wait_until(lambda: watching.running_models()[0].active_requests == 0, timeout_s=2)
    # an aborted client sends nothing more
    with pytest.raises(ServerUnavailable):
        list(client.chat(model, ASKED, SamplingParams()))
    assert watching.running_models()[0].active_requests == 0


def test_abort_while_a_model_loads(served: ServerHarness) -> None:
    client = served.client()
    client.connect()
    model = served.model(load_s=30.0)
    progress: list[float] = []
    cut_during(
        client,
        lambda: client.load(model, LoadOptions(), progress.append),
        lambda: bool(progress),
    )


def test_abort_while_a_server_starts_leaves_the_server_running(served: ServerHarness) -> None:
    pid = served.folder / "pid"
    code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    client = LocalClient(served.settings, server_command=[sys.executable, "-c", code])
    cut_during(client, client.connect, lambda: pid.exists() and pid.read_text())
    started = int(pid.read_text())
    os.kill(started, 0)  # raises if it is gone
    os.kill(started, signal.SIGKILL)


def test_server_serves_the_next_client_after_an_abort(served: ServerHarness) -> None:
    said: list[str] = []
    cut, following = served.client(said.append), served.client(said.append)
    cut_during(cut, cut.connect, lambda: said)
    following.connect()
    assert following.health() is not None


def test_abort_while_another_client_starts_the_server(served: ServerHarness) -> None:
    with start_lock(served.settings, lambda: False):
        client, before = served.client(), time.monotonic()
        cut_during(client, client.connect, lambda: time.monotonic() - before > 0.1)


def test_abort_remote_request_before_its_first_token(server: PlainServer) -> None:
    client = Client(EndpointConnection(Endpoint(server.url)))
    client.load("big", LoadOptions())
    server.gap_s = 30.0
    events = client.chat("big", ASKED, SamplingParams())
    cut_during(client, lambda: list(events), lambda: bool(server.asked))


def test_abort_while_a_remote_server_asks_to_wait(server: PlainServer) -> None:
    server.first = [Response(429, b"{}", headers={"Retry-After": "30"})]
    said: list[str] = []
    client = Client(EndpointConnection(Endpoint(server.url), said.append))
    events = client.chat("big", ASKED, SamplingParams())
    started_s = time.monotonic()
    cut_during(client, lambda: list(events), lambda: bool(said))
    assert time.monotonic() - started_s < 20
    assert len(server.asked) <= 2
