"""Requests are prepared in fair turns; one client's slow requests do not delay those of others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandboxed import Probe

from localgen.backends.engine.preparation import (
    Delivery,
    PreparationQueue,
    Prepared,
    Preparer,
)
from localgen.backends.engine.preparation_costs import (
    FAST_S,
    LONG_CHARS,
    AnyRequest,
    PreparationCosts,
)
from localgen.backends.errors import InvalidRequest
from localgen.backends.runner.sequence import Sequence
from localgen.backends.sampling_params import BASE_SAMPLING, SamplingParams
from localgen.backends.sandbox import Sandbox
from localgen.backends.sandbox_worker import CallLimits
from localgen.backends.types import (
    EmbedRequest,
    Failed,
    Finished,
    Message,
    Request,
    Tool,
)

ENOUGH_S = 60.0


def request(client: str, number: int = 0) -> Request:
    return Request(id=f"{client}{number}", prompt="a", client=client)


def constrained(client: str, grammar: str = "root ::= [a]") -> Request:
    params = SamplingParams(grammar=grammar)
    return Request(id=f"{client} {grammar}", prompt="a", params=params, client=client)


def sequence(request: AnyRequest) -> Sequence:
    return Sequence(
        id=request.id,
        tokens=[1],
        num_prompt=1,
        params=BASE_SAMPLING,
        ctx=8,
        max_len=8,
        stop_ids=frozenset(),
        client=request.client,
        arrived_s=0.0,
    )


# -- turns ------------------------------------------------------------------------------------


def take_ids(waiting: PreparationQueue) -> list[str]:
    """Ids in the order in which one thread prepares them."""
    found = []
    while (taken := waiting.take()) is not None:
        found.append(taken.id)
        waiting.done(taken)
    return found


def test_clients_take_turns() -> None:
    waiting = PreparationQueue()
    for each in [*(request("a", i) for i in range(4)), request("b", 0), request("c", 0)]:
        waiting.put(each)
    assert take_ids(waiting) == ["a0", "b0", "c0", "a1", "a2", "a3"]


def test_one_request_of_a_client_at_a_time() -> None:
    waiting = PreparationQueue()
    for each in (request("a", 0), request("a", 1), request("b", 0)):
        waiting.put(each)
    first, second = waiting.take(), waiting.take()
    assert first == request("a", 0)
    assert second == request("b", 0)
    assert waiting.take() is None
    waiting.done(first)
    assert waiting.take() == request("a", 1)


def test_of_those_that_may_take_long_one_at_a_time() -> None:
    waiting = PreparationQueue(max_long=1)
    for client in "ab":
        waiting.put(request(client), may_take_long=True)
    waiting.put(request("c"))
    first = waiting.take()
    assert first == request("a")
    assert waiting.take() == request("c")
    assert waiting.take() is None
    waiting.done(first)
    assert waiting.take() == request("b")


@given(st.data())
def test_every_request_is_taken_once_and_none_waits_for_more_than_the_others(
    data: st.DataObject,
) -> None:
    waiting, busy, passed = PreparationQueue(), list[AnyRequest](), dict[str, int]()
    put, taken, removed = list[str](), list[str](), list[str]()
    for number in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["put", "take", "done", "remove"])):
            case "put":
                new = request(data.draw(st.sampled_from("abcd")), number)
                put.append(new.id)
                waiting.put(new)
            case "take" if (found := waiting.take()) is not None:
                assert found.client not in {other.client for other in busy}
                assert passed.pop(found.client, 0) <= 3  # at most once for each other client
                busy.append(found)
                taken.append(found.id)
                for client in {name[0] for name in set(put) - set(taken) - set(removed)}:
                    if client not in {other.client for other in busy}:
                        passed[client] = passed.get(client, 0) + 1
            case "done" if busy:
                waiting.done(busy.pop(data.draw(st.integers(0, len(busy) - 1))))
            case "remove" if put:
                name = data.draw(st.sampled_from(put))
                gone = waiting.remove(request(name[0], int(name[1:])))
                assert gone == (name not in taken and name not in removed)
                removed += [name] * gone
    for other in busy:
        waiting.done(other)
    taken += take_ids(waiting)
    assert sorted(taken + removed) == sorted(put)
    assert not waiting


# -- costs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (request("a"), False),
        (Request(id="a", prompt="a" * LONG_CHARS), False),
        (Request(id="a", prompt="a" * (LONG_CHARS + 1)), True),
        (Request(id="a", prompt_tokens=(1,) * (LONG_CHARS + 1)), True),
        (Request(id="a", messages=(Message("user", "a" * (LONG_CHARS + 1)),)), True),
        (Request(id="a", messages=(Message("user", "a"),) * 16_000), True),
        (Request(id="a", messages=(Message("user", "a"),) * 100), False),
        (Request(id="a", messages=(), tools=(Tool("f"),)), True),
        (Request(id="a", prompt="a", params=SamplingParams(regex="a")), True),
        (Request(id="a", prompt="a", params=SamplingParams(json_schema="{}")), True),
        (constrained("a"), True),
        (EmbedRequest(id="a", inputs=("a",)), False),
        (EmbedRequest(id="a", inputs=("a" * LONG_CHARS, (1,))), True),
    ],
)
def test_what_may_take_long(given: AnyRequest, expected: bool) -> None:
    assert PreparationCosts().may_take_long(given) is expected


def test_a_constraint_that_was_fast_is_known() -> None:
    costs = PreparationCosts()
    costs.record(constrained("a"), FAST_S * 2)
    assert costs.may_take_long(constrained("a"))
    costs.record(constrained("a"), FAST_S / 2)
    assert not costs.may_take_long(constrained("b"))
    assert costs.may_take_long(constrained("b", "root ::= [b]"))


# -- threads ----------------------------------------------------------------------------------


class Scene:
    """A Preparer whose requests wait until they are let go; the client `fast` never waits."""

    def __init__(self, prepare: Callable[[AnyRequest], Prepared] | None = None) -> None:
        self.delivered: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self.started: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.go = threading.Event()
        self.preparer = Preparer(
            prepare or self._prepare, self.delivered.put, threads=2, name="test"
        )

    def _prepare(self, given: AnyRequest) -> Prepared:
        self.started.put(given.id)
        if given.client != "fast":
            assert self.go.wait(ENOUGH_S)
        return sequence(given)

    def next(self) -> Delivery:
        return self.delivered.get(timeout=ENOUGH_S)

    def next_client(self) -> str:
        found = self.next()
        assert isinstance(found, Sequence)
        return found.client


@pytest.fixture
def scene() -> Iterator[Scene]:
    built = Scene()
    yield built
    built.go.set()
    built.preparer.close()


def test_a_slow_client_does_not_delay_others(scene: Scene) -> None:
    for number in range(5):
        scene.preparer.submit(request("slow", number))
    for number in range(5):
        scene.preparer.submit(request("fast", number))
    fast = [scene.next() for _ in range(5)]
    assert [found.id for found in fast if isinstance(found, Sequence)] == [
        f"fast{number}" for number in range(5)
    ]
    scene.go.set()
    slow = [scene.next() for _ in range(5)]
    assert [found.id for found in slow if isinstance(found, Sequence)] == [
        f"slow{number}" for number in range(5)
    ]
    assert scene.preparer.is_idle


def test_clients_whose_requests_may_take_long_do_not_delay_others(scene: Scene) -> None:
    names = [f"slow{number}" for number in range(5)]
    for name in names:
        scene.preparer.submit(constrained(name))
    scene.preparer.submit(request("fast"))
    assert scene.next_client() == "fast"
    scene.go.set()
    assert [scene.next_client() for _ in names] == names
    assert scene.preparer.is_idle


def test_a_known_constraint_does_not_wait_for_others() -> None:
    go = threading.Event()

    def prepare(given: AnyRequest) -> Prepared:
        assert given.client != "slow" or go.wait(ENOUGH_S)
        return sequence(given)

    scene = Scene(prepare)
    scene.preparer.submit(constrained("known"))
    assert scene.next_client() == "known"
    scene.preparer.submit(constrained("slow", "root ::= [b]"))
    scene.preparer.submit(constrained("known"))
    assert scene.next_client() == "known"
    go.set()
    assert scene.next_client() == "slow"
    scene.preparer.close()


def test_a_cancelled_request_is_not_prepared(scene: Scene) -> None:
    for number in range(2):
        scene.preparer.submit(request("slow", number))
    assert scene.started.get(timeout=ENOUGH_S) == "slow0"
    assert scene.preparer.cancel("slow1")
    ended = scene.next()
    assert isinstance(ended, Finished)
    assert (ended.request_id, ended.reason) == ("slow1", "cancelled")
    assert scene.preparer.cancel("slow0")
    scene.go.set()
    ended = scene.next()
    assert isinstance(ended, Finished)
    assert (ended.request_id, ended.reason) == ("slow0", "cancelled")
    assert not scene.preparer.cancel("slow0")
    assert scene.started.empty()


def test_a_cancelled_embedding(scene: Scene) -> None:
    for name in ("a", "b"):
        scene.preparer.submit(EmbedRequest(id=name, inputs=("x",), client="slow"))
    assert scene.preparer.cancel("b")
    ended = scene.next()
    assert isinstance(ended, Failed)
    assert (ended.request_id, ended.code) == ("b", "cancelled")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("no", param="prompt"), "invalid_request"),
        (KeyError("x"), "internal_error"),
        (type("PanicException", (BaseException,), {})("a library panics"), "internal_error"),
    ],
)
def test_every_request_ends(error: BaseException, code: str) -> None:
    def fail(given: AnyRequest) -> Prepared:
        if given.client == "bad":
            raise error
        return sequence(given)

    scene = Scene(fail)
    scene.preparer.submit(request("bad"))
    ended = scene.next()
    assert isinstance(ended, Failed)
    assert (ended.request_id, ended.code) == ("bad0", code)
    scene.preparer.submit(request("good"))
    assert isinstance(scene.next(), Sequence)
    assert scene.preparer.is_idle
    scene.preparer.close()


def test_cancelling_ends_a_call_in_the_sandbox(tmp_path: Path) -> None:
    probe = Sandbox().create(CallLimits(ENOUGH_S), Probe)
    mark = tmp_path / "mark"

    def prepare(given: AnyRequest) -> Prepared:
        probe.call(CallLimits(3600), "mark_and_wait", str(mark))
        return sequence(given)

    scene = Scene(prepare)
    scene.preparer.submit(request("a"))
    deadline_s = time.monotonic() + ENOUGH_S
    while not mark.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert scene.preparer.cancel("a0")
    ended = scene.next()  # it would take an hour
    assert isinstance(ended, Finished)
    assert ended.reason == "cancelled"
    scene.preparer.close()
