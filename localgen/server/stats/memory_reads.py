"""Memory traffic per step of each loaded model, and the bandwidth of its memory.

Computed from the model files, on demand, once per model, in a background thread.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from localgen.backends.errors import LocalgenError
from localgen.backends.formats.architecture.model_shape import (
    CACHE_ELEMENT_BYTES,
    kv_cache_read_bytes,
)
from localgen.backends.formats.model_facts import read_model_shape
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.formats.weight_sizes import read_weight_sizes
from localgen.backends.machine_stats import ReadCost
from localgen.backends.model_info import ModelInfo
from localgen.machine.bandwidth import Bandwidth, cached_gpu_bandwidth, cached_memory_bandwidth
from localgen.machine.gpus import Gpu, nvidia_gpus
from localgen.server.models.resident import ResidentModel

_log = logging.getLogger("localgen.server")
UNMEASURED_HINT = "not measured, run localgen plan"
# check again now and then: another process may have measured the bandwidth
_RETRY_INTERVAL_LOOKUPS = 40


class ReadCostCache:
    """Caches the read cost of each loaded model."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="read-costs")
        self._costs: dict[str, Future[ReadCost | None]] = {}
        self._num_lookups = 0

    def lookup(self, resident: ResidentModel) -> ReadCost | None:
        """Return the read cost, or None while it is computed or if it is unknown."""
        info = resident.info
        if info is None:
            return None
        self._num_lookups += 1
        cost = self._costs.get(resident.id)
        unmeasured = cost is not None and cost.done() and _lacks_bandwidth(cost)
        if cost is None or (unmeasured and self._num_lookups % _RETRY_INTERVAL_LOOKUPS == 0):
            gpus = resident.placement.gpus
            self._costs[resident.id] = self._executor.submit(
                compute_read_cost, resident.file, info, gpus
            )
        if cost is None or not cost.done():
            return None
        return cost.result()


def _lacks_bandwidth(cost: Future[ReadCost | None]) -> bool:
    found = cost.result()
    return found is not None and found.bytes_per_s is None


def compute_read_cost(file: ModelFile, info: ModelInfo, gpus: tuple[Gpu, ...]) -> ReadCost | None:
    """Compute the read cost of a loaded model. Returns None if its files lack the facts."""
    try:
        return _compute_read_cost(file, info, gpus)
    except (LocalgenError, OSError, ValueError):
        return None
    except Exception:  # must not break the other statistics
        _log.exception("cannot compute the read cost of %s", info.name)
        return None


def _compute_read_cost(file: ModelFile, info: ModelInfo, gpus: tuple[Gpu, ...]) -> ReadCost | None:
    shape = read_model_shape(file)
    weights = read_weight_sizes(file, shape)
    if shape is None:
        return None
    kinds = (info.options.cache_type_k or "f16", info.options.cache_type_v or "f16")
    key, value = (kind if kind in CACHE_ELEMENT_BYTES else "f16" for kind in kinds)
    # mean per token with the context half full: sliding windows reduce reads of long contexts
    ctx = max(1, info.ctx // 2)
    cost = ReadCost(
        weights_bytes=weights.read_bytes,
        kv_token_bytes=kv_cache_read_bytes(shape.layer_caches, key, value, ctx) / ctx,
        medium="RAM",
        bytes_per_s=None,
        how=UNMEASURED_HINT,
    )
    return _with_bandwidth(cost, info, gpus)


def _with_bandwidth(cost: ReadCost, info: ModelInfo, gpus: tuple[Gpu, ...]) -> ReadCost:
    if "GPU" not in info.processor:
        return _with_medium(cost, "RAM", cached_memory_bandwidth())
    if info.processor != "100% GPU":
        return replace(cost, medium="GPU and RAM", how="layers are split, no single limit")
    used = gpus or nvidia_gpus()[:1]
    if not used:
        return replace(cost, medium="GPU", how="not reported by the driver")
    one = cached_gpu_bandwidth(used[0])
    # all GPUs read their shard of each layer at the same time
    whole = one and Bandwidth(one.bytes_per_s * len(used), one.source)
    return _with_medium(cost, " + ".join(f"GPU {gpu.index}" for gpu in used), whole)


def _with_medium(cost: ReadCost, medium: str, bandwidth: Bandwidth | None) -> ReadCost:
    if bandwidth is None:
        return replace(cost, medium=medium)
    return replace(cost, medium=medium, bytes_per_s=bandwidth.bytes_per_s, how=bandwidth.source)
