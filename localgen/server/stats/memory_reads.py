"""What each loaded model reads in a step, and what its memory can give: known without measuring.

Files are read in a thread, once for each model and only when somebody looks.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from localgen.backends.errors import LocalgenError
from localgen.backends.formats.architecture.model_shape import ELEMENT_BYTES, read_bytes
from localgen.backends.formats.model_facts import shape_of
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.formats.weight_sizes import weights_of
from localgen.backends.machine_stats import ReadCost
from localgen.backends.model_info import ModelInfo
from localgen.machine.bandwidth import Bandwidth, known_gpu_bandwidth, known_memory_bandwidth
from localgen.machine.gpus import Gpu, nvidia_gpus
from localgen.server.models.resident import Resident

_log = logging.getLogger("localgen.server")
UNMEASURED = "localgen plan measures it"
# the speed may be measured while we run
_LOOK_AGAIN = 40


class ReadCosts:
    """Costs by model. The first questions about one get None, until its files are read."""

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-costs")
        self._known: dict[str, Future[ReadCost | None]] = {}
        self._asked = 0

    def of(self, resident: Resident) -> ReadCost | None:
        """None: not known (yet)."""
        info = resident.info
        if info is None:
            return None
        self._asked += 1
        cost = self._known.get(resident.id)
        unmeasured = cost is not None and cost.done() and _lacks_speed(cost)
        if cost is None or (unmeasured and self._asked % _LOOK_AGAIN == 0):
            gpus = resident.placement.gpus
            self._known[resident.id] = self._reader.submit(read_cost, resident.file, info, gpus)
        if cost is None or not cost.done():
            return None
        return cost.result()


def _lacks_speed(cost: Future[ReadCost | None]) -> bool:
    found = cost.result()
    return found is not None and found.bytes_per_s is None


def read_cost(file: ModelFile, info: ModelInfo, gpus: tuple[Gpu, ...]) -> ReadCost | None:
    """Of a loaded model. None: its files do not tell."""
    try:
        return _read_cost(file, info, gpus)
    except (LocalgenError, OSError, ValueError):
        return None
    except Exception:  # whoever looks at the server shall see the rest of it
        _log.exception("what a step of %s reads cannot be reckoned", info.name)
        return None


def _read_cost(file: ModelFile, info: ModelInfo, gpus: tuple[Gpu, ...]) -> ReadCost | None:
    shape = shape_of(file)
    weights = weights_of(file, shape)
    if shape is None:
        return None
    kinds = (info.options.cache_type_k or "f16", info.options.cache_type_v or "f16")
    key, value = (kind if kind in ELEMENT_BYTES else "f16" for kind in kinds)
    # windows shorten what is read of long contexts: so much a token where half of it is full
    ctx = max(1, info.ctx // 2)
    cost = ReadCost(
        weights_bytes=weights.read_bytes,
        kv_token_bytes=read_bytes(shape.caches, key, value, ctx) / ctx,
        medium="RAM",
        bytes_per_s=None,
        how=UNMEASURED,
    )
    return _with_speed(cost, info, gpus)


def _with_speed(cost: ReadCost, info: ModelInfo, gpus: tuple[Gpu, ...]) -> ReadCost:
    if "GPU" not in info.processor:
        return _by(cost, "RAM", known_memory_bandwidth())
    if info.processor != "100% GPU":
        return replace(cost, medium="GPU and RAM", how="layers lie in both: no one limit")
    used = gpus or nvidia_gpus()[:1]
    if not used:
        return replace(cost, medium="GPU", how="its driver does not tell")
    one = known_gpu_bandwidth(used[0])
    # each reads its part of every layer at the same time
    whole = one and Bandwidth(one.bytes_per_s * len(used), one.how)
    return _by(cost, " + ".join(f"GPU {gpu.index}" for gpu in used), whole)


def _by(cost: ReadCost, medium: str, found: Bandwidth | None) -> ReadCost:
    if found is None:
        return replace(cost, medium=medium)
    return replace(cost, medium=medium, bytes_per_s=found.bytes_per_s, how=found.how)
