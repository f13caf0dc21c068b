"""Estimate the memory a model needs, and the memory free for more models."""

from __future__ import annotations

from collections.abc import Iterable

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.model_facts import read_model_shape
from localgen.backends.formats.model_files import ModelFile
from localgen.backends.formats.weight_sizes import read_weight_sizes
from localgen.backends.memory.system import available_memory_bytes
from localgen.backends.model_info import DraftInfo, LoadOptions, ModelInfo
from localgen.placement.backend_choice import Hardware
from localgen.placement.footprint import RunnerKind, estimate_footprint, loaded_weight_bytes


def estimate_ram_bytes(
    file: ModelFile,
    options: LoadOptions,
    backend: str = "llamacpp",
    *,
    draft: ModelFile | None = None,
) -> int:
    """Main memory in bytes that a model and its draft model need.

    With the requested context, or a useful one. Reads the headers of their files.
    """
    runner: RunnerKind = "llamacpp" if backend == "llamacpp" else "cuda on cpu"
    return sum(_estimate_bytes(each, options, runner) for each in (file, draft) if each is not None)


def estimate_gpu_bytes(
    file: ModelFile, options: LoadOptions, hardware: Hardware, *, draft: ModelFile | None = None
) -> int:
    """Memory in bytes per GPU on the cuda backend; 0 if it cannot run here."""
    if hardware.cuda_unavailable_reason is not None:
        return 0
    each = (file, draft)
    need = sum(_estimate_bytes(one, options, "cuda") for one in each if one is not None)
    return need // (options.tp or 1)


def _estimate_bytes(file: ModelFile, options: LoadOptions, runner: RunnerKind) -> int:
    size, params = (file.size_bytes, None) if runner == "llamacpp" else _weight_sizes(file)
    weights = loaded_weight_bytes(size, params, runner, is_gguf=file.is_gguf)
    footprint = estimate_footprint(weights, read_model_shape(file), runner, options)
    return footprint.need_bytes(options.ctx)


def _weight_sizes(file: ModelFile) -> tuple[int, int | None]:
    """Bytes and number of the weights, as far as known."""
    try:
        found = read_weight_sizes(file, None)
    except LoadFailed:
        return file.size_bytes, None  # loading the file reports the error
    return found.size_bytes, found.params


def loaded_model_bytes(info: ModelInfo) -> int:
    """Memory of a loaded model and its draft model: weights, KV pool and compute buffers."""
    return sum(one.size_bytes + one.kv_bytes + one.work_bytes for one in _model_and_draft(info))


def reserved_bytes(info: ModelInfo) -> int:
    """As loaded_model_bytes, with the RAM that prefixes outside of the KV pool may take."""
    return loaded_model_bytes(info) + (info.options.kv_ram or 0)


def _model_and_draft(info: ModelInfo) -> tuple[ModelInfo | DraftInfo, ...]:
    return (info,) if info.draft is None else (info, info.draft)


def free_memory_bytes(
    limit: int | None, loaded: Iterable[ModelInfo], loading: Iterable[int]
) -> int:
    """Memory in bytes for more models; negative if overcommitted.

    limit: for all models together, or None for the machine's memory. loading: estimates for models
    being loaded.
    """
    reserved = sum(loading)
    if limit is not None:
        return limit - reserved - sum(reserved_bytes(info) for info in loaded)
    # mapped weights are page cache, which the system counts as available although it is needed
    mapped = sum(
        one.size_bytes for info in loaded if info.options.mmap for one in _model_and_draft(info)
    )
    return available_memory_bytes() - reserved - mapped
