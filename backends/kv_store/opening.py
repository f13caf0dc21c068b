"""Sizes of the tiers as requested or by default, and the store of a model."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path

from localgen.backends.errors import InvalidRequest, LoadFailed
from localgen.backends.kv_store.address import parse_address
from localgen.backends.kv_store.block_file import BlockRefused, load_key
from localgen.backends.kv_store.disk_tier import DiskTier
from localgen.backends.kv_store.peer import KVPeer
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.memory.load_defaults import DEFAULT_KV_DISK_BYTES, default_kv_ram_bytes
from localgen.backends.memory.system import total_memory_bytes
from localgen.backends.model_info import ModelLoadRequest, option_flag
from localgen.backends.units import format_size

_log = logging.getLogger(__name__)


def resolve_tier_sizes(request: ModelLoadRequest, reason: str) -> tuple[int, int, str]:
    """Bytes of RAM and of disk, and a note if they are 0 although not switched off.

    reason: why the model can have no tiers, or empty. The sizes are limits, which hold then too;
    raises InvalidRequest for a peer.
    """
    requested = request.options
    wanted = [name for name in ("kv_listen", "kv_peer") if getattr(requested, name)]
    for name in wanted:
        parse_address(getattr(requested, name), name)
    if wanted and reason:
        flag = option_flag(wanted[0])
        raise InvalidRequest(f"{flag} does not work here: {reason}", param=wanted[0])
    if request.kv_dir is None:
        return 0, 0, ""
    if reason:
        sizes = (requested.kv_ram, requested.kv_disk)
        is_off = sizes == (0, 0) or (requested.prefix_cache is False and not any(sizes))
        return 0, 0, "" if is_off else f"prefixes are kept in the KV cache only: {reason}"
    memory = request.memory_bytes or total_memory_bytes()
    if (requested.kv_ram or 0) > memory:
        raise InvalidRequest(
            f"--kv-ram is {format_size(requested.kv_ram or 0)}, there are {format_size(memory)}",
            param="kv_ram",
        )
    ram = default_kv_ram_bytes(memory) if requested.kv_ram is None else requested.kv_ram
    disk = DEFAULT_KV_DISK_BYTES if requested.kv_disk is None else requested.kv_disk
    if wanted and not (ram or disk):
        flag = option_flag(wanted[0])
        raise InvalidRequest(f"{flag} needs RAM or disk: leave --kv-ram 0 out", param=wanted[0])
    return ram, disk, ""


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
            reason = getattr(error, "strerror", None) or error
            note = f"prefixes are not kept on disk: {request.kv_dir}: {reason}"
            _log.warning("%s", note)
    if request.kv_dir is None or (disk is None and not ram_bytes):
        if request.options.kv_listen or request.options.kv_peer:
            raise LoadFailed(f"cannot fetch prefixes or let others do so: {note}")
        return None, note
    return _open(request, Path(request.kv_dir), namespace, ram_bytes, disk), note


def _open(
    request: ModelLoadRequest, folder: Path, namespace: bytes, ram_bytes: int, disk: DiskTier | None
) -> PrefixStore:
    """Open a store with its peers. Raises LoadFailed if the address to listen on is unusable."""
    share, peer = request.kv_share, request.options.kv_peer
    listen = request.options.kv_listen or (share.listen if share is not None else None)
    if not (listen or peer):
        return PrefixStore(namespace, ram_bytes=ram_bytes, disk=disk)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = load_key(folder) if share is None else share.key
        store = PrefixStore(
            namespace,
            ram_bytes=ram_bytes,
            disk=disk,
            connect=lambda address: KVPeer(parse_address(address, "kv_peer"), namespace, key),
            default_peer=peer,
        )
        if listen:
            if listen.endswith("/"):
                listen = f"{listen}kv-{secrets.token_hex(6)}.sock"
            store.listen(parse_address(listen, "kv_listen"), key)
    except (OSError, BlockRefused) as error:
        reason = getattr(error, "strerror", None) or error
        where = f"--kv-listen {listen}" if listen else f"--kv-peer {peer}"
        raise LoadFailed(f"cannot use {where}: {reason}") from error
    return store
