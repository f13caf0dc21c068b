"""Watching servers: the own one on its socket, others at a URL, and URLs that are not servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from serving import MANY_WORDS, ServerHarness, in_thread, server_harness, wait_until
from test_client_prometheus import LLAMA

from localgen.backends.errors import InvalidRequest, LocalgenError, ServerUnavailable
from localgen.client.endpoints import Endpoint
from localgen.client.errors import EndpointUnavailable
from localgen.client.server_monitor import LocalServerMonitor, RemoteServerMonitor
from localgen.client.snapshot import parse_localgen_stats
from localgen.config import BadSetting
from localgen.hub.hf_client import AccessDenied


@contextmanager
def pages(**paths: tuple[int, str, str]) -> Iterator[str]:
    """Serve these pages, (status, type, text) by path with / as _; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/").replace("/", "_")
            status, kind, text = paths.get(name, (404, "text/plain", "no"))
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        built.start()
        yield built


def test_own_server_is_watched_on_its_socket(served: ServerHarness) -> None:
    model = served.model(token_s=0.02)
    answer = in_thread(lambda: served.chat(model, MANY_WORDS))
    wait_until(lambda: "echo" in served.loaded())
    watch = LocalServerMonitor(served.settings)
    seen = watch.snapshots()
    found = next(each for each in seen if each.models and each.models[0].running)
    assert found.server_type == "localgen"
    assert found.models[0].name == "echo"
    assert found.models[0].state == "loaded"
    # measured in a thread, so not in the first snapshot
    machine = next(each.machine for each in seen if each.machine is not None)
    assert machine.ram_bytes is not None
    assert machine.ram_free_bytes is not None
    assert 0 < machine.ram_free_bytes < machine.ram_bytes
    watch.close()
    served.http.post("/v1/models/unload", json={"model": model})
    answer.join(10)


def test_watching_starts_no_server_and_says_so() -> None:
    with server_harness() as built:
        watch = LocalServerMonitor(built.settings)
        with pytest.raises(ServerUnavailable, match="no server answers"):
            next(watch.snapshots())
        with pytest.raises(ServerUnavailable, match="no server answers"):
            watch.cancel("x")
        assert not built.healthy()


def test_watching_loads_nothing(served: ServerHarness) -> None:
    before = served.loaded()
    next(LocalServerMonitor(served.settings).snapshots())
    assert served.loaded() == before


def remote(url: str, **fields: Any) -> RemoteServerMonitor:
    return RemoteServerMonitor(Endpoint(url, **fields), sleep=lambda _s: None)


def test_llama_server_is_watched_by_its_metrics() -> None:
    with pages(metrics=(200, "text/plain; version=0.0.4", LLAMA)) as url:
        seen = remote(url).snapshots()
        assert next(seen).server_type == "llama-server"
        found = next(seen).models[0]
        assert (found.name, found.running) == ("llama-server", 3)


def test_the_model_of_llama_server_has_the_name_in_its_list() -> None:
    listed = json.dumps({"object": "list", "data": [{"id": "qwen3-4b", "object": "model"}]})
    metrics = (200, "text/plain; version=0.0.4", LLAMA)
    with pages(metrics=metrics, v1_models=(200, "application/json", listed)) as url:
        assert [each.name for each in next(remote(url).snapshots()).models] == ["qwen3-4b"]


def test_remote_localgen_is_watched_by_its_stats() -> None:
    told = {"server": {"status": "ok", "version": "9.9"}, "models": [], "new": 1}
    with pages(v1_stats=(200, "application/json", json.dumps(told))) as url:
        seen = remote(url).snapshots()
        assert next(seen).version == "9.9"
        assert next(seen).models == ()


@pytest.mark.parametrize(
    ("found", "kind", "says"),
    [
        ({}, InvalidRequest, "has no /metrics: llama-server needs --metrics"),
        ({"metrics": (200, "text/html", "<h1>hi</h1>")}, EndpointUnavailable, "web page"),
        ({"metrics": (200, "text/plain", "nonsense 1")}, ServerUnavailable, "no metrics of vLLM"),
        ({"metrics": (500, "text/plain", "broken")}, LocalgenError, "500"),
        ({"v1_stats": (401, "application/json", "{}")}, AccessDenied, "key"),
        ({"v1_stats": (200, "application/json", "[1]")}, InvalidRequest, "no /metrics"),
        (
            {"v1_stats": (200, "application/json", '{"server": {"version": 3}, "models": 1}')},
            ServerUnavailable,
            "cannot read the statistics of localgen 3",
        ),
    ],
)
def test_urls_that_cannot_be_watched_are_rejected(
    found: dict[str, tuple[int, str, str]], kind: type[LocalgenError], says: str
) -> None:
    with pages(**found) as url, pytest.raises(kind, match=says):
        next(remote(url).snapshots())


def test_unreachable_url_is_an_error() -> None:
    with pages() as url:
        pass
    with pytest.raises(EndpointUnavailable, match=r"127\.0\.0\.1"):
        next(remote(url).snapshots())


def test_unset_key_variable_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(BadSetting, match="NO_SUCH_KEY is not set"):
        remote("http://localhost:1/v1", key_env="NO_SUCH_KEY")


def test_cancel_needs_a_localgen_server_and_a_valid_id() -> None:
    told = (200, "application/json", '{"cancelled": true}')
    with pages(v1_requests_abc_cancel=told) as url:
        assert remote(url).cancel("abc") is True
        with pytest.raises(InvalidRequest, match="cannot cancel"):
            remote(url).cancel("a/../b")


def test_fields_that_an_older_server_lacks_are_unknown() -> None:
    told = {
        "server": {"status": "ok", "version": "0.0.9", "memory_available": 5_000},
        "models": [{"name": "tiny", "stats": {"running": 2, "kv_tokens": 0}}],
    }
    found = parse_localgen_stats(told)
    assert found.machine is not None
    assert (found.machine.ram_free_bytes, found.machine.cpu) == (5_000, None)
    assert (found.finished_requests, found.rss_bytes) == (None, None)
    (model,) = found.models
    assert (model.running, model.kv_usage, model.read_cost) == (2, None, None)
    assert model.ttft.last_ms is None, "0 means that there was none"
