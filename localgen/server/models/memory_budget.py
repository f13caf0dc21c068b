"""Room for models: where the next one goes, and which ones have to leave for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from localgen.backends.errors import LocalgenError, ModelBusy, OutOfMemory
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import LoadOptions
from localgen.backends.units import as_gb
from localgen.config import Settings
from localgen.machine.gpus import Gpu
from localgen.placement import free_memory
from localgen.placement.backend_choice import Hardware, Placement, choose
from localgen.server.models.draft_choice import Drafting
from localgen.server.models.resident import Resident


class Room:
    """The books of main memory and of every GPU.

    residents: models loaded or loading. remove: unloads one, for a reason that its users are told.
    look: what this machine has now.
    """

    def __init__(
        self,
        settings: Settings,
        residents: Callable[[], Sequence[Resident]],
        remove: Callable[[Resident, str], Awaitable[None]],
        look: Callable[[], Hardware],
    ) -> None:
        self._settings = settings
        self._residents = residents
        self._remove = remove
        self._look = look

    async def make_for(
        self, file: ModelFile, options: LoadOptions, drafting: Drafting
    ) -> tuple[Placement, int]:
        """Where a model and its draft model go, with room made, and what they need of main memory.
        InvalidRequest, OutOfMemory, ModelBusy."""
        placement = await self._place(file, options, drafting.file)
        if placement.on_gpu:
            return placement, 0
        draft = drafting.on(placement).file
        # in a thread: it reads the beginning of the file
        need = await asyncio.to_thread(
            free_memory.need_bytes, file, options, placement.backend, draft=draft
        )
        await self._make_room(file, need, draft)
        return placement, need

    async def _place(
        self, file: ModelFile, options: LoadOptions, draft: ModelFile | None
    ) -> Placement:
        """Where a model goes, with room made on its GPU. InvalidRequest."""
        there = await asyncio.to_thread(self._look)
        need = await asyncio.to_thread(
            free_memory.gpu_need_bytes, file, options, there, draft=draft
        )
        placement = choose(file, options, there.with_room(self._idle_on_gpus()), need)
        for gpu in placement.gpus:
            while need > await self._free_on(gpu) and await self.evict_one(file, gpu):
                pass
        return placement

    async def _free_on(self, gpu: Gpu) -> int:
        there = await asyncio.to_thread(self._look)
        return next(found.free_bytes for found in there.gpus if found.index == gpu.index)

    def _idle_on_gpus(self) -> dict[int, int]:
        """Bytes that idle models hold on each GPU."""
        held: Counter[int] = Counter()
        for resident in self._residents():
            for gpu in resident.placement.gpus if resident.idle else ():
                held[gpu.index] += _taken(resident) // len(resident.placement.gpus)
        return held

    def limit_bytes(self) -> int | None:
        """What the next model may take, where a limit is set."""
        return None if self._settings.memory_limit is None else max(0, self._free_bytes())

    async def _make_room(self, file: ModelFile, need: int, draft: ModelFile | None = None) -> None:
        """Unload idle models, least recently used first, until the next one fits.

        ModelBusy if it would fit without those in use, OutOfMemory if it would not.
        """
        free = self._free_bytes()
        idle = self._idle()
        if need > free + sum(_taken(resident) for resident in idle):
            had = free + sum(_taken(resident) for resident in idle)
            raise self._no_room(file, need, had, draft)
        while need > self._free_bytes() and await self.evict_one(file):
            pass

    def _idle(self, gpu: Gpu | None = None) -> list[Resident]:
        """Models that could go, least recently used first: those in main memory, or on a GPU."""
        idle = [r for r in self._residents() if r.idle and r.placement.uses(gpu)]
        return sorted(idle, key=lambda resident: resident.last_used_s)

    async def evict_one(self, file: ModelFile, gpu: Gpu | None = None) -> bool:
        """Unload the idle model that was used least recently; False if there is none."""
        idle = self._idle(gpu)
        if idle:
            reason = f"{idle[0].file.name} was idle and {file.name} needs its memory"
            await self._remove(idle[0], reason)
        return bool(idle)

    def _no_room(
        self, file: ModelFile, need: int, free: int, draft: ModelFile | None
    ) -> LocalgenError:
        busy = [r for r in self._residents() if not r.idle and not r.placement.on_gpu]
        both = f"{file.name} with {draft.name} to draft for it" if draft else file.name
        numbers = f"{both} needs about {as_gb(need)}, {as_gb(max(0, free))} can be had"
        if need <= free + sum(_taken(resident) for resident in busy):
            names = ", ".join(resident.file.name for resident in busy)
            return ModelBusy(
                f"{numbers} while in use: {names}; wait, or `localgen stop {busy[0].file.name}`"
            )
        limited = self._settings.memory_limit is not None
        way_out = "raise LOCALGEN_MEMORY_LIMIT" if limited else "free memory"
        way_out = f"leave --draft out, or {way_out}" if draft else way_out
        return OutOfMemory(f"{numbers}: take a smaller model or quantization, or {way_out}")

    def _free_bytes(self) -> int:
        return free_memory.free_bytes(
            self._settings.memory_limit,
            [r.info for r in self._residents() if r.info is not None and not r.placement.on_gpu],
            [resident.estimate_bytes for resident in self._residents() if resident.info is None],
        )


def _taken(resident: Resident) -> int:
    if resident.info is None:
        return resident.estimate_bytes
    return free_memory.footprint(resident.info)
