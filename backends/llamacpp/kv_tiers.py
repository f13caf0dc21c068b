"""Which prefixes of a model are kept in RAM and on disk, and the store that keeps them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import llama_cpp

from localgen.backends.errors import InvalidRequest
from localgen.backends.formats.model_files import shards_of
from localgen.backends.kv_store.block_file import BlockRefused
from localgen.backends.kv_store.blocks import namespace_of
from localgen.backends.kv_store.disk_tier import DiskTier
from localgen.backends.kv_store.fingerprint import files_fingerprint
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import LlamaOptions
from localgen.backends.memory.load_defaults import DEFAULT_KV_DISK_BYTES, default_kv_ram_bytes
from localgen.backends.memory.system import total_memory_bytes
from localgen.backends.model_info import ModelLoadRequest, option_flag


def resolve_kv_tiers(
    model: LlamaModel, options: LlamaOptions, request: ModelLoadRequest
) -> tuple[LlamaOptions, str]:
    """Resolve kv_ram and kv_disk; returns a note if they are off although not switched off.

    Raises InvalidRequest if they are requested but impossible.
    """
    requested = request.options
    wanted = [name for name in ("kv_ram", "kv_disk") if getattr(requested, name)]
    reason = _impossible_reason(model, options)
    if wanted and reason:
        raise InvalidRequest(
            f"{option_flag(wanted[0])} does not work here: {reason}", param=wanted[0]
        )
    if request.kv_dir is None or reason:
        is_news = reason and options.prefix_cache and request.kv_dir is not None
        note = f"prefixes are kept in the KV cache only: {reason}" if is_news else ""
        return replace(options, kv_ram=0, kv_disk=0), note
    memory = request.memory_bytes or total_memory_bytes()
    ram, disk = requested.kv_ram, requested.kv_disk
    return replace(
        options,
        kv_ram=default_kv_ram_bytes(memory) if ram is None else ram,
        kv_disk=DEFAULT_KV_DISK_BYTES if disk is None else disk,
    ), ""


def _impossible_reason(model: LlamaModel, options: LlamaOptions) -> str:
    if not options.prefix_cache:
        return "the prefix cache is switched off (--no-prefix-cache)"
    if model.is_recurrent:
        return f"{model.path.name} keeps recurrent state, which cannot be stored in parts"
    if model.has_sliding_window:
        return f"{model.path.name} has sliding-window layers, whose older tokens may be missing"
    if not options.kv_unified:
        return "llama.cpp cannot store parts of a split KV cache (--no-kv-unified)"
    return ""


def open_prefix_store(
    model: LlamaModel, options: LlamaOptions, request: ModelLoadRequest, kv_tokens: int
) -> tuple[PrefixStore | None, LlamaOptions, str]:
    """Open the store of a model; returns it, the options, and a note if the disk cannot be used.

    kv_tokens: size of the KV cache.
    """
    if request.kv_dir is None or not (options.kv_ram or options.kv_disk):
        return None, options, ""
    note, disk = "", None
    namespace = _namespace(model, options, kv_tokens)
    if options.kv_disk:
        about = {"model": request.name, "path": request.path, "backend": "llamacpp"}
        try:
            disk = DiskTier(Path(request.kv_dir), namespace, options.kv_disk, about)
        except (OSError, BlockRefused) as error:
            note = f"prefixes are not kept on disk: {error}"
            options = replace(options, kv_disk=0)
    if disk is None and not options.kv_ram:
        return None, options, note
    return PrefixStore(namespace, ram_bytes=options.kv_ram, disk=disk), options, note


def _namespace(model: LlamaModel, options: LlamaOptions, kv_tokens: int) -> bytes:
    """Key of all that keys and values depend on besides the tokens."""
    library = Path(llama_cpp.__file__).parent / "lib"
    # some models rotate positions differently in contexts longer than this
    original_ctx = model.metadata_number(
        f"{model.architecture}.rope.scaling.original_context_length"
    )
    return namespace_of(
        (
            "llama.cpp",
            llama_cpp.__version__,
            files_fingerprint(each for each in library.iterdir() if each.is_file()),
            files_fingerprint(shards_of(model.path)),
            options.cache_type_k,
            options.cache_type_v,
            options.flash_attn,
            options.gpu_layers,
            str(bool(original_ctx) and kv_tokens > (original_ctx or 0)),
        )
    )
