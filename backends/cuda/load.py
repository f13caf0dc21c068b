"""Load a model: weights, tokenizer, template, and as large a cache as fits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from localgen.backends.cuda import sizing
from localgen.backends.cuda.cache import PagedCache
from localgen.backends.cuda.decoder import Decoder, KVCache
from localgen.backends.cuda.graphs import DeviceSteps
from localgen.backends.cuda.made_up import MadeUpTokenizer
from localgen.backends.cuda.options import Settings, device_of, settle
from localgen.backends.cuda.runner import CudaRunner, limits
from localgen.backends.cuda.source import ModelSource, open_source
from localgen.backends.cuda.spec import ModelSpec
from localgen.backends.cuda.weights import Weights, random_weights
from localgen.backends.engine.loading import LoadedModel
from localgen.backends.errors import InvalidRequest, LoadFailed, OutOfMemory
from localgen.backends.text.template import ChatTemplate
from localgen.backends.text.tokenizer import Tokenizer
from localgen.backends.types import Load, ModelInfo

# a pool that turns out too large is made this much smaller, so often
_SMALLER, _TRIES = 0.9, 4


@dataclass(frozen=True, slots=True)
class Cache:
    """The pool and the sizes that were possible."""

    pages: KVCache
    size: sizing.Size


def load(request: Load, on_progress: Callable[[float], None]) -> LoadedModel:
    """A Loader for engine.process. LocalgenError names the file or option at fault."""
    started_s = time.monotonic()
    device = device_of(request.options)
    source = open_source(Path(request.path))
    spec, dtype = source.spec, source.dtype(device)
    options = settle(request.options, dtype, device)
    tokenizer = _tokenizer(source, options)
    template, template_source = _template(source, tokenizer, options)
    weights = _weights(source, options, device, dtype)
    on_progress(1.0)
    limit = None if request.memory_bytes is None else request.memory_bytes - weights.num_bytes
    cache = _cache(spec, options, dtype, limit)
    on_gpu = device.type == "cuda"
    runner = CudaRunner(
        DeviceSteps(Decoder(spec, weights, cache.size.ctx), cache.pages, graphs=on_gpu),
        PagedCache(cache.size.num_pages, share=options.prefix_cache),
        limits(
            max_seqs=options.parallel,
            max_batch_tokens=options.max_batch_tokens,
            max_len=cache.size.ctx,
            kv_tokens=cache.size.kv_tokens,
            share=options.prefix_cache,
        ),
        lambda token: tokenizer.piece(token).decode("utf-8", "replace"),
        ahead=on_gpu,  # on a CPU nothing waits to be filled
    )
    defaults, notes = source.sampling()
    oddities = {
        "the weights are random (--dummy): the text means nothing": options.dummy,
        "no chat template came with the model: chat needs --chat-template FILE": not template,
        "computed on the CPU in plain torch, which is slow": device.type == "cpu",
    }
    info = ModelInfo(
        name=request.name,
        path=request.path,
        architecture=spec.architecture,
        description=_description(spec, dtype),
        params=spec.num_params,
        size_bytes=weights.num_bytes,
        vocab=spec.vocab,
        ctx_train=spec.max_len,
        ctx=cache.size.ctx,
        kv_tokens=cache.size.kv_tokens,
        max_seqs=options.parallel,
        kv_bytes=cache.size.kv_tokens * sizing.kv_bytes_per_token(spec, options.cache_dtype),
        layers=spec.layers,
        backend="cuda",
        processor="100% CPU" if device.type == "cpu" else "100% GPU",
        load_ms=(time.monotonic() - started_s) * 1e3,
        can_rewind=options.prefix_cache,
        chat_template=template_source,
        sampling=defaults,
        options=options.with_sizes(cache.size.ctx, cache.size.kv_tokens),
        notes=(
            *cache.size.notes,
            *source.notes,
            *notes,
            *(note for note, so in oddities.items() if so),
        ),
    )
    return LoadedModel(info=info, runner=runner, tokenizer=tokenizer, template=template)


def _weights(
    source: ModelSource, options: Settings, device: torch.device, dtype: torch.dtype
) -> Weights:
    if options.dummy:
        return random_weights(source.spec, device=device, dtype=dtype, seed=0)
    return source.weights(device, dtype)


def _tokenizer(source: ModelSource, options: Settings) -> Tokenizer:
    try:
        return source.tokenizer()
    except LoadFailed:
        if options.dummy:  # a config.json is enough then
            return MadeUpTokenizer(source.spec.vocab)
        raise


def _cache(spec: ModelSpec, options: Settings, dtype: torch.dtype, limit: int | None) -> Cache:
    """As large a pool as fits; smaller where the driver's books turn out too good."""
    device = torch.device(options.device)
    free = sizing.free_bytes(device, limit) - sizing.work_bytes(spec, options, dtype)
    for _ in range(_TRIES):
        size = sizing.choose(spec, options, free=free)
        try:
            pages = KVCache.zeros(spec, size.num_pages, device=device, dtype=options.cache_dtype)
        except torch.OutOfMemoryError:
            free = int(free * _SMALLER)
            continue
        return Cache(pages, size)
    raise OutOfMemory(
        f"a KV pool of {size.kv_tokens:,} tokens does not fit on {device}, though "
        f"{free / 1e9:.1f} GB seemed free: ask for a smaller --kv-tokens"
    )


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


def _description(spec: ModelSpec, dtype: torch.dtype) -> str:
    kind = spec.architecture.removesuffix("ForCausalLM")
    quant = spec.quant
    how = str(dtype).removeprefix("torch.") if quant is None else quant.method
    params = spec.num_params
    size = f"{params / 1e9:.1f}B" if params >= 1e9 else f"{params / 1e6:.1f}M"
    return f"{kind} {size} {how}"
