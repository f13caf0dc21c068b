"""Models to propose to a new user: those that fit in this machine's memory now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localgen.machine.bandwidth import Bandwidth

# slower than one reads
_MIN_TOKENS_PER_S = 6.0
# by which models are chosen where it was not measured: that of a laptop
_ASSUMED_BYTES_PER_S = {"CPU": 25e9, "GPU": 250e9}


@dataclass(frozen=True, slots=True)
class SuggestedModel:
    """A model that fits. size_bytes: of its download.

    most_tokens_per_s: upper limit of the decode speed, from the memory bandwidth; None if that was
    never measured here.
    """

    name: str
    title: str
    size_bytes: int
    is_installed: bool
    most_tokens_per_s: float | None = None


def suggested_models(count: int) -> list[SuggestedModel]:
    """Return smollm2, and the largest chat models that fit and are fast enough to read along.

    Takes some 0.1 s. Measures nothing.
    """
    from localgen.hub import catalog
    from localgen.hub.packaged import SMOLLM2, SMOLLM2_BYTES, SMOLLM2_IN_CATALOG, SMOLLM2_TITLE
    from localgen.hub.quant_choice import QuantOption, available_memory, fit_quants
    from localgen.hub.resolve import is_installed
    from localgen.machine.bandwidth import cached_gpu_bandwidth, cached_memory_bandwidth
    from localgen.machine.gpus import nvidia_gpus

    memory = available_memory()
    ram, gpus = cached_memory_bandwidth(), [cached_gpu_bandwidth(gpu) for gpu in nvidia_gpus()]
    bandwidths = {"CPU": ram, "GPU": gpus[0] if gpus else None}
    chosen = []
    for entry in catalog.catalog_entries():
        size_bytes = entry.gguf.size(entry.gguf.quant)
        if not size_bytes or entry.kind != "chat" or entry.alias == SMOLLM2_IN_CATALOG:
            continue
        (fit,) = fit_quants([QuantOption(entry.gguf.quant, size_bytes)], memory, entry)
        if fit.place is None:
            continue
        share_read = (entry.active_params or 1) / (entry.params or 1) if entry.active_params else 1
        read_bytes = share_read * size_bytes
        speed = _speed(bandwidths[fit.place], read_bytes)
        if (speed or _ASSUMED_BYTES_PER_S[fit.place] / read_bytes) >= _MIN_TOKENS_PER_S:
            chosen.append((entry, size_bytes, speed))
    chosen.sort(key=lambda each: -each[1])
    small_speed = _speed(bandwidths["CPU"], SMOLLM2_BYTES)
    return [
        SuggestedModel(SMOLLM2, SMOLLM2_TITLE, SMOLLM2_BYTES, is_installed(SMOLLM2), small_speed),
        *(
            SuggestedModel(entry.alias, entry.title, size, is_installed(entry.alias), speed)
            for entry, size, speed in chosen[: count - 1]
        ),
    ]


def _speed(bandwidth: Bandwidth | None, bytes_per_token: float) -> float | None:
    return bandwidth.bytes_per_s / bytes_per_token if bandwidth is not None else None
