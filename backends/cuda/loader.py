"""Load a model: weights, tokenizer, chat template and KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from localgen.backends.cuda.build_runner import build_cuda_runner, describe_model, load_tokenizer
from localgen.backends.cuda.device import sizing
from localgen.backends.cuda.device.options import CudaOptions, resolve_cuda_options, resolve_device
from localgen.backends.cuda.draft_model import CudaDraftModel
from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.kv_tiers import open_cuda_prefix_store, resolve_kv_tiers
from localgen.backends.cuda.model.source import ModelSource, open_model_source
from localgen.backends.cuda.parallel import tensor_parallel
from localgen.backends.cuda.parallel.rank_model import RankModel
from localgen.backends.cuda.precompile import KernelPrecompiler
from localgen.backends.cuda.runner import StepExecutor
from localgen.backends.engine.draft_loading import OptionalDraftLoader, validate_draft_options
from localgen.backends.engine.loaded_model import LoadedDraftModel, LoadedModel
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.memory.kv_sizing import KVSize
from localgen.backends.model_info import MemoryUsage, ModelInfo, ModelLoadRequest
from localgen.backends.sandbox import Sandbox
from localgen.backends.text.template import ChatTemplate, PromptTemplate, TemplateLoader


def load_cuda_model(request: ModelLoadRequest, on_progress: Callable[[float], None]) -> LoadedModel:
    """Load a model; a ModelLoader for engine.process.

    Raises LocalgenError naming the file or option at fault.
    """
    started_s = time.monotonic()
    sandbox = Sandbox(ChatTemplate)  # it starts while the files are read
    validate_draft_options(request)
    device = resolve_device(request.options)
    source = open_model_source(Path(request.path))
    spec, dtype = source.spec, source.compute_dtype(device)
    options, no_tiers_note = resolve_kv_tiers(
        resolve_cuda_options(request.options, dtype, device), request
    )
    compiling = None
    if device.type == "cuda":
        compiling = KernelPrecompiler(ModelShard(spec, 0, options.tp), options, dtype, device)
    tokenizer = load_tokenizer(source, options, sandbox)
    templates = TemplateLoader(
        sandbox, options.chat_template, source.chat_template, tokenizer, source.path
    )
    template = templates.wait()  # before the weights, which may take minutes
    draft_loader = OptionalDraftLoader(request.draft)
    draft_model = draft_loader.run(
        lambda: CudaDraftModel(draft_loader.request, options, device, source, tokenizer, sandbox)
    )
    executor, size, weight_bytes = _load_executor(
        source, options, dtype, request, draft_model, on_progress
    )
    store, disk_note = open_cuda_prefix_store(source, options, request, dtype, size.ctx)
    if store is None or not store.has_disk:
        options = replace(options, kv_disk=0)
    options = replace(options, kv_listen=store.address if store is not None else None)
    # on a CPU there is no device to keep busy
    run_ahead = options.device != "cpu"
    runner = build_cuda_runner(
        source, options, tokenizer, executor, size, run_ahead=run_ahead, store=store
    )
    draft = None
    if draft_model is not None:
        draft = draft_loader.run(partial(draft_model.start_runner, size))
    defaults, notes = source.sampling_defaults()
    kv_bytes = size.kv_tokens * _kv_bytes_per_token(spec, options)
    info = ModelInfo(
        name=request.name,
        path=request.path,
        architecture=spec.architecture,
        description=describe_model(spec, dtype),
        params=spec.num_params,
        size_bytes=weight_bytes,
        vocab=spec.vocab_size,
        ctx_train=spec.max_len,
        ctx=size.ctx,
        kv_tokens=size.kv_tokens,
        max_seqs=options.parallel,
        kv_bytes=kv_bytes,
        layers=spec.num_layers,
        backend="cuda",
        processor="100% CPU" if device.type == "cpu" else "100% GPU",
        work_bytes=sizing.step_work_bytes(spec, options, dtype),
        memory=_memory_use(weight_bytes, kv_bytes, options, device, draft),
        load_ms=(time.monotonic() - started_s) * 1e3,
        can_rewind=options.prefix_cache,
        embedding_width=spec.hidden_size,
        chat_template=templates.source,
        sampling=defaults,
        options=draft_loader.resolved_options(
            options.to_load_options(size.ctx, size.kv_tokens), draft
        ),
        notes=(
            *size.notes,
            *tensor_parallel.tensor_parallel_notes(options),
            *source.notes,
            *notes,
            *[note for note in (no_tiers_note, disk_note) if note],
            *_load_warnings(options, template),
            *(compiling.wait() if compiling else ()),
            *draft_loader.notes(draft, ctx=size.ctx, size_bytes=weight_bytes),
        ),
        draft=draft.info if draft else None,
    )
    return LoadedModel(
        info=info,
        runner=runner,
        tokenizer=tokenizer,
        template=template,
        draft=draft,
        sandbox=sandbox,
        prefix_store=store,
    )


def _load_warnings(options: CudaOptions, template: PromptTemplate | None) -> tuple[str, ...]:
    """Notes on limitations of the loaded model."""
    found = {
        "the weights are random (--dummy): the text is meaningless": options.dummy,
        "the model has no chat template: chat needs --chat-template FILE": not template,
        "running on the CPU in plain PyTorch, which is slow": options.device == "cpu",
    }
    return tuple(note for note, so in found.items() if so)


def _memory_use(
    weight_bytes: int,
    kv_bytes: int,
    options: CudaOptions,
    device: torch.device,
    draft: LoadedDraftModel | None,
) -> MemoryUsage:
    """Allocated memory by category.

    Working memory, including the draft model's, is read from torch's allocator and therefore known
    only on a single GPU.
    """
    if device.type == "cpu" or options.tp > 1:
        return MemoryUsage(weights=weight_bytes, kv=kv_bytes)
    draft_memory = MemoryUsage() if draft is None else draft.info.memory
    others = (draft_memory.weights or 0) + (draft_memory.kv or 0)
    work = torch.cuda.memory_reserved(device) - weight_bytes - kv_bytes - others
    return MemoryUsage(weights=weight_bytes, kv=kv_bytes, work=max(0, work))


def _load_executor(
    source: ModelSource,
    options: CudaOptions,
    dtype: torch.dtype,
    request: ModelLoadRequest,
    draft: CudaDraftModel | None,
    on_progress: Callable[[float], None],
) -> tuple[StepExecutor, KVSize, int]:
    """Load the weights and allocate the KV cache.

    draft: gets a KV cache of the same size; both are sized before either is allocated.

    Returns the executor, the resolved sizes and the bytes of the weights.
    """
    if options.tp > 1:
        return tensor_parallel.load_tensor_parallel(
            source, options, dtype, request.memory_bytes, on_progress
        )
    rank_model = RankModel(source, options, dtype, ModelShard(source.spec))
    on_progress(1.0)
    limit = request.memory_bytes
    if limit is not None:
        limit -= rank_model.weight_bytes + (draft.weight_bytes if draft else 0)

    def allocate(size: KVSize) -> bool:
        own = rank_model.allocate_cache(pages_for(size.kv_tokens), size.ctx)
        return own and (draft is None or draft.allocate_cache(size))

    size = sizing.fit_kv_cache(
        source.spec,
        options,
        free_bytes=rank_model.free_bytes(limit) - (draft.work_bytes if draft else 0),
        draft_token_bytes=draft.kv_bytes_per_token if draft else 0,
        allocate=allocate,
    )
    return rank_model.executor, size, rank_model.weight_bytes


def _kv_bytes_per_token(spec: ModelSpec, options: CudaOptions) -> int:
    """KV cache bytes per token, over all ranks."""
    local = ModelShard(spec, 0, options.tp).local_spec
    return options.tp * sizing.kv_bytes_per_token(local, options.cache_dtype)
