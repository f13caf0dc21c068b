"""Engines that do not exit: their memory counts as taken, and other models go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_server import ENGINE
from serving import settings_in, wait_until

from localgen.backends.engine_stats import EngineStats, KVTierStats
from localgen.backends.errors import LoadFailed
from localgen.backends.model_info import LoadOptions
from localgen.placement.backend_choice import Hardware, detect_hardware
from localgen.placement.footprint import estimate_footprint
from localgen.server.models import engine_client, engine_pool
from localgen.server.models.engine_process import EngineProcess
from localgen.server.models.manager import ModelManager
from localgen.server.models.resident import ResidentModel, model_id

# minimum memory of a model, however small its file
LEAST = estimate_footprint(0, None).need_bytes()
ROOM_FOR_ONE, ROOM_FOR_TWO = LEAST * 3 // 2, LEAST * 5 // 2


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines ignore SIGKILL, as during a system call that cannot be interrupted."""
    monkeypatch.setattr(EngineProcess, "kill", lambda _: None)
    monkeypatch.setattr(engine_pool, "EXIT_WAIT_S", 0.2)


class Models:
    """A manager of models a, b, …, each of which takes LEAST bytes."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        probes = settings.pop("probe_hardware", detect_hardware)
        self.manager = ModelManager(
            settings_in(folder, **settings), engine_command=ENGINE, probe_hardware=probes
        )

    def path(self, name: str) -> str:
        path = self.folder / f"{name}.gguf"
        if not path.exists():
            path.write_text(json.dumps({"kv_bytes": LEAST}))
        return str(path)

    @asynccontextmanager
    async def hold(self, name: str, ctx: int | None = None) -> AsyncIterator[ResidentModel]:
        options = LoadOptions(ctx=ctx)
        async with self.manager.acquire(self.path(name), options, allow_paths=True) as (held, _):
            yield held

    async def use(self, name: str, ctx: int | None = None) -> ResidentModel:
        async with self.hold(name, ctx) as held:
            return held

    async def unload(self, name: str) -> None:
        assert await self.manager.unload(self.path(name), allow_paths=True)

    @property
    def loaded(self) -> list[str]:
        return [resident.file.name for resident in self.manager.residents]


def play(script: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(script, 60))


async def until(true: Callable[[], object]) -> None:
    while not true():
        await asyncio.sleep(0.01)


@contextmanager
def stopped(resident: ResidentModel) -> Iterator[None]:
    """The engine is stopped inside the block, and gone afterwards."""
    os.kill(resident.engine.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(resident.engine.pid).status() == psutil.STATUS_STOPPED)
    try:
        yield
    finally:
        os.killpg(resident.engine.pid, signal.SIGKILL)


@pytest.mark.usefixtures("unkillable")
def test_an_engine_that_cannot_be_killed_blocks_no_other_model(tmp_path: Path) -> None:
    async def script() -> None:
        models = Models(tmp_path, memory_limit=ROOM_FOR_TWO)
        a = await models.use("a")
        with stopped(a):
            await models.unload("a")
            assert models.loaded == []
            await models.use("b")
            assert models.loaded == ["b"]
            assert psutil.pid_exists(a.engine.pid)
        await models.manager.close()

    play(script())


@pytest.mark.usefixtures("unkillable")
def test_the_memory_of_an_engine_is_taken_until_it_is_gone(tmp_path: Path) -> None:
    async def script() -> None:
        models = Models(tmp_path, memory_limit=ROOM_FOR_ONE)
        a = await models.use("a")
        waits: list[str] = []
        with stopped(a):
            await models.unload("a")
            wanted = models.manager.acquire(
                models.path("b"), allow_paths=True, on_wait=waits.append
            )
            loading = asyncio.create_task(wanted.__aenter__())
            await until(lambda: waits)
            assert f"in use: a (process {a.engine.pid} ends)" in waits[0]
            assert models.loaded == []
        await loading
        assert not psutil.pid_exists(a.engine.pid)
        assert models.loaded == ["b"]
        await wanted.__aexit__(None, None, None)
        await models.manager.close()

    play(script())


@pytest.mark.usefixtures("unkillable")
def test_a_killed_engine_gives_its_memory_to_others_when_it_is_gone(tmp_path: Path) -> None:
    async def script() -> None:
        models = Models(tmp_path, memory_limit=ROOM_FOR_ONE)
        async with models.hold("a") as a:
            waiting = asyncio.create_task(models.use("b"))
            await until(models.manager.count_waiting)
            with stopped(a):
                killing = asyncio.create_task(a.engine.kill("it hangs"))
                await until(lambda: not models.loaded)
                await asyncio.sleep(0.5)  # b would have been loaded by now
                assert models.manager.count_waiting() == {"b": 1}
                assert models.loaded == []
            await waiting
            assert not psutil.pid_exists(a.engine.pid)
            await killing
        assert models.loaded == ["b"]
        await models.manager.close()

    play(script())


@pytest.mark.usefixtures("unkillable")
def test_a_server_exits_although_an_engine_does_not(tmp_path: Path) -> None:
    async def script() -> None:
        models = Models(tmp_path)
        with stopped(await models.use("a")):
            await models.manager.close()
            assert models.loaded == []

    play(script())


def test_an_engine_that_does_not_start_fails_the_load(tmp_path: Path) -> None:
    models = Models(tmp_path)
    missing = str(tmp_path / "no-such-program")
    models.manager = ModelManager(settings_in(tmp_path), engine_command=[missing])

    async def script() -> None:
        for _ in range(2):
            with pytest.raises(LoadFailed, match="cannot load a: its engine process does not"):
                await models.use("a")
        assert models.loaded == []
        await models.manager.close()

    play(script())


def test_the_id_of_a_loaded_model_is_that_of_its_file_at_load(tmp_path: Path) -> None:
    models = Models(tmp_path)

    async def script() -> None:
        async with models.hold("a") as held:
            known = held.id
            assert known == model_id(held.file)
            Path(models.path("a")).unlink()
            assert held.id == known
            assert await models.manager.unload(known)
        await models.manager.close()

    play(script())


def test_a_request_between_two_loads_keeps_the_server_from_exiting(tmp_path: Path) -> None:
    probes, may_probe = threading.Event(), threading.Event()

    def probe() -> Hardware:
        probes.set()
        may_probe.wait(60)
        return detect_hardware()

    async def script() -> None:
        models = Models(tmp_path, probe_hardware=probe)
        manager = models.manager
        first = asyncio.create_task(models.use("a", ctx=512))
        await until(probes.is_set)
        assert manager.idle_s == 0, "it is placed"
        may_probe.set()
        await first
        assert manager.idle_s > 0
        may_probe.clear()
        probes.clear()
        larger = asyncio.create_task(models.use("a", ctx=1024))
        await until(probes.is_set)
        assert models.loaded == []
        assert manager.idle_s == 0, "it is loaded again"
        may_probe.set()
        await larger
        await manager.close()

    play(script())


@pytest.mark.parametrize("unsaved", [0, 4096])
def test_an_engine_has_time_to_save_prefixes_if_it_has_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsaved: int
) -> None:
    monkeypatch.setattr(engine_client, "_EXIT_TIMEOUT_S", 0.1)
    disk = KVTierStats(
        tier="disk",
        blocks=1,
        num_bytes=1,
        limit_bytes=2,
        hit_tokens_total=0,
        saved_s_total=0.0,
        unsaved_tokens=unsaved,
    )
    (tmp_path / "a.gguf").write_text(json.dumps({"kv_bytes": LEAST, "save_s": 1.0}))

    async def script() -> None:
        models = Models(tmp_path)
        a = await models.use("a")
        a.engine.stats = EngineStats(kv_tiers=(disk,))
        await models.unload("a")
        assert not psutil.pid_exists(a.engine.pid)
        await models.manager.close()

    play(script())
    assert (tmp_path / "a.gguf.saved").exists() is bool(unsaved)
