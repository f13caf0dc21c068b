"""Which prefixes of a GGUF model are kept in RAM and on disk, and under which key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import llama_cpp

from localgen.backends.formats.model_files import shards_of
from localgen.backends.kv_store.blocks import namespace_of
from localgen.backends.kv_store.fingerprint import (
    contents_fingerprint,
    engine_namespace,
    files_fingerprint,
)
from localgen.backends.kv_store.opening import open_prefix_store, resolve_tier_sizes
from localgen.backends.kv_store.store import PrefixStore
from localgen.backends.llamacpp.library import MAX_SEQUENCES
from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import LlamaOptions
from localgen.backends.model_info import ModelLoadRequest


def resolve_kv_tiers(
    model: LlamaModel, options: LlamaOptions, request: ModelLoadRequest
) -> tuple[LlamaOptions, str]:
    """Resolve kv_ram and kv_disk; see resolve_tier_sizes."""
    ram, disk, note = resolve_tier_sizes(request, _impossible_reason(model, options))
    return replace(options, kv_ram=ram, kv_disk=disk), note


def _impossible_reason(model: LlamaModel, options: LlamaOptions) -> str:
    if not options.prefix_cache:
        return "the prefix cache is switched off (--no-prefix-cache)"
    if model.is_recurrent:
        return f"{model.path.name} keeps recurrent state, which cannot be stored in parts"
    if model.has_sliding_window:
        return f"{model.path.name} has sliding-window layers, whose older tokens may be missing"
    if options.parallel >= MAX_SEQUENCES:
        return f"--parallel {options.parallel} leaves llama.cpp no sequence id for them"
    if not options.kv_unified:
        return "llama.cpp cannot store parts of a split KV cache (--no-kv-unified)"
    return ""


def open_llama_prefix_store(
    model: LlamaModel, options: LlamaOptions, request: ModelLoadRequest, kv_tokens: int
) -> tuple[PrefixStore | None, str]:
    """Open the store of a model; see open_prefix_store. kv_tokens: size of the KV cache."""
    if not (options.kv_ram or options.kv_disk):
        return None, ""
    return open_prefix_store(
        request,
        _namespace(model, options, kv_tokens),
        ram_bytes=options.kv_ram,
        disk_bytes=options.kv_disk,
        about={
            "build": f"llama.cpp {llama_cpp.__version__}",
            "cache_type_k": options.cache_type_k,
            "cache_type_v": options.cache_type_v,
        },
    )


def _namespace(model: LlamaModel, options: LlamaOptions, kv_tokens: int) -> bytes:
    """Key of all that keys and values depend on besides the tokens."""
    library = Path(llama_cpp.__file__).parent / "lib"
    # some models rotate positions differently in contexts longer than this
    original_ctx = model.metadata_number(
        f"{model.architecture}.rope.scaling.original_context_length"
    )
    return engine_namespace(
        files_fingerprint(shards_of(model.path)),
        namespace_of(("llama.cpp", llama_cpp.__version__, contents_fingerprint(library))),
        (
            options.cache_type_k,
            options.cache_type_v,
            options.flash_attn,
            options.gpu_layers,
            str(original_ctx is not None and kv_tokens > original_ctx),
        ),
    )
