"""Start and stop the compared servers: localgen and llama-server."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from benchmarks.llamacpp_tools import ToolFailed, Tools
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.client import LocalClient
from localgen.config import ServerSettings
from localgen.hub.packaged import default_model

_START_S = 120.0


class Localgen:
    """localgen's server with one model loaded. Each client corresponds to a terminal."""

    def __init__(self, settings: ServerSettings, model: Path | None, options: LoadOptions) -> None:
        self.settings = settings
        self.model = None if model is None else str(model)
        self._options = options
        self._clients = contextlib.ExitStack()
        self.info = self.load()

    def load(self) -> ModelInfo:
        """Load the model with the options of this run, unless it is already loaded."""
        with LocalClient(self.settings) as client:
            client.connect()
            return client.load(self.model, self._options)

    def unload(self) -> None:
        """Unload the model."""
        with LocalClient(self.settings) as client:
            client.unload(self.model or default_model())

    def client(self) -> LocalClient:
        """Return a new client; `close` closes it."""
        return self._clients.enter_context(LocalClient(self.settings))

    def close(self) -> None:
        """Close the clients."""
        self._clients.close()


@contextlib.contextmanager
def llama_server(
    tools: Tools,
    model: Path,
    *,
    slots: int,
    slot_ctx: int,
    threads: int,
    more: Sequence[str] = (),
) -> Iterator[httpx.Client]:
    """Run llama-server with its defaults: prompt cache on, a separate context per slot.

    more: arguments.
    """
    port = _free_port()
    command = tools.command(
        "llama-server", "-m", str(model), "-np", str(slots), "-c", str(slots * slot_ctx),
        "-t", str(threads), "--host", "127.0.0.1", *more,
    )  # fmt: skip
    with (
        tempfile.TemporaryFile() as log,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=None, trust_env=False) as http,
    ):
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
        try:
            _await_health(process, http)
            yield http
        except httpx.TransportError as error:
            log.seek(0)
            output = log.read().decode(errors="replace")[-500:]
            raise ToolFailed(f"llama-server: {error}; status {process.poll()}: {output}") from error
        finally:
            process.terminate()
            process.wait()


def _await_health(process: subprocess.Popen[bytes], http: httpx.Client) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ToolFailed(f"llama-server ended with status {process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            if http.get("/health").status_code == 200:
                return
        time.sleep(0.05)
    raise ToolFailed(f"llama-server was not ready after {_START_S:.0f} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
