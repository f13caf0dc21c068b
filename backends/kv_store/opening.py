"""Sizes of the tiers as requested or by default, and the store of a model."""

from __future__ import annotations

from pathlib import Path

from localgen.backends.errors import InvalidRequest
from localgen.backends.kv_store.block_file import BlockRefused
from localgen.backends.kv_store.disk_tier import DiskTier
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.memory.load_defaults import DEFAULT_KV_DISK_BYTES, default_kv_ram_bytes
from localgen.backends.memory.system import total_memory_bytes
from localgen.backends.model_info import ModelLoadRequest, option_flag


def resolve_tier_sizes(request: ModelLoadRequest, reason: str) -> tuple[int, int, str]:
    """Bytes of RAM and of disk, and a note if they are 0 although not switched off.

    reason: why the model can have no tiers, or empty. Raises InvalidRequest if they are requested
    nevertheless.
    """
    requested = request.options
    wanted = [name for name in ("kv_ram", "kv_disk") if getattr(requested, name)]
    if wanted and reason:
        flag = option_flag(wanted[0])
        raise InvalidRequest(f"{flag} does not work here: {reason}", param=wanted[0])
    if request.kv_dir is None:
        return 0, 0, ""
    if reason:
        is_expected = requested.prefix_cache is False or requested.kv_disk == 0
        return 0, 0, "" if is_expected else f"prefixes are kept in the KV cache only: {reason}"
    memory = request.memory_bytes or total_memory_bytes()
    ram, disk = requested.kv_ram, requested.kv_disk
    return (
        default_kv_ram_bytes(memory) if ram is None else ram,
        DEFAULT_KV_DISK_BYTES if disk is None else disk,
        "",
    )


def open_prefix_store(
    request: ModelLoadRequest,
    namespace: bytes,
    *,
    ram_bytes: int,
    disk_bytes: int,
    about: dict[str, str],
) -> tuple[PrefixStore | None, str]:
    """Open the store of a model; returns None without tiers, and a note if the disk is unusable.

    about: facts for people on what computes the prefixes: build, cache_type_k, cache_type_v.
    """
    note, disk = "", None
    if disk_bytes and request.kv_dir is not None:
        about = {"model": request.name, "path": request.path} | about
        try:
            disk = DiskTier(Path(request.kv_dir), namespace, disk_bytes, about)
        except (OSError, BlockRefused) as error:
            note = f"prefixes are not kept on disk: {error}"
    if disk is None and not ram_bytes:
        return None, note
    return PrefixStore(namespace, ram_bytes=ram_bytes, disk=disk), note
