"""The client with real servers: starting, sharing and losing them."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import (
    MANY_WORDS,
    ServerHarness,
    in_thread,
    running_alone,
    server_harness,
    settings_in,
    short_folder,
    wait_until,
)

from localgen.backends.errors import (
    ContextExceeded,
    InvalidRequest,
    LoadFailed,
    ModelBusy,
    ModelNotFound,
    ServerUnavailable,
)
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message, RestoredTokens
from localgen.client import Completion, LocalClient, TextDelta
from localgen.client.launch import is_being_started, launch_early
from localgen.config import BadSetting


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


def ask(text: str) -> list[Message]:
    return [Message("user", text)]


def text_of(events: Iterator[TextDelta | Completion]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def test_the_first_client_starts_a_server(served: ServerHarness) -> None:
    said: list[str] = []
    client = served.client(said.append)
    assert client.health() is None
    assert client.running_models() == []
    assert client.unload("tiny") is False
    assert client.shutdown() is False
    with pytest.raises(ServerUnavailable, match="no server answers"):
        client.stats()
    client.connect()
    assert said == ["starting the server"]
    health = client.health()
    assert health is not None
    assert health.pid != os.getpid()
    served.client(said.append).connect()
    assert len(said) == 1
    assert client.shutdown() is True
    assert client.health() is None


def test_tokens_from_other_tiers_reach_the_client(running: ServerHarness) -> None:
    restored = (
        RestoredTokens("ram", 512, ms=8.5, saved_ms=700.0),
        RestoredTokens("disk", 4096, ms=210.0, saved_ms=54_000.0),
    )
    script = {"restored": [astuple(each) for each in restored]}
    client = running.client()
    *_, streamed = client.chat(
        running.model("kept", **script), ask("hello my world"), SamplingParams()
    )
    assert isinstance(streamed, Completion)
    assert streamed.timings.restored == restored
    *_, computed = client.chat(running.model(), ask("hello my world"), SamplingParams())
    assert isinstance(computed, Completion)
    assert computed.timings.restored == ()


def test_racing_clients_start_one_server(served: ServerHarness) -> None:
    said: list[str] = []
    pids: list[int] = []

    def first() -> None:
        client = served.client(said.append)
        client.connect()
        health = client.health()
        assert health is not None
        pids.append(health.pid)

    threads = [in_thread(first) for _ in range(6)]
    for thread in threads:
        thread.join(timeout=20)
    assert len(pids) == 6
    assert len(set(pids)) == 1
    assert said == ["starting the server"]


def test_chat_streams_text_and_ends_with_a_completion(running: ServerHarness) -> None:
    client = running.client()
    client.connect()
    params = SamplingParams(temperature=0.0, stop=("x",), seed=5, logit_bias={7: 1.0})
    *texts, answer = client.chat(running.model(), ask("hello my world"), params, ctx=99)
    words = enumerate(("hello", " my", " world"), 1)
    assert texts == [TextDelta(word, count, prompt_tokens=5) for count, word in words]
    assert isinstance(answer, Completion)
    assert answer.model == "echo"
    assert answer.finish_reason == "stop"
    assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (5, 2, 3)
    assert (answer.ctx, answer.seed, answer.stop) == (99, 5, "</s>")
    assert answer.timings.prompt_n == 3
    assert answer.timings.ttft_ms > 0
    assert '"temperature": 0.0' in answer.notes[1]
    assert '"logit_bias": {"7": 1.0}' in answer.notes[1]
    assert '"top_k": null' in answer.notes[1]


def test_completion_streams_text_and_ends(running: ServerHarness) -> None:
    client = running.client()
    client.connect()
    params = SamplingParams(max_tokens=2, logprobs=1)
    events = list(client.complete(running.model(), "a b c", params))
    assert text_of(iter(events)) == "a b"
    answer = events[-1]
    assert isinstance(answer, Completion)
    assert answer.finish_reason == "length"


def test_unusual_line_breaks_are_kept(running: ServerHarness) -> None:
    client = running.client()
    client.connect()
    text = "a\u2028b\x85c\x1cd\n\ne\r\nf"
    assert text_of(client.chat(running.model(), ask(text), SamplingParams())) == text


def test_load_reports_progress_and_model(running: ServerHarness) -> None:
    client = running.client()
    client.connect()
    shares: list[float] = []
    model = running.model(load_s=0.5)
    info = client.load(model, LoadOptions(ctx=512), shares.append)
    assert shares
    assert shares == sorted(shares)
    assert info.name == "echo"
    assert info.options.ctx == 512
    assert info.sampling.logit_bias == {7: 1.5}
    assert client.load(model, LoadOptions(), shares.append) == info
    (loaded,) = client.running_models()
    assert (loaded.name, loaded.processor, loaded.ctx) == ("echo", "100% CPU", 512)
    assert loaded.until_s is not None
    resident_bytes = psutil.Process(loaded.pid).memory_info().rss
    assert loaded.memory_bytes == pytest.approx(resident_bytes, rel=0.2)
    with pytest.raises(ModelBusy, match="without --threads 9: "):
        client.load(model, LoadOptions(threads=9), shares.append)
    assert "echo" in [card.name for card in client.models()]
    assert client.unload("echo") is True
    assert client.running_models() == []


def test_server_errors_are_raised_as_their_classes(running: ServerHarness) -> None:
    client = running.client()
    client.connect()
    with pytest.raises(ContextExceeded, match="1001"):
        list(client.chat(running.model(), ask("w " * 1001), SamplingParams()))
    with pytest.raises(InvalidRequest) as refused:
        list(client.chat(running.model(), ask("w"), SamplingParams(max_tokens=0)))
    assert refused.value.param == "max_tokens"
    with pytest.raises(LoadFailed, match="no good"):
        client.load(running.model("bad", fail="no good", load_s=0.3), LoadOptions())


def test_closing_a_stream_cancels_the_request(running: ServerHarness) -> None:
    client = running.client()
    client.connect()
    model = running.model(token_s=0.02)
    answer = client.chat(model, ask(MANY_WORDS), SamplingParams())
    next(answer)
    assert client.running_models()[0].active_requests == 1
    answer.close()
    wait_until(lambda: client.running_models()[0].active_requests == 0, timeout_s=1)
    assert text_of(client.chat(model, ask("still here"), SamplingParams())) == "still here"


def test_server_killed_during_an_answer_is_an_error(served: ServerHarness) -> None:
    said: list[str] = []
    client = served.client(said.append)
    client.connect()
    model = served.model(token_s=0.02)
    answer = client.chat(model, ask(MANY_WORDS), SamplingParams())
    next(answer)
    os.kill(served.pid(), signal.SIGKILL)
    with pytest.raises(ServerUnavailable, match=r"server\.log"):
        list(answer)
    client.connect()
    assert text_of(client.chat(model, ask("a b"), SamplingParams())) == "a b"
    assert said == ["starting the server"] * 2


def test_exited_server_is_restarted(served: ServerHarness) -> None:
    said: list[str] = []
    client = served.client(said.append)
    client.connect()
    served.client().shutdown()
    assert text_of(client.chat(served.model(), ask("a b"), SamplingParams())) == "a b"
    assert len(said) == 2


@pytest.mark.parametrize("how", ["shutting down", "closes"])
def test_exiting_server_is_replaced(served: ServerHarness, how: str) -> None:
    """An exiting server still accepts connections, then rejects or closes them."""
    path = served.settings.socket_path
    body = json.dumps(
        {"error": {"code": "server_unavailable", "message": "the server leaves", "param": None}}
    )
    head = f"HTTP/1.1 503 Unavailable\r\ncontent-length: {len(body)}\r\n\r\n"

    def leave(sock: socket.socket) -> None:
        connection, _ = sock.accept()
        with sock, connection:
            connection.recv(65536)
            path.unlink()
            if how == "shutting down":
                connection.sendall((head + body).encode())
                connection.recv(1)  # until the client has given this connection up

    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()
        leaving = in_thread(lambda: leave(sock))
        client = served.client()
        assert text_of(client.chat(served.model(), ask("a b"), SamplingParams())) == "a b"
        leaving.join(timeout=5)
        assert not leaving.is_alive()


@pytest.mark.parametrize(
    ("prompt", "params"),
    [("\udcff", SamplingParams()), ("a", SamplingParams(temperature=math.nan))],
)
def test_values_that_json_cannot_hold_are_rejected(
    served: ServerHarness, prompt: str, params: SamplingParams
) -> None:
    with pytest.raises(InvalidRequest, match=r"not UTF-8|not finite"):
        list(served.client().chat(served.model(), ask(prompt), params))


def test_keep_alive_is_set_by_load(running: ServerHarness) -> None:
    client = running.client()
    client.connect()
    client.load(running.model(), LoadOptions(), keep_alive="-1")
    assert client.running_models()[0].until_s is None
    client.load(running.model(), LoadOptions(), keep_alive="1h")
    assert (client.running_models()[0].until_s or 0) > 3500


def test_the_stats_stream_ends_with_the_server(served: ServerHarness) -> None:
    client = served.client()
    client.connect()
    stream = client.stream_stats()
    assert next(stream)["server"]["active_requests"] == 0
    started_s = time.monotonic()
    assert served.client().shutdown() is True
    assert time.monotonic() - started_s < 3, "watching does not keep a server"
    list(stream)


def test_an_idle_older_server_is_replaced(served: ServerHarness) -> None:
    served.start("0.0.9")
    said: list[str] = []
    client = served.client(said.append)
    before = served.pid()
    client.connect()
    assert served.pid() != before
    assert said[0].startswith("the running server is 0.0.9, this is localgen ")
    assert said[0].endswith("restarting it")


def test_a_busy_older_server_stays(served: ServerHarness) -> None:
    served.start("0.0.9")
    before = served.pid()
    events = served.events(served.model(token_s=0.02), MANY_WORDS)
    next(events)
    said: list[str] = []
    served.client(said.append).connect()
    assert served.pid() == before
    assert "0.0.9, busy with 1 requests" in said[0]
    events.close()


def test_another_protocol_is_refused_while_busy(served: ServerHarness) -> None:
    served.start("99.0", "2")
    events = served.events(served.model(token_s=0.02), MANY_WORDS)
    next(events)
    with pytest.raises(ServerUnavailable, match="does not speak its protocol"):
        served.client().connect()
    events.close()


def test_a_newer_server_of_the_same_protocol_is_used(served: ServerHarness) -> None:
    served.start("99.0")
    before = served.pid()
    served.client().connect()
    assert served.pid() == before


def test_a_server_launched_early_is_awaited(served: ServerHarness) -> None:
    command, said = served.client()._server_command, list[str]()
    early = launch_early(served.settings, command)
    assert early is not None
    assert launch_early(served.settings, command) is None, "it is being started"
    with LocalClient(served.settings, said.append, server_command=["false"], early=early) as client:
        client.connect()
        assert client.health() is not None
        assert launch_early(served.settings, command) is None, "it runs"
    assert said == ["starting the server"]
    assert not is_being_started(served.settings)


def test_failed_server_start_gives_the_reason(served: ServerHarness) -> None:
    code = "import sys; sys.exit('error: the disk is full')"
    client = LocalClient(served.settings, server_command=[sys.executable, "-c", code])
    with client, pytest.raises(ServerUnavailable, match="did not start: the disk is full"):
        client.connect()


def test_server_start_on_a_full_disk_gives_the_reason(
    served: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = LocalClient(
        served.settings, server_command=[sys.executable, "-c", "import sys; sys.exit(1)"]
    )
    folder, usage = served.settings.state_dir, shutil.disk_usage
    full = usage(folder)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda at: full if at == folder else usage(at))
    message = f"did not start: no space left on the device of {folder}"
    with client, pytest.raises(ServerUnavailable, match=message):
        client.connect()


def test_socket_path_too_long_is_rejected() -> None:
    with short_folder() as folder:
        settings = settings_in(folder / ("x" * 100))
        with (
            LocalClient(settings) as client,
            pytest.raises(BadSetting, match="LOCALGEN_RUNTIME_DIR"),
        ):
            client.connect()


def test_relative_model_path_is_relative_to_the_client(
    running: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.model("here")
    monkeypatch.chdir(running.folder)
    client = running.client()
    client.connect()
    assert text_of(client.chat("./here.gguf", ask("a"), SamplingParams())) == "a"
    assert text_of(client.chat("here.gguf", ask("a"), SamplingParams())) == "a"


def test_a_server_with_another_cache_folder_is_named_for_a_missing_model(
    running: ServerHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = running.client()
    client.connect()
    theirs = running.http.get("/health").json()["cache_folder"]
    ours = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(ours))
    note = (
        f"; the running server looks in {theirs}, not in {ours}: "
        f"`localgen stop` ends it, and the next one looks in {ours}"
    )
    calls: list[Callable[[], object]] = [
        lambda: client.load("acme/absent", LoadOptions()),
        lambda: text_of(client.chat("acme/absent", ask("a"), SamplingParams())),
        lambda: list(client.embed("acme/absent", ["a"])),
    ]
    for call in calls:
        with pytest.raises(ModelNotFound) as raised:
            call()
        assert raised.value.message.startswith("Model 'acme/absent' not found")
        assert raised.value.message.endswith(note)
        assert raised.value.param == "model"
    with pytest.raises(ModelNotFound, match="there is no file") as raised:
        client.load(str(tmp_path / "absent.gguf"), LoadOptions())
    assert "running server" not in raised.value.message
    ours.symlink_to(theirs)
    with pytest.raises(ModelNotFound) as raised:
        client.load("acme/absent", LoadOptions())
    assert "running server" not in raised.value.message
    assert "cache_folder" not in running.http.get("/v1/stats").json()["server"]


def test_proxies_are_not_used(running: ServerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    client = running.client()
    client.connect()
    assert client.health() is not None


def test_the_server_outlives_the_client(served: ServerHarness) -> None:
    code = (
        "import sys; from localgen.client import LocalClient\n"
        "from localgen.config import ServerSettings\n"
        "LocalClient(ServerSettings.from_environment(), server_command=sys.argv[1:]).connect()"
    )
    fake = served.client()._server_command
    environment: dict[str, Any] = {**os.environ, **served.settings.to_environment()}
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment["PYTHONPATH"] = os.pathsep.join([root, os.environ["PYTHONPATH"]])
    subprocess.run([sys.executable, "-c", code, *fake], check=True, env=environment)
    assert served.healthy()
