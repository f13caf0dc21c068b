"""Memory budget: place models on devices and evict idle ones to make room."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from localgen.backends.errors import LocalgenError, ModelBusy, OutOfMemory
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import LoadOptions
from localgen.backends.units import format_size
from localgen.config import ServerSettings
from localgen.machine.gpus import Gpu
from localgen.placement import free_memory
from localgen.placement.backend_choice import Hardware, Placement, choose_placement
from localgen.server.models.draft_choice import DraftChoice
from localgen.server.models.resident import ResidentModel


class MemoryBudget:
    """Tracks the memory of resident models in RAM and on GPUs.

    residents: returns the loaded and loading models. unload: unloads a model; its second argument
    is the reason that its clients get. probe_hardware: reads the current state of the hardware.
    """

    def __init__(
        self,
        settings: ServerSettings,
        residents: Callable[[], Sequence[ResidentModel]],
        unload: Callable[[ResidentModel, str], Awaitable[None]],
        probe_hardware: Callable[[], Hardware],
    ) -> None:
        self._settings = settings
        self._residents = residents
        self._unload = unload
        self._probe_hardware = probe_hardware

    async def place_model(
        self, file: ModelFile, options: LoadOptions, draft_choice: DraftChoice
    ) -> tuple[Placement, int]:
        """Choose a placement for a model and its draft model, evicting idle models to make room.

        Returns the placement and the estimated RAM in bytes (0 on a GPU). Raises InvalidRequest,
        OutOfMemory, or ModelBusy if it would fit without the models in use.
        """
        placement = await self._place_on_device(file, options, draft_choice.file)
        if placement.on_gpu:
            return placement, 0
        draft = draft_choice.for_placement(placement).file
        # in a thread: it reads the file header
        need = await asyncio.to_thread(
            free_memory.estimate_ram_bytes, file, options, placement.backend, draft=draft
        )
        await self._evict_until_fits(file, need, draft)
        return placement, need

    async def require_possible(self, file: ModelFile, options: LoadOptions) -> None:
        """Raise InvalidRequest if this machine cannot load a model with these options."""
        choose_placement(file, options, await asyncio.to_thread(self._probe_hardware), 0)

    async def _place_on_device(
        self, file: ModelFile, options: LoadOptions, draft: ModelFile | None
    ) -> Placement:
        """Choose the device and evict idle models from its GPUs. Raises InvalidRequest."""
        there = await asyncio.to_thread(self._probe_hardware)
        need = await asyncio.to_thread(
            free_memory.estimate_gpu_bytes, file, options, there, draft=draft
        )
        placement = choose_placement(
            file, options, there.with_freed_memory(self._idle_gpu_bytes()), need
        )
        for gpu in placement.gpus:
            while need > await self._free_gpu_bytes(gpu) and await self.evict_lru(file, gpu):
                pass
        return placement

    async def _free_gpu_bytes(self, gpu: Gpu) -> int:
        there = await asyncio.to_thread(self._probe_hardware)
        return next(found.free_bytes for found in there.gpus if found.index == gpu.index)

    def _idle_gpu_bytes(self) -> dict[int, int]:
        """Bytes held by idle models, by GPU index."""
        held: Counter[int] = Counter()
        for resident in self._residents():
            for gpu in resident.placement.gpus if resident.is_idle else ():
                held[gpu.index] += _used_bytes(resident) // len(resident.placement.gpus)
        return held

    def remaining_limit_bytes(self) -> int | None:
        """RAM left for the next model under the memory limit; None if no limit is set."""
        return None if self._settings.memory_limit is None else max(0, self._free_bytes())

    async def _evict_until_fits(
        self, file: ModelFile, required_bytes: int, draft: ModelFile | None = None
    ) -> None:
        """Evict idle models from RAM, least recently used first, until the new one fits.

        Raises ModelBusy if it would fit without the models in use, OutOfMemory if not even then.
        """
        free = self._free_bytes()
        idle = self._idle_residents()
        if required_bytes > free + sum(_used_bytes(resident) for resident in idle):
            had = free + sum(_used_bytes(resident) for resident in idle)
            raise self._does_not_fit_error(file, required_bytes, had, draft)
        while required_bytes > self._free_bytes() and await self.evict_lru(file):
            pass

    def _idle_residents(self, gpu: Gpu | None = None) -> list[ResidentModel]:
        """Idle models on a GPU (None: in RAM), least recently used first."""
        idle = [r for r in self._residents() if r.is_idle and r.placement.uses(gpu)]
        return sorted(idle, key=lambda resident: resident.last_used_s)

    async def evict_lru(self, file: ModelFile, gpu: Gpu | None = None) -> bool:
        """Evict the least recently used idle model. Returns False if there is none."""
        idle = self._idle_residents(gpu)
        if idle:
            reason = f"{idle[0].file.name} was idle and {file.name} needs its memory"
            await self._unload(idle[0], reason)
        return bool(idle)

    def _does_not_fit_error(
        self, file: ModelFile, required_bytes: int, free_bytes: int, draft: ModelFile | None
    ) -> LocalgenError:
        busy = [r for r in self._residents() if not r.is_idle and not r.placement.on_gpu]
        both = f"{file.name} with {draft.name} as draft model" if draft else file.name
        free = format_size(max(0, free_bytes))
        numbers = f"{both} needs about {format_size(required_bytes)}, {free} is available"
        if required_bytes <= free_bytes + sum(_used_bytes(resident) for resident in busy):
            names = ", ".join(resident.file.name for resident in busy)
            return ModelBusy(
                f"{numbers}; in use: {names}; wait, or `localgen stop {busy[0].file.name}`"
            )
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
    return free_memory.loaded_model_bytes(resident.info)
