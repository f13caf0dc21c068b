"""A client of the user's own cluster, whose gateway ends and is started anew."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from plain_openai import PlainServer, answer, plain_server

from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.client import Client, TextDelta
from localgen.client.connection import EndpointConnection
from localgen.client.endpoints import Endpoint, resolve_endpoint
from localgen.client.errors import EndpointUnavailable
from localgen.cluster.running import RunningCluster, hold_lock
from localgen.config import ServerSettings

LONG_S = 30.0


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNTIME", "STATE", "CONFIG"):
        monkeypatch.setenv(f"LOCALGEN_{name}_DIR", str(tmp_path / name.lower()))


@contextmanager
def owned(server: PlainServer) -> Iterator[Endpoint]:
    """The endpoint of a cluster with this server as its gateway, as its owner describes it."""
    settings = ServerSettings.from_environment()
    settings.create_dirs()
    running = RunningCluster(1, server.url.removesuffix("/v1"), "big", None)
    (settings.runtime_dir / "cluster.json").write_text(json.dumps(asdict(running)))
    with hold_lock(settings):
        yield resolve_endpoint("cluster")


class Asking:
    """A client, the pieces of its answers, and what it has said."""

    def __init__(self, endpoint: Endpoint, wait_s: float) -> None:
        self.pieces: list[str] = []
        self.said: list[str] = []
        connection = EndpointConnection(endpoint, self.said.append, restart_wait_s=wait_s)
        self.client = Client(connection)

    def ask(self) -> None:
        for event in self.client.chat("big", [Message("user", "Hi")], SamplingParams()):
            if isinstance(event, TextDelta):
                self.pieces.append(event.text)

    def failure(self) -> str:
        with closing(self.client), pytest.raises(EndpointUnavailable) as raised:
            self.ask()
        return raised.value.message


def test_a_gateway_that_ends_in_an_answer_is_named_in_one_line() -> None:
    with plain_server() as server, owned(server) as cluster:
        server.events, server.cut = answer("one ")[:2], True
        asking = Asking(cluster, LONG_S)
        said = asking.failure()
    assert said == (
        f"the gateway of cluster ({server.url}) ended while answering and starts anew: try again"
    )
    assert asking.pieces == ["one "]


def test_the_next_request_waits_for_the_gateway() -> None:
    with plain_server() as server, owned(server) as cluster:
        port = int(server.url.split(":")[2].split("/")[0])
        server.close()
        asking = Asking(cluster, LONG_S)
        with closing(asking.client):
            asked = threading.Thread(target=asking.ask)
            asked.start()
            while not asking.said:
                asked.join(0.01)
            with plain_server(port=port):
                asked.join(LONG_S)
    assert "".join(asking.pieces) == "re: Hi "
    assert asking.said == [f"cluster ({server.url}) starts anew: waiting up to 30 s; Ctrl+C stops"]


def test_who_does_not_wait_is_told_that_the_gateway_starts_anew() -> None:
    with plain_server() as server, owned(server) as cluster:
        server.close()
        asking = Asking(cluster, 0.0)
        assert "does not listen, as its gateway starts anew: try again" in asking.failure()
        assert asking.said == []


def test_a_cluster_that_has_ended_is_not_waited_for() -> None:
    with plain_server() as server:
        with owned(server) as cluster:
            pass
        server.close()
        asking = Asking(cluster, LONG_S)
        said = f"cluster ({server.url}) has ended: `localgen cluster up` starts it"
        assert asking.failure() == said
        assert asking.said == []
