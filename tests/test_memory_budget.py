"""Room on a GPU for a model: idle models are evicted, those in use are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.config import ServerSettings
from localgen.machine.gpus import Gpu
from localgen.placement import free_memory
from localgen.placement.backend_choice import Hardware, Placement
from localgen.server.models.draft_choice import DraftChoice
from localgen.server.models.memory_budget import MemoryBudget
from localgen.server.models.resident import ResidentModel
from localgen.server.models.swap_queue import MustWait

GIB = 1 << 30
GPU = Gpu(0, "H100", 80 * GIB, 10 * GIB, (9, 0))
FOLDER = ModelFile("hf", Path("/models/hf"), 60 * GIB, (), "file")
GGUF = ModelFile("gguf", Path("/models/big.gguf"), 60 * GIB, (), "file")


def resident(name: str, users: int) -> ResidentModel:
    """A model of 70 GiB on the GPU."""
    return cast(
        ResidentModel,
        _Resident(ModelFile(name, Path(f"/models/{name}"), 1, (), "file"), users),
    )


class _Resident:
    estimated_bytes = 70 * GIB
    info: ModelInfo | None = None
    placement = Placement("cuda", "test", (GPU,))
    last_used_s = 0.0
    is_ending = False

    def __init__(self, file: ModelFile, users: int) -> None:
        self.file, self.is_idle = file, not users


class Card:
    """A GPU of 80 GiB whose free memory is what its residents leave."""

    def __init__(
        self,
        residents: Sequence[ResidentModel],
        may_evict: Callable[[ModelFile, ResidentModel], bool],
    ) -> None:
        self.residents = list(residents)
        self.budget = MemoryBudget(
            ServerSettings(Path("/none"), Path("/none"), memory_limit=1 << 50),
            lambda: self.residents,
            may_evict,
            self.unload,
            self.hardware,
        )

    def hardware(self) -> Hardware:
        used = sum(r.estimated_bytes for r in self.residents)
        return Hardware((replace(GPU, free_bytes=80 * GIB - used),), (), True, lambda: False)

    async def unload(self, model: ResidentModel, reason: str) -> None:
        self.residents.remove(model)

    def place(self, file: ModelFile, **options: Any) -> Placement:
        made = self.budget.place_model(file, LoadOptions(**options), DraftChoice())
        return asyncio.run(made)[0]


@pytest.fixture(autouse=True)
def needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new model needs 60 GiB, wherever it runs."""
    monkeypatch.setattr(free_memory, "estimate_gpu_bytes", lambda *args, **others: 60 * GIB)
    monkeypatch.setattr(free_memory, "estimate_ram_bytes", lambda *args, **others: 60 * GIB)


def evictable(file: ModelFile, model: ResidentModel) -> bool:
    return model.is_idle


def test_an_idle_model_makes_room() -> None:
    card = Card([resident("idle", 0)], evictable)
    assert card.place(FOLDER).on_gpu
    assert card.residents == []


def test_a_checkpoint_waits_for_the_gpu_and_a_gguf_file_runs_on_the_cpu() -> None:
    card = Card([resident("used", 1)], evictable)
    with pytest.raises(MustWait, match=r"hf needs about 64\.4 GB of .*; in use: used") as got:
        card.place(FOLDER)
    assert got.value.placement is not None
    assert got.value.wants_memory_of(card.residents[0])
    assert not card.place(GGUF).on_gpu


def test_an_idle_model_that_is_held_is_waited_for() -> None:
    card = Card([resident("held", 0)], lambda file, model: False)
    for file in (FOLDER, GGUF):
        with pytest.raises(MustWait, match="in use: held"):
            card.place(file)


def test_impossible_options_are_refused_at_once() -> None:
    card = Card([resident("used", 1)], evictable)
    with pytest.raises(InvalidRequest, match="--tp 2 needs 2 GPUs"):
        card.place(FOLDER, tp=2)
