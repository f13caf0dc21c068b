"""Load a model: weights, tokenizer, template, and as large a cache as fits."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from localgen.backends.cuda.build_runner import assemble, description_of, tokenizer_of
from localgen.backends.cuda.device import sizing
from localgen.backends.cuda.device.options import Settings, device_of, settle
from localgen.backends.cuda.draft_model import Draft
from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.model.source import ModelSource, open_source
from localgen.backends.cuda.parallel import tensor_parallel
from localgen.backends.cuda.parallel.rank_model import Share
from localgen.backends.cuda.precompile import Compiling
from localgen.backends.cuda.runner import Steps
from localgen.backends.engine.drafters import check
from localgen.backends.engine.loaded_model import LoadedDraft, LoadedModel
from localgen.backends.engine.optional_draft import Attempt
from localgen.backends.errors import InvalidRequest, LoadFailed
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.architecture.sharding import Shard
from localgen.backends.memory.kv_sizing import Size
from localgen.backends.model_info import Load, MemoryUse, ModelInfo
from localgen.backends.text.template import ChatTemplate
from localgen.backends.text.tokenizer import Tokenizer


def load(request: Load, on_progress: Callable[[float], None]) -> LoadedModel:
    """A Loader for engine.process. LocalgenError names the file or option at fault."""
    started_s = time.monotonic()
    check(request)
    device = device_of(request.options)
    source = open_source(Path(request.path))
    spec, dtype = source.spec, source.dtype(device)
    options = settle(request.options, dtype, device)
    compiling = None
    if device.type == "cuda":
        compiling = Compiling(Shard(spec, 0, options.tp), options, dtype, device)
    tokenizer = tokenizer_of(source, options)
    template, template_source = _template(source, tokenizer, options)
    attempt = Attempt(request.draft)
    companion = attempt.to(lambda: Draft(attempt.asked, options, device, source, tokenizer))
    steps, size, weight_bytes = _compute(source, options, dtype, request, companion, on_progress)
    # on a CPU nothing waits to be filled
    runner = assemble(source, options, tokenizer, steps, size, ahead=options.device != "cpu")
    draft = None if companion is None else attempt.to(partial(companion.start, size))
    defaults, notes = source.sampling()
    kv_bytes = size.kv_tokens * _kv_bytes(spec, options)
    info = ModelInfo(
        name=request.name,
        path=request.path,
        architecture=spec.architecture,
        description=description_of(spec, dtype),
        params=spec.num_params,
        size_bytes=weight_bytes,
        vocab=spec.vocab,
        ctx_train=spec.max_len,
        ctx=size.ctx,
        kv_tokens=size.kv_tokens,
        max_seqs=options.parallel,
        kv_bytes=kv_bytes,
        layers=spec.layers,
        backend="cuda",
        processor="100% CPU" if device.type == "cpu" else "100% GPU",
        work_bytes=sizing.work_bytes(spec, options, dtype),
        memory=_memory(weight_bytes, kv_bytes, options, device, draft),
        load_ms=(time.monotonic() - started_s) * 1e3,
        can_rewind=options.prefix_cache,
        embedding_width=spec.hidden,
        chat_template=template_source,
        sampling=defaults,
        options=attempt.in_force(options.with_sizes(size.ctx, size.kv_tokens), draft),
        notes=(
            *size.notes,
            *tensor_parallel.notes(options),
            *source.notes,
            *notes,
            *_oddities(options, template),
            *(compiling.wait() if compiling else ()),
            *attempt.notes(draft, ctx=size.ctx, size_bytes=weight_bytes),
        ),
        draft=draft.info if draft else None,
    )
    return LoadedModel(
        info=info, runner=runner, tokenizer=tokenizer, template=template, draft=draft
    )


def _oddities(options: Settings, template: ChatTemplate | None) -> tuple[str, ...]:
    """What a user may not expect of a model loaded so."""
    found = {
        "the weights are random (--dummy): the text means nothing": options.dummy,
        "no chat template came with the model: chat needs --chat-template FILE": not template,
        "computed on the CPU in plain torch, which is slow": options.device == "cpu",
    }
    return tuple(note for note, so in found.items() if so)


def _memory(
    weight_bytes: int,
    kv_bytes: int,
    options: Settings,
    device: torch.device,
    draft: LoadedDraft | None,
) -> MemoryUse:
    """What is allocated; what steps need comes and goes, a draft model's among it, and only one
    GPU's allocator is ours to ask."""
    if device.type == "cpu" or options.tp > 1:
        return MemoryUse(weights=weight_bytes, kv=kv_bytes)
    beside = MemoryUse() if draft is None else draft.info.memory
    others = (beside.weights or 0) + (beside.kv or 0)
    work = torch.cuda.memory_reserved(device) - weight_bytes - kv_bytes - others
    return MemoryUse(weights=weight_bytes, kv=kv_bytes, work=max(0, work))


def _compute(
    source: ModelSource,
    options: Settings,
    dtype: torch.dtype,
    request: Load,
    draft: Draft | None,
    on_progress: Callable[[float], None],
) -> tuple[Steps, Size, int]:
    """What computes the model, the sizes that were possible, and the bytes of its weights.

    draft: gets a pool as large, and both are sized before either takes anything.
    """
    if options.tp > 1:
        return tensor_parallel.load(source, options, dtype, request.memory_bytes, on_progress)
    share = Share(source, options, dtype, Shard(source.spec))
    on_progress(1.0)
    limit = request.memory_bytes
    if limit is not None:
        limit -= share.weight_bytes + (draft.weight_bytes if draft else 0)

    def allocate(size: Size) -> bool:
        own = share.allocate(pages_for(size.kv_tokens), size.ctx)
        return own and (draft is None or draft.allocate(size))

    size = sizing.fit(
        source.spec,
        options,
        free=share.free_bytes(limit) - (draft.work_bytes if draft else 0),
        draft_token_bytes=draft.token_bytes if draft else 0,
        allocate=allocate,
    )
    return share.steps, size, share.weight_bytes


def _kv_bytes(spec: ModelSpec, options: Settings) -> int:
    """Of a token in the cache, on all ranks."""
    local = Shard(spec, 0, options.tp).local
    return options.tp * sizing.kv_bytes_per_token(local, options.cache_dtype)


def _template(
    source: ModelSource, tokenizer: Tokenizer, options: Settings
) -> tuple[ChatTemplate | None, str | None]:
    text = options.chat_template or source.chat_template
    if text is None:
        return None, None
    try:
        return ChatTemplate(text, bos=tokenizer.bos, eos=tokenizer.eos), text
    except InvalidRequest as error:
        if options.chat_template:
            raise
        raise LoadFailed(f"cannot load {source.path}: {error}") from error
