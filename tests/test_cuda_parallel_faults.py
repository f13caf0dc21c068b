"""Ranks that die while a server runs the model: an error for each stream, and no process left."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from hf_folders import TINY
from serving import error_line, wait_until
from test_cuda_end_to_end import ON_CPU, run

from localgen.backends.cuda.parallel.worker_group import _WORKER_MODULE
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.client import LocalClient, TextDelta
from localgen.config import ServerSettings

OPTIONS = LoadOptions(backend="cuda", device="cpu", tp=2)
ENDLESS = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def settings() -> Iterator[ServerSettings]:
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        made = ServerSettings(runtime_dir=Path(folder) / "run", state_dir=Path(folder) / "state")
        yield made
        LocalClient(made).shutdown()


@pytest.fixture
def client(settings: ServerSettings) -> Iterator[LocalClient]:
    with LocalClient(settings) as made:
        made.connect()
        made.load(str(TINY), OPTIONS)
        yield made


def engine(client: LocalClient) -> psutil.Process:
    (model,) = client.stats()["models"]
    return psutil.Process(model["pid"])


def follower(client: LocalClient) -> psutil.Process:
    (found,) = (p for p in engine(client).children() if _WORKER_MODULE in p.cmdline())
    return found


def runs(process: psutil.Process) -> bool:
    # an orphan stays a zombie until init reaps it
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def assert_works(client: LocalClient) -> None:
    client.load(str(TINY), OPTIONS)
    *parts, _ = client.chat(
        str(TINY), [Message("user", "What is 17 + 25?")], SamplingParams(temperature=0)
    )
    assert "42" in "".join(part.text for part in parts if isinstance(part, TextDelta))


def test_follower_killed_in_a_step_ends_streams_with_an_error(client: LocalClient) -> None:
    stream = client.chat(str(TINY), [Message("user", "Tell me a story.")], ENDLESS)
    next(stream)
    rank = follower(client)
    os.kill(rank.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    with pytest.raises(Exception, match=rf"rank 1 \(process {rank.pid}\) was killed by signal 9"):
        list(stream)
    assert time.monotonic() - killed_s < 5
    assert_works(client)


def test_follower_killed_while_idle_is_noticed(client: LocalClient) -> None:
    idle = engine(client)
    os.kill(follower(client).pid, signal.SIGKILL)
    idle.wait(timeout=5)
    assert_works(client)


def test_followers_go_with_their_engine(client: LocalClient) -> None:
    rank = follower(client)
    os.kill(engine(client).pid, signal.SIGKILL)
    rank.wait(timeout=5)


def test_unloaded_means_that_all_are_gone(client: LocalClient) -> None:
    everybody = [engine(client), follower(client)]
    assert client.unload(str(TINY))
    # a process closes its output, which the server waits for, before it has an exit status
    wait_until(lambda: not any(runs(process) for process in everybody), timeout_s=1)


def test_heads_that_cannot_be_divided_are_one_line(settings: ServerSettings) -> None:
    said = error_line(run(settings, str(TINY), "hello", *ON_CPU, "--tp", "3"))
    assert "--tp 3: 4 heads cannot be divided by 3: use 1, 2 or 4" in said


def test_gpus_that_are_not_there_are_counted(settings: ServerSettings) -> None:
    said = error_line(run(settings, str(TINY), "hello", "--tp", "2"))
    assert "no NVIDIA GPU was found" in said


def test_llama_cpp_backend_rejects_tp(settings: ServerSettings) -> None:
    gguf = str(TINY.with_suffix(".gguf"))
    said = error_line(run(settings, gguf, "hello", "--backend", "llamacpp", "--tp", "2"))
    assert "--tp is an option of the cuda backend" in said
