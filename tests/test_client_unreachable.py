"""Servers that are stopped, unsafe, odd, or killed while they start: every command says so."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import own_folders, pipe_in
from serving import (
    MANY_WORDS,
    SERVER,
    ServerHarness,
    in_thread,
    running_alone,
    server_harness,
    short_folder,
    wait_until,
)

from localgen import PROTOCOL, __version__
from localgen.backends.errors import LocalgenError, ServerUnavailable
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.cli import errors
from localgen.cli.commands import COMMANDS
from localgen.cli.main import run_command_line
from localgen.client import (
    Completion,
    LocalClient,
    TextDelta,
    connection,
    local_client,
    server_watch,
)
from localgen.client.errors import ServerNotAnswering
from localgen.client.launch import read_server_pid, start_lock
from localgen.client.server_monitor import LocalServerMonitor
from localgen.config import BadSetting, ServerSettings
from localgen.machine.python_process import python_environment

__all__ = ["own_folders"]
# the commands that ask the local server, and those that do not; top needs a terminal
ASKING = {
    "chat": ["chat", "tiny"],
    "doctor": ["doctor"],
    "embed": ["embed", "-m", "tiny", "a"],
    "list": ["list"],
    "plan": ["plan", "tiny"],
    "ps": ["ps"],
    "rm": ["rm", "--yes", "tiny"],
    "run": ["run", "tiny", "a"],
    "stop": ["stop"],
    "warm": ["warm", "tiny", "-f", __file__],
}
OTHERS = {
    *(
        "adapter",
        "audit",
        "bench",
        "cluster",
        "completion",
        "cp",
        "endpoint",
        "history",
        "kv",
        "launch",
        "logs",
        "mcp",
        "preset",
        "pull",
        "quantize",
    ),
    *("search", "serve", "show", "top", "tui"),
}
UNAVAILABLE = errors.exit_status("server_unavailable")


@pytest.fixture
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        yield built


@pytest.fixture(scope="module")
def shared() -> Iterator[ServerHarness]:
    with server_harness() as built:
        yield built


@pytest.fixture
def used(shared: ServerHarness) -> Iterator[ServerHarness]:
    """A running server that other tests have used, without models."""
    yield from running_alone(shared)


@pytest.fixture
def quick_health(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (local_client, connection):
        monkeypatch.setattr(module, "HEALTH_TIMEOUT_S", 0.5)
    monkeypatch.setattr(connection, "_BACKLOG_TIMEOUT_S", 0.5)


def use(settings: ServerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCALGEN_CONFIG_DIR", str(settings.state_dir))
    found = SimpleNamespace(name="tiny", freed_bytes=0, execute=lambda: None)
    monkeypatch.setattr("localgen.hub.remove.plan_removal", lambda name: found)
    pipe_in(monkeypatch, b"a")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def odd_server(folder: Path, answer: bytes | None) -> Iterator[list[bytes]]:
    """A server that sends the same bytes to each request; None: it ends the connection.

    Yields the requests that it got.
    """
    got: list[bytes] = []

    def serve(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer = sock.accept()[0]
                with peer, contextlib.suppress(OSError):
                    while request := peer.recv(1 << 16):
                        got.append(request)
                        if answer is None:
                            break
                        peer.sendall(answer)

    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "server.sock"))
        sock.listen()
        thread = threading.Thread(target=serve, args=(sock,), daemon=True)
        thread.start()
        yield got
        sock.shutdown(socket.SHUT_RDWR)


def test_every_command_is_known_here() -> None:
    assert set(COMMANDS) == {*ASKING, *OTHERS}


@pytest.mark.usefixtures("quick_health")
def test_a_stopped_server_is_named_by_every_command(
    served: ServerHarness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = served.start().pid
    use(served.settings, monkeypatch)
    said = f"the server (process {pid}) does not answer: `kill -CONT {pid}` if it was stopped, or"
    with stopped(pid):
        for name, arguments in ASKING.items():
            status = run_command_line(arguments)
            shown = capsys.readouterr()
            if name == "doctor":
                assert said in shown.out
            else:
                assert (status, said in shown.err) == (UNAVAILABLE, True), (name, shown)
            if name == "list":  # what is on the disk is known
                assert re.search("^tiny .* unknown$", shown.out, re.MULTILINE), shown
        with pytest.raises(ServerUnavailable, match="does not answer"):
            next(LocalServerMonitor(served.settings).snapshots())
    assert run_command_line(["stop"]) == 0


@pytest.mark.usefixtures("quick_health")
def test_statistics_do_not_wait_for_a_stopped_server(used: ServerHarness) -> None:
    client, raised = LocalClient(used.settings), list[LocalgenError]()

    def ask() -> None:
        try:
            client.stats()
        except LocalgenError as error:
            raised.append(error)

    with contextlib.closing(client), stopped(used.pid()):
        asking = in_thread(ask)
        asking.join(timeout=20)
        assert [type(error) for error in raised] == [ServerNotAnswering]


@pytest.fixture
def quick_watch(monkeypatch: pytest.MonkeyPatch, quick_health: None) -> None:
    """A request asks after a second without a byte whether its server answers."""
    monkeypatch.setattr(server_watch, "SILENT_AFTER_S", 1.0)


@pytest.mark.usefixtures("quick_watch")
def test_a_server_stopped_in_an_answer_is_named_until_it_goes_on(used: ServerHarness) -> None:
    pid = used.pid()
    said: list[str] = []
    client = used.client(said.append)
    model, prompt = used.model(token_s=0.02), [Message("user", MANY_WORDS)]
    answer = client.chat(model, prompt, SamplingParams(max_tokens=100))
    assert isinstance(next(answer), TextDelta)
    rest: list[TextDelta | Completion] = []
    with stopped(pid):
        reading = in_thread(lambda: rest.extend(answer))
        wait_until(lambda: len(said) == 2, 20)
    reading.join(timeout=60)
    problem = f"the server (process {pid}) does not answer: `kill -CONT {pid}` if it was stopped"
    assert all(line.startswith(problem) and line.endswith("; Ctrl+C stops") for line in said)
    assert isinstance(rest[-1], Completion)
    assert rest[-1].completion_tokens == 100


@pytest.mark.usefixtures("quick_watch")
def test_a_server_stopped_while_it_loads_a_model_is_named(used: ServerHarness) -> None:
    pid = used.pid()
    said: list[str] = []
    client, model = used.client(said.append), used.model(load_s=1.0)
    loaded: list[str] = []
    progress: list[float] = []

    def load() -> None:
        loaded.append(client.load(model, LoadOptions(), progress.append).name)

    loading = in_thread(load)
    wait_until(lambda: progress)
    with stopped(pid):
        wait_until(lambda: said, 20)
    loading.join(timeout=60)
    assert said[0].startswith(f"the server (process {pid}) does not answer")
    assert loaded == ["echo"]


@pytest.mark.usefixtures("quick_watch")
def test_a_slow_answer_of_a_server_that_answers_is_not_its_silence(used: ServerHarness) -> None:
    said: list[str] = []
    client = used.client(said.append)
    prompt = [Message("user", "a b")]
    *_, end = client.chat(used.model(token_s=2.5), prompt, SamplingParams())
    assert isinstance(end, Completion)
    assert said == []


@pytest.mark.parametrize("command", [["run"], ["embed", "-m"]])
def test_ctrl_c_stops_a_command_whose_server_is_stopped(
    command: list[str], used: ServerHarness
) -> None:
    pid = used.pid()
    code = (
        "from localgen.client import server_watch; server_watch.SILENT_AFTER_S = 1.0\n"
        "from localgen.cli.main import main; main()"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", code, *command, used.model(token_s=0.05), "w " * 400],
        env=os.environ | used.settings.to_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    told: list[str] = []
    stdout, stderr = running.stdout, running.stderr
    assert stdout is not None
    assert stderr is not None
    reading = in_thread(lambda: told.extend(stderr))
    try:
        wait_until(lambda: used.http.get("/health").json()["active_requests"], 60)
        with stopped(pid):
            wait_until(lambda: told, 60)
            running.send_signal(signal.SIGINT)
            assert running.wait(timeout=60) == 130
    finally:
        running.kill()
        running.wait()
        reading.join(timeout=60)
        stdout.close()
        stderr.close()
    assert told[0].startswith(f"the server (process {pid}) does not answer")


@pytest.mark.usefixtures("quick_health")
def test_a_stopped_server_whose_queue_is_full_is_not_absent(served: ServerHarness) -> None:
    with socket.socket(socket.AF_UNIX) as sock, contextlib.ExitStack() as stack:
        sock.bind(str(served.settings.socket_path))
        sock.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(str(served.settings.socket_path))
        with pytest.raises(ServerUnavailable, match="does not answer"):
            served.client().health()


@pytest.mark.usefixtures("quick_health")
def test_a_client_waits_for_a_server_that_another_client_starts(used: ServerHarness) -> None:
    pid = used.pid()
    connected: list[int] = []

    def connect() -> None:
        used.client().connect()
        connected.append(used.pid())

    with stopped(pid), start_lock(used.settings, lambda: False):
        asking = in_thread(connect)
        time.sleep(1.5)  # longer than it waits for the health
        assert asking.is_alive()
        os.kill(pid, signal.SIGCONT)
    asking.join(timeout=20)
    assert connected == [pid]


def test_the_process_id_of_a_server_that_ended_is_not_given(served: ServerHarness) -> None:
    process = served.start()
    assert read_server_pid(served.settings) == process.pid
    process.kill()
    process.wait()
    assert read_server_pid(served.settings) is None


@pytest.mark.parametrize("name", ASKING)
def test_no_command_asks_a_server_in_an_unsafe_folder(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with short_folder() as folder:
        settings = ServerSettings(folder / "run", folder / "state")
        settings.create_dirs()
        use(settings, monkeypatch)
        settings.runtime_dir.chmod(0o777)
        with odd_server(settings.runtime_dir, b"HTTP/1.1 200 OK\r\n\r\n{}") as got:
            status = run_command_line(ASKING[name])
        assert not got
        shown = capsys.readouterr()
        assert f"other users may write to {settings.runtime_dir}" in shown.err + shown.out
        assert status == (1 if name == "doctor" else errors.exit_status("bad_setting"))


def test_top_does_not_ask_a_server_in_an_unsafe_folder() -> None:
    with short_folder() as folder:
        settings = ServerSettings(folder / "run", folder / "state")
        settings.create_dirs()
        settings.runtime_dir.chmod(0o777)
        with odd_server(settings.runtime_dir, None) as got:
            with pytest.raises(BadSetting, match="other users may write"):
                next(LocalServerMonitor(settings).snapshots())
            with pytest.raises(BadSetting, match="other users may write"):
                LocalServerMonitor(settings).cancel("x")
        assert not got


def test_a_folder_that_does_not_exist_has_no_server(tmp_path: Path) -> None:
    with LocalClient(ServerSettings(tmp_path / "none", tmp_path / "state")) as asking:
        assert asking.health() is None
    assert not (tmp_path / "none").exists()


MORE: tuple[dict[str, Any], ...] = (
    {},
    {"data": [{}], "models": [{}], "server": {}},
    {"data": 1, "models": 1, "server": 1},
    {"models": [{"name": "tiny", "path": 3, "info": {}}], "server": {}},
)
HEALTH = {
    "status": "ok",
    "version": __version__,
    "protocol": PROTOCOL,
    "pid": 1,
    "active_requests": 0,
}
ODD_BODIES = (
    b"",
    b"{",
    b"[]",
    b"{}",
    b"null",
    b"\xff\xfe",
    b'{"status": 5}',
    b'{"error": 1}',
    b'{"error": {"code": 1}}',
    # right for /health, odd for everything else
    *(json.dumps(HEALTH | more).encode() for more in MORE),
)


@pytest.mark.parametrize("body", ODD_BODIES)
@pytest.mark.parametrize(("status", "is_stream"), [(200, False), (200, True), (500, False)])
def test_an_odd_answer_is_no_internal_error(
    body: bytes,
    status: int,
    is_stream: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("localgen.client.launch._SHUTDOWN_TIMEOUT_S", 0.1)
    payload = b"data: " + body + b"\n\n" if is_stream else body
    head = f"HTTP/1.1 {status} Odd\r\ncontent-length: {len(payload)}\r\n\r\n".encode()
    with short_folder() as folder:
        settings = ServerSettings(folder / "run", folder / "state")
        settings.create_dirs()
        use(settings, monkeypatch)
        with odd_server(settings.runtime_dir, head + payload):
            for name, arguments in ASKING.items():
                if name != "doctor":  # slow
                    exit_status = run_command_line(arguments)
                    shown = capsys.readouterr()
                    assert exit_status != errors.INTERNAL_ERROR, (name, shown)
                    assert not exit_status or shown.err.startswith("localgen: "), (name, shown)
            with contextlib.suppress(LocalgenError):
                assert list(LocalServerMonitor(settings).snapshots()) == []


# -- killed while it starts -------------------------------------------------------------------


def dying_server(folder: Path, deaths: int) -> list[str]:
    """A command whose first processes are killed before they answer."""
    code = (
        "import os, pathlib, runpy, signal, sys\n"
        f"starts = pathlib.Path({str(folder / 'starts')!r})\n"
        "starts.open('a').write('x')\n"
        f"if len(starts.read_text()) <= {deaths}: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"sys.path.insert(0, {str(SERVER.parent)!r}); sys.argv = [{str(SERVER)!r}]\n"
        f"runpy.run_path({str(SERVER)!r}, run_name='__main__')"
    )
    return [sys.executable, "-c", code]


def test_a_server_that_is_killed_while_it_starts_is_started_again(
    served: ServerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_environment()["PYTHONPATH"])
    said: list[str] = []
    command = dying_server(served.folder, 1)
    with LocalClient(served.settings, said.append, server_command=command) as asking:
        asking.connect()
        assert asking.health() is not None
    log = served.settings.log_path
    assert said == [
        "starting the server",
        f"the server was killed by SIGKILL while it started: see {log}; starting it again",
    ]
    wait_until(served.healthy)


def test_a_server_that_is_killed_twice_while_it_starts_is_an_error(served: ServerHarness) -> None:
    command = dying_server(served.folder, 9)
    with (
        LocalClient(served.settings, server_command=command) as asking,
        pytest.raises(ServerUnavailable, match="killed by SIGKILL while it started: see "),
    ):
        asking.connect()
    assert (served.folder / "starts").read_text() == "xx"
