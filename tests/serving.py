"""A real server process over fake engines, on a real socket, for one test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from localgen.client import LocalClient
from localgen.config import ServerSettings
from localgen.machine.python_process import python_environment

SERVER = Path(__file__).with_name("fake_server.py")
WORDS = "one two three four five six seven eight nine ten"
MANY_WORDS = " ".join(str(number) for number in range(900))


def wait_until(true: Callable[[], object], timeout_s: float = 10.0) -> float:
    """Wait for a condition; returns the seconds it took. Fails the test after timeout_s."""
    started_s = time.monotonic()
    while not true():
        assert time.monotonic() - started_s < timeout_s, "it did not come true in time"
        time.sleep(0.01)
    return time.monotonic() - started_s


def settings_in(folder: Path, **others: Any) -> ServerSettings:
    return ServerSettings(runtime_dir=folder / "run", state_dir=folder / "state", **others)


@contextmanager
def short_folder() -> Iterator[Path]:
    """A temporary folder whose path is short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        yield Path(folder)


class ServerHarness:
    """A folder with models, and a server over fake engines."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings = settings_in(folder, **settings)
        self.settings.create_dirs()
        self.http = httpx.Client(
            base_url="http://test",
            # without TLS: reading the certificates takes 20 ms
            transport=httpx.HTTPTransport(verify=False, uds=str(self.settings.socket_path)),
            timeout=20,
            trust_env=False,
        )
        self.processes: list[subprocess.Popen[bytes]] = []
        self.clients: list[LocalClient] = []

    def start(self, *arguments: str, **access: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, str(SERVER), *arguments],
            env=python_environment()
            | self.settings.to_environment()
            | {"TEST_ACCESS": json.dumps(access)},
            stderr=subprocess.PIPE,
        )
        self.processes.append(process)
        wait_until(lambda: self.healthy() or process.poll() is not None, 60)
        return process

    def healthy(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def client(self, say: Callable[[str], None] = print, *arguments: str) -> LocalClient:
        command = [sys.executable, str(SERVER), *arguments]
        client = LocalClient(self.settings, say, server_command=command)
        self.clients.append(client)
        return client

    def model(self, name: str = "echo", **script: Any) -> str:
        """Write a model file with this script for the fake engine; returns its path."""
        path = self.folder / f"{name}.gguf"
        path.write_text(json.dumps(script))
        return str(path)

    def named(self, name: str, **script: Any) -> str:
        """As `model`, with an alias, which clients over TCP need; returns the alias."""
        with (self.settings.state_dir / "models.toml").open("a") as names:
            names.write(f"{name} = {json.dumps(self.model(name, **script))}\n")
        return name

    def loads(self, model: str) -> int:
        """Number of engine processes that have loaded the model."""
        log = Path(model + ".loads")
        return len(log.read_text().splitlines()) if log.exists() else 0

    def stats(self, model: str) -> dict[str, Any]:
        models: list[dict[str, Any]] = self.http.get("/v1/stats").json()["models"]
        return next(found for found in models if found["path"] == model)

    def loaded(self) -> list[str]:
        return [found["name"] for found in self.http.get("/v1/stats").json()["models"]]

    def pid(self) -> int:
        return int(self.http.get("/health").json()["pid"])

    def chat(self, model: str, text: str = WORDS, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json=chat_body(model, text, **fields))

    def events(self, model: str, text: str = WORDS, **fields: Any) -> Generator[Any, None, None]:
        """Decoded events of a streamed chat; `[DONE]` unchanged."""
        body = chat_body(model, text, stream=True, **fields)
        with self.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    payload = line.removeprefix("data: ")
                    yield payload if payload == "[DONE]" else json.loads(payload)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for process in self.processes:
            process.kill()
            process.communicate()
        owner = self.settings.server_lock_path
        if owner.exists() and self.healthy():
            os.kill(int(owner.read_text()), signal.SIGKILL)
        self.http.close()


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The single error line of a failed command, which has printed nothing else.

    On a slow machine, it may have told before that the engine is long in loading.
    """
    assert done.returncode != 0
    assert done.stdout == ""
    *notices, line = done.stderr.splitlines()
    assert all(notice.startswith("no answer of the engine for ") for notice in notices), notices
    return line


def chat_body(model: str, text: str = WORDS, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


@contextmanager
def server_harness(**settings: Any) -> Iterator[ServerHarness]:
    with short_folder() as folder:
        built = ServerHarness(folder, **settings)
        try:
            yield built
        finally:
            built.close()


def running_alone(server: ServerHarness) -> Iterator[ServerHarness]:
    """Lend a server to one test; whatever that loads is unloaded after it."""
    if not server.healthy():
        server.start()
    yield server
    for client in server.clients:
        client.close()
    server.clients.clear()
    for found in server.http.get("/v1/stats").json()["models"]:
        server.http.post("/v1/models/unload", json={"model": found["path"]})
    for log in server.folder.glob("*.loads"):
        log.unlink()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
