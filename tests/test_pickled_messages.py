"""A pickle from an engine, a server or a sandbox is an error, and nothing in it runs."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sandboxed import Probe

from localgen.backends.errors import LoadFailed
from localgen.backends.messages import encode_frame, start_process
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.sandbox import LimitExceeded, Sandbox, Sandboxed
from localgen.backends.sandbox_worker import CallLimits
from localgen.machine.python_process import python_environment
from localgen.server.models.engine_client import EngineClient
from localgen.server.models.engine_process import EngineProcess

LONG = CallLimits(60.0)
# an engine that answers the load request with the frame of a pickle, and waits
BAD_ENGINE = (
    "import socket, sys\n"
    "server = socket.socket(fileno=int(sys.argv[2]))\n"
    "server.sendall(bytes.fromhex(sys.argv[1]))\n"
    "while server.recv(4096): pass\n"
)
REAL_ENGINE = (
    "import sys\n"
    "from localgen.backends.engine.process import main\n"
    "def load(request, on_progress): raise SystemExit('it loads')\n"
    "sys.exit(main(int(sys.argv[-1]), load))\n"
)


class _Evil:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (os.mkdir, (str(self._path),))


@pytest.fixture(params=range(pickle.HIGHEST_PROTOCOL + 1))
def evil(request: pytest.FixtureRequest, tmp_path: Path) -> bytes:
    """A pickle that makes the folder `ran`, of each protocol."""
    ran = tmp_path / "ran"
    content = pickle.dumps(_Evil(ran), request.param)
    pickle.loads(content)
    ran.rmdir()  # it would work
    return content


@pytest.fixture(scope="module")
def probe() -> Sandboxed:
    return Sandbox(Probe).create(LONG, Probe)


def test_pickle_from_a_sandbox(probe: Sandboxed, evil: bytes, tmp_path: Path) -> None:
    with pytest.raises(LimitExceeded, match="crashed: its answer is damaged"):
        probe.call(LONG, "send_raw", [encode_frame(evil)])
    assert not (tmp_path / "ran").exists()
    assert probe.call(LONG, "echo", "a") == "a"


def test_pickle_from_an_engine(evil: bytes, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BAD_ENGINE, encode_frame(evil).hex()]

    async def load() -> None:
        client = EngineClient(EngineProcess.start(command), "bad", lambda: None)
        try:
            await client.load(ModelLoadRequest("bad", "bad.gguf", LoadOptions()))
        finally:
            await client.stop("the test is over")

    with pytest.raises(LoadFailed, match="the engine of bad sent an invalid message"):
        asyncio.run(load())
    assert not (tmp_path / "ran").exists()


def test_pickle_to_an_engine(evil: bytes, tmp_path: Path) -> None:
    process, engine = start_process(
        [sys.executable, "-c", REAL_ENGINE], env=python_environment(), stderr=subprocess.PIPE
    )
    engine.send(evil)
    _, stderr = process.communicate(timeout=60)
    engine.close()
    assert process.returncode == 1
    assert b"msgspec.ValidationError: Expected `array`" in stderr
    assert not (tmp_path / "ran").exists()
