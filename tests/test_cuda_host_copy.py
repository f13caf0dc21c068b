"""Copies to the host beside steps: what waits for what, on fake streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from localgen.backends.cuda.model import host_copy
from localgen.backends.runner.interface import StepFailed


class FakeCuda:
    """Streams and events that log what is done with them. done: set when copies are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.done = threading.Event()
        self._current = "steps"
        for name, fake in {
            "current_stream": lambda _: FakeStream(self, self._current),
            "Stream": lambda _: FakeStream(self, "copies"),
            "stream": self._with_stream,
            "Event": lambda *, blocking: FakeEvent(self, blocking=blocking),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    @contextmanager
    def _with_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream.name
        yield
        self._current = before

    def note(self, what: str) -> None:
        self.log.append(f"{what} on {self._current}")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda, *, blocking: bool) -> None:
        assert blocking, "no core is busy while it waits"
        self._cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self._cuda.log.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert self._cuda.done.wait(60)


class FakeOnDevice(Tensor):
    """A tensor on the host that says it is on a GPU."""

    streams: FakeCuda

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def record_stream(self, stream: FakeStream) -> None:  # type: ignore[override]
        self.streams.log.append(f"kept for {stream.name}")


class FakePinned(Tensor):
    streams: FakeCuda

    def view(self, *shape: Any) -> FakePinned:
        found = super().view(*shape).as_subclass(FakePinned)
        found.streams = self.streams
        return found

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        self.streams.note("copy")
        return super().copy_(source.as_subclass(Tensor))


def test_a_copy_to_the_host_waits_for_the_steps_before_it_on_a_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, buffers = FakeCuda(monkeypatch), []

    def pinned(num_bytes: int, device: torch.device) -> Tensor:
        buffers.append(torch.zeros(num_bytes, dtype=torch.uint8).as_subclass(FakePinned))
        buffers[-1].streams = cuda
        assert device.type == "cuda"
        return buffers[-1]

    monkeypatch.setattr(host_copy, "host_buffer", pinned)
    monkeypatch.setattr(host_copy, "_stream_to_host", torch.cuda.Stream)
    content = torch.arange(12, dtype=torch.uint8).view(3, 4)
    gathered = content.as_subclass(FakeOnDevice)
    gathered.streams = cuda
    copy = host_copy.to_host_beside_steps(gathered)
    assert cuda.log == [
        "copies waits for steps",
        "copy on copies",
        "kept for copies",
        "event on copies",
    ]
    assert not copy.is_done
    cuda.done.set()
    found = copy.wait()
    assert copy.is_done
    buffers[0].zero_()  # reused by another copy
    assert found.tolist() == content.tolist()


def test_the_host_waits_for_a_copy_before_it_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    host = torch.zeros(2, dtype=torch.uint8)
    event = FakeEvent(cuda, blocking=True)
    monkeypatch.setattr(event, "synchronize", lambda: host.fill_(7))
    assert host_copy.HostCopy(host, event).wait().tolist() == [7, 7]  # type: ignore[arg-type]


def test_a_failure_of_the_device_is_raised_by_the_thread_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    event = FakeEvent(FakeCuda(monkeypatch), blocking=True)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(event, "synchronize", fail)
    copy = host_copy.HostCopy(torch.zeros(2, dtype=torch.uint8), event)  # type: ignore[arg-type]
    with pytest.raises(StepFailed):
        copy.wait()


def test_loads_do_not_wait_behind_copies_that_wait_for_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: object())
    device = torch.device("cuda", 99)
    to_device, to_host = host_copy._stream_to_device(device), host_copy._stream_to_host(device)
    assert to_device is not to_host
    assert to_host is host_copy._stream_to_host(device), "one for all copies"
    host_copy._stream_to_device.cache_clear()
    host_copy._stream_to_host.cache_clear()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be", MemoryError),
        ("can't start new thread", MemoryError),
        ("CUDA error: an illegal memory access was encountered", StepFailed),
    ],
)
def test_only_a_lack_of_memory_is_no_failure_of_the_device(
    text: str, expected: type[Exception]
) -> None:
    with pytest.raises(expected), host_copy.device_errors():
        raise RuntimeError(text)
