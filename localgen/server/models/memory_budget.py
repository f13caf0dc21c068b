"""Memory budget: place models on devices and evict idle ones to make room."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile

from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import LoadOptions
from localgen.backends.units import format_size
from localgen.config import ServerSettings
from localgen.machine.gpus import Gpu
from localgen.placement import free_memory
from localgen.placement.backend_choice import Hardware, Placement, choose_placement
from localgen.server.models.draft_choice import DraftChoice
from localgen.server.models.resident import ResidentModel
from localgen.server.models.swap_queue import MustWait


class MemoryBudget:
    """Tracks the memory of resident models in RAM and on GPUs.

    residents: returns the models that take memory: loaded, loading and ending ones. may_evict:
    returns True if a model may be evicted for a file now. unload: unloads a model; its second
    argument is the reason that its clients get. probe_hardware: reads the current state of the
    hardware.
    """

    def __init__(
        self,
        settings: ServerSettings,
        residents: Callable[[], Sequence[ResidentModel]],
        may_evict: Callable[[ModelFile, ResidentModel], bool],
        unload: Callable[[ResidentModel, str], Awaitable[None]],
        probe_hardware: Callable[[], Hardware],
    ) -> None:
        self._settings = settings
        self._residents = residents
        self._may_evict = may_evict
        self._unload = unload
        self._probe_hardware = probe_hardware

    async def place_model(
        self, file: ModelFile, options: LoadOptions, draft_choice: DraftChoice
    ) -> tuple[Placement, int]:
        """Choose a placement for a model and its draft model, evicting idle models to make room.

        Returns the placement and the estimated RAM in bytes (0 on a GPU). Raises InvalidRequest,
        OutOfMemory, or MustWait if it would fit without the models in use.
        """
        placement = await self._place_on_device(file, options, draft_choice.file)
        if placement.on_gpu:
            return placement, 0
        draft = draft_choice.for_placement(placement).file
        # in a thread: it reads the file header
        need = await asyncio.to_thread(
            free_memory.estimate_ram_bytes, file, options, placement.backend, draft=draft
        )
        await self._evict_until_fits(file, placement, need, draft)
        return placement, need

    async def require_possible(self, file: ModelFile, options: LoadOptions) -> None:
        """Raise InvalidRequest if this machine cannot load a model with these options."""
        choose_placement(file, options, await asyncio.to_thread(self._probe_hardware), 0)

    async def _place_on_device(
        self, file: ModelFile, options: LoadOptions, draft: ModelFile | None
    ) -> Placement:
        """Choose the device and evict idle models from its GPUs.

        Raises InvalidRequest, or MustWait if only models in use are in the way.
        """
        there = await asyncio.to_thread(self._probe_hardware)
        need = await asyncio.to_thread(
            free_memory.estimate_gpu_bytes, file, options, there, draft=draft
        )
        try:
            idle_bytes = self._gpu_bytes(lambda resident: resident.is_idle)
            placement = choose_placement(file, options, there.with_freed_memory(idle_bytes), need)
        except InvalidRequest:
            # raises it again if it does not depend on the models in use
            all_bytes = self._gpu_bytes(lambda resident: True)
            possible = choose_placement(file, options, there.with_freed_memory(all_bytes), need)
            raise self._must_wait_for_gpu(file, possible, need) from None
        for gpu in placement.gpus:
            while need > await self._free_gpu_bytes(gpu) and await self.evict_lru(file, gpu):
                pass
            is_held = any(r.is_idle or r.is_ending for r in self._using(gpu))
            if is_held and need > await self._free_gpu_bytes(gpu):
                raise self._must_wait_for_gpu(file, placement, need)
        return placement

    def _must_wait_for_gpu(self, file: ModelFile, placement: Placement, need: int) -> MustWait:
        numbers = f"{file.name} needs about {format_size(need)} of GPU memory"
        return MustWait(self._in_use_message(numbers, file, placement), placement)

    async def _free_gpu_bytes(self, gpu: Gpu) -> int:
        there = await asyncio.to_thread(self._probe_hardware)
        return next(found.free_bytes for found in there.gpus if found.index == gpu.index)

    def _gpu_bytes(self, counts: Callable[[ResidentModel], bool]) -> dict[int, int]:
        """Bytes held by the models for which `counts` is True, by GPU index."""
        held: Counter[int] = Counter()
        for resident in filter(counts, self._residents()):
            for gpu in resident.placement.gpus:
                held[gpu.index] += _used_bytes(resident) // len(resident.placement.gpus)
        return held

    def remaining_limit_bytes(self) -> int | None:
        """RAM left for the next model under the memory limit; None if no limit is set."""
        return None if self._settings.memory_limit is None else max(0, self._free_bytes())

    async def _evict_until_fits(
        self,
        file: ModelFile,
        placement: Placement,
        required_bytes: int,
        draft: ModelFile | None = None,
    ) -> None:
        """Evict idle models from RAM, least recently used first, until the new one fits.

        Raises MustWait if it would fit without the models in use, OutOfMemory if not even then.
        """
        free = self._free_bytes()
        if required_bytes > free + sum(map(_used_bytes, self._evictable(file))):
            both = f"{file.name} with {draft.name} as draft model" if draft else file.name
            idle = [resident for resident in self._using(None) if resident.is_idle]
            available = format_size(max(0, free + sum(map(_used_bytes, idle))))
            numbers = f"{both} needs about {format_size(required_bytes)}, {available} is available"
            if required_bytes > free + sum(map(_used_bytes, self._using(None))):
                raise self._out_of_memory(numbers, draft)
            raise MustWait(self._in_use_message(numbers, file, placement), placement)
        while required_bytes > self._free_bytes() and await self.evict_lru(file):
            pass
        if required_bytes > self._free_bytes() and any(r.is_ending for r in self._using(None)):
            problem = f"{file.name} needs about {format_size(required_bytes)}"
            raise MustWait(self._in_use_message(problem, file, placement), placement)

    def _using(self, gpu: Gpu | None) -> list[ResidentModel]:
        """Models on a GPU (None: in RAM)."""
        return [resident for resident in self._residents() if resident.placement.uses(gpu)]

    def _evictable(self, file: ModelFile, gpu: Gpu | None = None) -> list[ResidentModel]:
        """Models that may be evicted from a GPU (None: from RAM), least recently used first."""
        idle = [resident for resident in self._using(gpu) if resident.is_idle]
        idle.sort(key=lambda resident: resident.last_used_s)
        # if the first is still held, wait for it: the others were used more recently
        return list(takewhile(lambda resident: self._may_evict(file, resident), idle))

    async def evict_lru(self, file: ModelFile, gpu: Gpu | None = None) -> bool:
        """Evict the least recently used idle model. Returns False if there is none."""
        idle = self._evictable(file, gpu)
        if idle:
            reason = f"{idle[0].file.name} was idle and {file.name} needs its memory"
            await self._unload(idle[0], reason)
        return bool(idle)

    async def make_room(self, file: ModelFile, placement: Placement, error: OutOfMemory) -> None:
        """Evict an idle model after a load that ran out of memory: the estimate was too low.

        Does nothing if the model is loaded again. Raises MustWait if all others are in use, and
        the error if there are none.
        """
        beside = [r for r in self._using(placement.gpu) if not r.is_ending]
        if any(resident.file.path == file.path for resident in beside):
            return
        if not await self.evict_lru(file, placement.gpu):
            if not beside:
                raise error
            problem = f"{file.name} ran out of memory while loading"
            raise MustWait(self._in_use_message(problem, file, placement), placement)

    def _in_use_message(self, problem: str, file: ModelFile, placement: Placement) -> str:
        evictable = self._evictable(file, placement.gpu)
        others = [r for r in self._using(placement.gpu) if r not in evictable]
        return f"{problem}; in use: {', '.join(map(_user_name, others))}"

    def _out_of_memory(self, numbers: str, draft: ModelFile | None) -> OutOfMemory:
        limited = self._settings.memory_limit is not None
        way_out = "raise LOCALGEN_MEMORY_LIMIT" if limited else "free memory"
        way_out = f"leave --draft out, or {way_out}" if draft else way_out
        return OutOfMemory(f"{numbers}: use a smaller model or quantization, or {way_out}")

    def _free_bytes(self) -> int:
        return free_memory.free_memory_bytes(
            self._settings.memory_limit,
            [r.info for r in self._residents() if r.info is not None and not r.placement.on_gpu],
            [resident.estimated_bytes for resident in self._residents() if resident.info is None],
        )


def _used_bytes(resident: ResidentModel) -> int:
    if resident.info is None:
        return resident.estimated_bytes
    return free_memory.reserved_bytes(resident.info)


def _user_name(resident: ResidentModel) -> str:
    name = resident.file.name
    return f"{name} (process {resident.engine.pid} ends)" if resident.is_ending else name
