"""Turns of models that share memory, with a clock of the test and loads that take no time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localgen.backends.errors import LoadFailed, MemoryInUse, QueueFull, ServerUnavailable
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.placement.backend_choice import Placement
from localgen.server.models.resident import ResidentModel
from localgen.server.models.swap_queue import MIN_TURN_S, MemoryWait, MustWait, SwapQueue

RAM = Placement("llamacpp", "test")
FOREVER = 1e9


def file_of(name: str) -> ModelFile:
    return ModelFile(name, Path(f"/models/{name}.gguf"), 1, (), "file")


class Machine:
    """Memory for `room` models. load_s: seconds of the clock that a load takes."""

    def __init__(self, room: int = 1, *, max_waiting: int | None = None, load_s: float = 0) -> None:
        self.room, self.load_s = room, load_s
        self.now_s = 1000.0
        self.residents: list[ResidentModel] = []
        self.loads: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.admission = asyncio.Lock()
        self.queue = SwapQueue(lambda: self.residents, max_waiting, lambda: self.now_s)

    async def attempt(self, file: ModelFile) -> ResidentModel:
        async with self.admission:
            return await self.load_once(file)

    async def load_once(self, file: ModelFile) -> ResidentModel:
        for resident in self.residents:
            if resident.file.path == file.path:
                self.queue.require_turn(resident)
                return resident
        if len(self.residents) == self.room:
            idle = [r for r in self.residents if self.queue.may_evict(file, r)]
            if not idle:
                raise MustWait(f"no room for {file.name}", RAM)
            self.residents.remove(min(idle, key=lambda resident: resident.last_used_s))
        await asyncio.sleep(0)
        if file.name in self.broken:
            raise self.broken[file.name]
        self.loads.append(file.name)
        began_s, self.now_s = self.now_s, self.now_s + self.load_s
        return self.add(file, began_s)

    def add(self, file: ModelFile, began_s: float) -> ResidentModel:
        loaded: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        loaded.set_result(cast(ModelInfo, object()))
        resident = ResidentModel(
            file=file,
            placement=RAM,
            engine=cast(Any, None),
            requested_options=LoadOptions(),
            estimated_bytes=1,
            load_future=loaded,
            keep_alive_s=None,
            created_s=began_s,
            loaded_s=self.now_s,
            last_used_s=self.now_s,
        )
        self.residents.append(resident)
        return resident

    async def take(self, name: str, deadline_s: float = FOREVER) -> ResidentModel:
        """Begin a request."""
        file = file_of(name)
        while True:
            resident = next((r for r in self.residents if r.file.path == file.path), None)
            if resident is None or self.queue.gives_way_to(resident) is not None:
                wait = MemoryWait(deadline_s)
                resident = await self.queue.run(file, partial(self.attempt, file), wait)
            if resident in self.residents:
                assert resident is not None
                resident.num_users += 1
                return resident

    def end(self, resident: ResidentModel) -> None:
        """End a request."""
        resident.num_users -= 1
        resident.last_used_s = self.now_s
        if not resident.num_users:
            self.queue.notify()

    def later(self, seconds: float) -> None:
        self.now_s += seconds
        self.queue.notify()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(50):
        await asyncio.sleep(0)


def play(script: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(script, 60))


def test_a_model_in_its_turn_serves_and_gives_way_afterwards() -> None:
    async def script() -> None:
        machine = Machine()
        stream = await machine.take("a")
        other = asyncio.create_task(machine.take("b"))
        await settle()
        assert machine.queue.count_waiting() == {"b": 1}
        short = await machine.take("a")
        machine.end(short)
        machine.later(MIN_TURN_S)
        late = asyncio.create_task(machine.take("a"))
        await settle()
        assert machine.queue.count_waiting() == {"b": 1, "a": 1}, "the turn of a is over"
        machine.end(stream)
        b = await other
        await settle()
        assert machine.loads == ["a", "b"]
        assert not late.done(), "b is in use"
        machine.end(b)
        assert (await late).file.name == "a"
        assert machine.queue.count_waiting() == {}

    play(script())


def test_no_model_of_three_starves_while_the_first_is_asked_for_all_the_time() -> None:
    async def script() -> None:
        machine = Machine()
        held = await machine.take("a")
        served: list[str] = []

        async def ask(name: str) -> None:
            resident = await machine.take(name)
            served.append(name)
            await asyncio.sleep(0)
            machine.end(resident)

        others = [asyncio.create_task(ask(name)) for name in ("b", "c")]
        await settle()
        machine.later(MIN_TURN_S)
        more = [asyncio.create_task(ask("a")) for _ in range(20)]
        await settle()
        machine.end(held)
        await asyncio.gather(*others, *more)
        assert served == ["b", "c", *["a"] * 20]
        assert machine.loads == ["a", "b", "c", "a"]

    play(script())


def test_a_turn_lasts_three_load_times() -> None:
    async def script() -> None:
        machine = Machine(load_s=10)
        stream = await machine.take("a")
        waiting = asyncio.create_task(machine.take("b"))
        await settle()
        machine.later(29)
        machine.end(await machine.take("a"))
        machine.later(1.5)
        late = asyncio.create_task(machine.take("a"))
        await settle()
        assert not late.done()
        machine.end(stream)
        machine.end(await waiting)
        machine.later(1.0)
        await late

    play(script())


def test_an_idle_model_is_held_for_a_moment_of_its_turn() -> None:
    async def script() -> None:
        machine = Machine(load_s=2)
        machine.end(await machine.take("a"))
        waiting = asyncio.create_task(machine.take("b"))
        await settle()
        machine.later(0.4)
        await settle()
        machine.end(await machine.take("a"))
        machine.later(0.4)
        await settle()
        assert not waiting.done(), "a was used again"
        machine.later(0.2)
        await waiting
        assert machine.loads == ["a", "b"]

    play(script())


def test_free_memory_is_used_past_the_queue_but_no_model_is_evicted_past_it() -> None:
    async def script() -> None:
        machine = Machine(room=2)
        a, b = await machine.take("a"), await machine.take("b")
        first = asyncio.create_task(machine.take("c"))
        await settle()
        second = asyncio.create_task(machine.take("d"))
        await settle()
        machine.room = 3
        small = await machine.take("e")
        assert small.file.name == "e", "it fits beside the others"
        machine.end(small)
        await first
        await settle()
        assert machine.loads == ["a", "b", "e", "c"], "e was idle, c came before d"
        machine.end(a)
        await second
        machine.end(b)

    play(script())


def test_a_request_that_leaves_the_queue_leaves_nothing_behind() -> None:
    async def script() -> None:
        machine = Machine()
        held = await machine.take("a")
        waiting = [asyncio.create_task(machine.take("b")) for _ in range(3)]
        behind = asyncio.create_task(machine.take("c"))
        await settle()
        waiting[0].cancel()
        await settle()
        assert machine.queue.count_waiting() == {"b": 2, "c": 1}
        for task in waiting[1:]:
            task.cancel()
        await settle()
        assert machine.queue.count_waiting() == {"c": 1}
        machine.end(held)
        await behind
        assert machine.loads == ["a", "c"]
        assert machine.queue.count_waiting() == {}

    play(script())


def test_a_full_queue_and_the_deadline_are_errors() -> None:
    async def script() -> None:
        machine = Machine(max_waiting=2)
        held = await machine.take("a")
        ends_s = machine.now_s + 5
        waiting = [asyncio.create_task(machine.take("b", ends_s)) for _ in range(2)]
        await settle()
        with pytest.raises(QueueFull, match="2 requests wait for b to be loaded, the limit is 2"):
            await machine.take("b")
        machine.now_s = ends_s
        for task in waiting:
            machine.queue.notify()
            with pytest.raises(MemoryInUse, match="no room for b; try again later"):
                await asyncio.wait_for(task, 5)
        assert machine.queue.count_waiting() == {}
        machine.end(held)
        await machine.take("b")

    play(script())


def test_closing_ends_all_waits() -> None:
    async def script() -> None:
        machine = Machine()
        await machine.take("a")
        waiting = [asyncio.create_task(machine.take(name)) for name in "bbbcc"]
        await settle()
        machine.queue.close()
        for task in waiting:
            with pytest.raises(ServerUnavailable, match="shutting down"):
                await task
        assert machine.queue.count_waiting() == {}

    play(script())


def test_a_load_that_fails_is_told_and_the_queue_goes_on() -> None:
    async def script() -> None:
        machine = Machine()
        machine.broken["b"] = LoadFailed("b is damaged")
        held = await machine.take("a")
        waiting = [asyncio.create_task(machine.take("b")) for _ in range(3)]
        behind = asyncio.create_task(machine.take("c"))
        await settle()
        machine.end(held)
        machine.end(await behind)
        for task in waiting:
            with pytest.raises(LoadFailed, match="b is damaged"):
                await task
        assert machine.queue.count_waiting() == {}

    play(script())


@given(
    room=st.integers(1, 3),
    load_s=st.sampled_from([0.0, 0.5, 8.0]),
    jobs=st.lists(
        st.tuples(
            st.sampled_from("abcde"), st.integers(0, 30), st.integers(0, 9), st.integers(-9, 5)
        ),
        max_size=60,
    ),
)
def test_each_request_of_any_schedule_ends_once(
    room: int, load_s: float, jobs: list[tuple[str, int, int, int]]
) -> None:
    """jobs: model, step of arrival, steps of work, steps until its client leaves (< 1: never)."""

    async def script() -> None:
        machine = Machine(room, load_s=load_s)
        ended: Counter[int] = Counter()

        async def ask(number: int, name: str, arrival: int, work: int) -> None:
            for _ in range(arrival):
                await asyncio.sleep(0)
            try:
                resident = await machine.take(name)
                try:
                    for _ in range(work):
                        await asyncio.sleep(0)
                    assert resident in machine.residents, "it was evicted while in use"
                finally:
                    machine.end(resident)
            finally:
                ended[number] += 1

        tasks = [asyncio.create_task(ask(n, *job[:3])) for n, job in enumerate(jobs)]
        leave = [job[1] + job[3] if job[3] > 0 else -1 for job in jobs]
        for step in range(3000):
            await asyncio.sleep(0)
            machine.later(0.2)
            assert len(machine.residents) <= room
            for task, at in zip(tasks, leave, strict=True):
                if at == step:
                    task.cancel()
            if all(task.done() for task in tasks):
                break
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results), results
        assert machine.queue.count_waiting() == {}
        assert not any(resident.num_users for resident in machine.residents)

    play(script())


def test_500_requests_of_16_clients_alternate_between_two_models() -> None:
    async def script() -> None:
        machine = Machine(load_s=1)
        left = iter(range(500))
        served: Counter[str] = Counter()

        async def client(number: int) -> None:
            for step, _ in enumerate(left):
                resident = await machine.take("ab"[(number + step) % 2])
                for _ in range(3):
                    await asyncio.sleep(0)
                machine.end(resident)
                served[resident.file.name] += 1

        clients = [asyncio.create_task(client(number)) for number in range(16)]
        while not all(task.done() for task in clients):
            await asyncio.sleep(0)
            machine.later(0.02)
        await asyncio.gather(*clients)
        assert sum(served.values()) == 500
        # a load serves the 16 clients, the first one those that began with its model
        assert len(machine.loads) <= 500 / 16 + 2

    play(script())
