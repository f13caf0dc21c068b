"""Load a GGUF file: resolve every option for this machine and report the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from localgen.backends.engine.draft_loading import OptionalDraftLoader, validate_draft_options
from localgen.backends.engine.loaded_model import LoadedModel
from localgen.backends.errors import InvalidRequest, LoadFailed, OutOfMemory
from localgen.backends.formats.architecture.model_shape import ModelShape
from localgen.backends.llamacpp import sizing
from localgen.backends.llamacpp.adapter_files import AdapterFiles
from localgen.backends.llamacpp.build_runner import (
    build_llama_runner,
    num_scratch_ids,
    num_slots,
    probe_rewind,
)
from localgen.backends.llamacpp.devices import gpu_free_bytes
from localgen.backends.llamacpp.draft_model import LlamaDraftModel
from localgen.backends.llamacpp.encoder import load_encoder
from localgen.backends.llamacpp.kv_tiers import open_llama_prefix_store, resolve_kv_tiers
from localgen.backends.llamacpp.library import llama_library
from localgen.backends.llamacpp.native import LlamaContext, LlamaModel, NoKVCache
from localgen.backends.llamacpp.options import LlamaOptions, resolve_llama_options
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.memory.kv_sizing import KVSize
from localgen.backends.memory.system import RESERVED_BYTES, available_memory_bytes
from localgen.backends.model_info import DRAFT_NGRAM, LoadOptions, ModelInfo, ModelLoadRequest
from localgen.backends.sampling_params import SAMPLERS, SamplingParams, model_sampling_defaults
from localgen.backends.sandbox import Sandbox
from localgen.backends.text.template import ChatTemplate, TemplateLoader


def load_llamacpp_model(
    request: ModelLoadRequest, on_progress: Callable[[float], None]
) -> LoadedModel:
    """Load a model; a ModelLoader for engine.process.

    Raises LocalgenError, naming the file or the option at fault.
    """
    started_s = time.monotonic()
    path = Path(request.path)
    sandbox = Sandbox(ChatTemplate)  # it starts while the weights are loaded
    validate_draft_options(request)
    options = resolve_llama_options(request.options)
    model = LlamaModel(_require_file(path), options, on_progress)
    _validate_split_cache(model, options)
    options, no_tiers_note = resolve_kv_tiers(model, options, request)
    mlock_failed = options.mlock and llama_library().has_warning_about("mlock")
    vocab = LlamaCppTokenizer(model)
    templates = TemplateLoader(sandbox, options.chat_template, model.template, vocab, path)
    shape = sizing.llama_model_shape(model)
    draft_loader = OptionalDraftLoader(request.draft)
    draft_model = draft_loader.run(
        lambda: LlamaDraftModel(draft_loader.request, options, model, vocab)
    )
    options, size = _resolve_size(model, shape, request, options, draft_model)
    try:
        context = _create_context(model, options, size)
    except NoKVCache:
        options = _without_draft(request, options, draft_model)
        return load_encoder(request, model, vocab, options, started_s=started_s)
    can_rewind = probe_rewind(model, vocab, context)
    draft = None
    if draft_model is not None:
        draft = draft_loader.run(partial(draft_model.start_runner, options, size, context.executor))
    share = can_rewind and options.prefix_cache
    store, disk_note = open_llama_prefix_store(model, options, request, context.kv_tokens)
    if store is None or not store.has_disk:
        options = replace(options, kv_disk=0)
    options = replace(options, kv_listen=store.address if store is not None else None)
    runner = build_llama_runner(
        model, context, vocab, options, ctx=size.ctx, share_prefixes=share, store=store
    )
    sampling_defaults, sampling_notes = _default_sampling(model)
    info = ModelInfo(
        name=request.name,
        path=str(path),
        architecture=model.architecture,
        description=model.description,
        params=model.num_params,
        size_bytes=model.size_bytes,
        vocab=vocab.vocab_size,
        ctx_train=model.ctx_train,
        ctx=size.ctx,
        kv_tokens=context.kv_tokens,
        max_seqs=options.parallel,
        kv_bytes=int(context.kv_tokens * sizing.kv_bytes_per_token(shape, options)),
        layers=model.num_layers,
        backend="llamacpp",
        processor=_processor(model, options),
        work_bytes=sizing.fixed_buffer_bytes(shape, options, num_slots(model, options))
        + context.kv_tokens * sizing.compute_bytes_per_token(shape, options),
        memory=model.buffers.usage(),
        load_ms=(time.monotonic() - started_s) * 1e3,
        can_rewind=can_rewind,
        chat_template=templates.source,
        sampling=sampling_defaults,
        options=draft_loader.resolved_options(
            options.to_load_options(size.ctx, context.kv_tokens), draft
        ),
        embedding_width=0 if runner.limits.can_rank else model.embedding_width,
        notes=(
            *size.notes,
            *sampling_notes,
            *[note for note in (no_tiers_note, disk_note) if note],
            *_load_warnings(
                options, request.options, size.ctx, mlock_failed, can_rewind, templates.source
            ),
            *draft_loader.notes(draft, ctx=size.ctx, size_bytes=model.size_bytes),
        ),
        draft=draft.info if draft else None,
    )
    template = templates.wait()
    return LoadedModel(
        info=info,
        runner=runner,
        tokenizer=vocab,
        template=template,
        draft=draft,
        sandbox=sandbox,
        prefix_store=store,
        read_adapter=AdapterFiles(path).read,
    )


def _create_context(model: LlamaModel, options: LlamaOptions, size: KVSize) -> LlamaContext:
    """Create a context with ids for all sequences and cached prefixes.

    Its outputs allow one sequence to verify a full draft. Raises NoKVCache for an encoder.
    """
    slots = num_slots(model, options)
    return LlamaContext(
        model,
        options,
        kv_tokens=size.kv_tokens,
        n_seq_max=slots + num_scratch_ids(options),
        n_outputs=max(slots, options.parallel + options.draft_max),
    )


def _without_draft(
    request: ModelLoadRequest, options: LlamaOptions, draft: LlamaDraftModel | None
) -> LlamaOptions:
    """Options for an encoder, without a draft model.

    Raises InvalidRequest if a draft model was required.
    """
    if request.draft is not None and not request.draft.optional:
        raise InvalidRequest(
            f"{request.name} is an embedding model and cannot use a draft model: leave --draft out",
            param="draft",
        )
    if draft is not None:
        draft.close()
    return replace(options, draft=DRAFT_NGRAM if request.draft else options.draft)


def _load_warnings(
    options: LlamaOptions,
    requested: LoadOptions,
    ctx: int,
    mlock_failed: bool,
    can_rewind: bool,
    template: str | None,
) -> list[str]:
    """Notes on options and model properties that a user may not expect."""
    in_parts = not options.kv_unified and requested.kv_unified is None
    oddities = {
        "the weights could not be locked in memory (ulimit -l): they may be swapped": mlock_failed,
        "weights are not repacked for this CPU: prefill is slower": not options.repack,
        "this architecture cannot rewind its KV cache: no prefix cache": not can_rewind,
        "the model has no chat template: chat needs --chat-template FILE": template is None,
        f"the KV cache is split into {options.parallel} parts of {ctx:,} tokens; "
        "--kv-unified shares one pool, and keeps prefixes in RAM and on disk": in_parts,
    }
    return [note for note, so in oddities.items() if so]


def _require_file(path: Path) -> Path:
    if not path.is_file():
        what = "it is a folder, not a .gguf file" if path.is_dir() else "no such file"
        raise LoadFailed(f"cannot load {path}: {what}")
    return path


def _validate_split_cache(model: LlamaModel, options: LlamaOptions) -> None:
    """Raise InvalidRequest if the KV cache of the model cannot be split."""
    if not options.kv_unified and (model.is_recurrent or model.has_sliding_window):
        why = "keeps recurrent state" if model.is_recurrent else "has sliding-window layers"
        raise InvalidRequest(
            f"--no-kv-unified does not work with {model.path.name}, which {why}: leave it out",
            param="kv_unified",
        )


def _resolve_size(
    model: LlamaModel,
    shape: ModelShape,
    request: ModelLoadRequest,
    options: LlamaOptions,
    draft: LlamaDraftModel | None,
) -> tuple[LlamaOptions, KVSize]:
    """Choose the KV cache layout and size, leaving room for the draft model's cache.

    As in llama-server, the cache is split into one part per sequence if both -np and --ctx are
    given and it fits, so that attention reads only the tokens of the sequences in the batch.
    Otherwise all sequences share one pool.
    """
    free = _kv_budget_bytes(model, shape, options, request, draft)
    draft_token_bytes = draft.pool_bytes_per_token if draft else 0.0
    requested = request.options
    has_fixed_size = None not in (requested.parallel, requested.ctx) and requested.kv_tokens is None
    # a split cache has no tiers
    wants_tiers = any((requested.kv_ram, requested.kv_disk, requested.kv_listen, requested.kv_peer))
    cannot_split = model.is_recurrent or model.has_sliding_window
    if has_fixed_size and not (cannot_split or wants_tiers) and requested.kv_unified is None:
        in_parts = replace(options, kv_unified=False, kv_ram=0, kv_disk=0)
        with suppress(OutOfMemory):
            return in_parts, sizing.choose_llama_kv_size(
                model, shape, in_parts, free_bytes=free, draft_token_bytes=draft_token_bytes
            )
    size = sizing.choose_llama_kv_size(
        model, shape, options, free_bytes=free, draft_token_bytes=draft_token_bytes
    )
    return options, size


def _kv_budget_bytes(
    model: LlamaModel,
    shape: ModelShape,
    options: LlamaOptions,
    request: ModelLoadRequest,
    draft: LlamaDraftModel | None,
) -> int:
    """Free memory for the KV pool, which is allocated on the same devices as the layers.

    On a GPU the weights are already loaded; on the CPU, mmap pages them in later.
    """
    fixed = sizing.fixed_buffer_bytes(shape, options, num_slots(model, options))
    fixed, weights = fixed + options.kv_ram, model.size_bytes
    if draft is not None:
        fixed, weights = fixed + draft.fixed_bytes, weights + draft.weight_bytes
    gpu_free = gpu_free_bytes() if options.gpu_layers else None
    share = 0.0 if gpu_free is None else _gpu_layer_fraction(model, options)
    ram_bytes = available_memory_bytes() - RESERVED_BYTES - fixed
    if request.memory_bytes is not None:
        ram_bytes = min(ram_bytes, request.memory_bytes - fixed)
    kv_limits = [(ram_bytes - weights * (1 - share)) / (1 - share)] if share < 1 else []
    if gpu_free is not None:
        kv_limits.append((gpu_free - RESERVED_BYTES - fixed) / share)
    return max(0, int(min(kv_limits)))


def _default_sampling(model: LlamaModel) -> tuple[SamplingParams, tuple[str, ...]]:
    """Sampling defaults from the model's metadata, and a note if they are invalid."""
    return model_sampling_defaults(
        {
            sampler.name: model.metadata_number(f"general.sampling.{sampler.gguf_key}")
            for sampler in SAMPLERS
            if sampler.gguf_key
        }
    )


def _gpu_layer_fraction(model: LlamaModel, options: LlamaOptions) -> float:
    """Fraction of the layers that run on a GPU."""
    all_layers = model.num_layers + 1  # llama.cpp counts the output layer too
    on_gpu = all_layers if options.gpu_layers < 0 else min(options.gpu_layers, all_layers)
    return on_gpu / all_layers


def _processor(model: LlamaModel, options: LlamaOptions) -> str:
    """Processor column of `localgen ps`: the share of layers on CPU and GPU."""
    share = round(100 * _gpu_layer_fraction(model, options))
    if share in (0, 100):
        return "100% GPU" if share else "100% CPU"
    return f"{100 - share}%/{share}% CPU/GPU"
