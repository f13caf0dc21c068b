"""The server's end of an engine: what arrives for clients that are just leaving."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import cast

import psutil
import pytest

from localgen.backends.engine import wire
from localgen.backends.messages import encode_frame
from localgen.backends.types import Embedded, EmbedRequest, Failed, StepEvents, Timings
from localgen.server.models.engine_client import EngineClient
from localgen.server.models.engine_process import EngineProcess
from localgen.server.models.engine_watch import process_usage


class Process:
    was_killed = False

    def kill(self) -> None:
        self.was_killed = True


def request(name: str) -> EmbedRequest:
    return EmbedRequest(id=name, inputs=("a",))


def embedded(name: str) -> Embedded:
    return Embedded(request_id=name, vectors=b"", width=1, prompt_tokens=(1,), timings=Timings())


def arrive(engine: EngineClient, events: StepEvents) -> None:
    engine.data_received(encode_frame(wire.CODEC.encode(events)))


@pytest.mark.parametrize(
    "end",
    [
        lambda engine: arrive(engine, StepEvents(embedded=(embedded("a"),))),
        lambda engine: arrive(engine, StepEvents(failed=(Failed("a", "queue_full", "full"),))),
        lambda engine: engine._fail_call(Failed("a", "server_unavailable", "stopping")),
    ],
    ids=["vectors", "failure", "shutdown"],
)
def test_an_end_for_a_client_that_is_leaving(end: Callable[[EngineClient], None]) -> None:
    process = Process()

    async def script() -> None:
        engine = EngineClient(cast(EngineProcess, process), "model", lambda: None)
        leaving, staying = (asyncio.create_task(engine.embed(request(name))) for name in "ab")
        await asyncio.sleep(0)
        leaving.cancel()
        end(engine)  # before the task runs again
        arrive(engine, StepEvents(embedded=(embedded("b"),)))
        assert (await staying).request_id == "b"
        await asyncio.wait({leaving})
        assert leaving.cancelled()
        assert not engine.has_requests

    asyncio.run(script())
    assert not process.was_killed


def test_usage_is_unknown_without_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pid: int) -> psutil.Process:
        raise OSError(24, "Too many open files")

    assert process_usage(os.getpid()) is not None
    monkeypatch.setattr(psutil, "Process", fail)
    assert process_usage(os.getpid()) is None
