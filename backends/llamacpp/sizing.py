"""How large a context and a pool this machine can give a model."""

from __future__ import annotations

from dataclasses import replace

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_shape import ModelShape, token_bytes
from localgen.backends.formats.gguf.header import read_header
from localgen.backends.formats.gguf.shape import gguf_shape
from localgen.backends.llamacpp.native import Model
from localgen.backends.llamacpp.options import Settings
from localgen.backends.memory import kv_sizing
from localgen.backends.memory.compute_buffers import llamacpp_fixed_bytes, llamacpp_work_token_bytes
from localgen.backends.memory.kv_sizing import Size, Wanted


def shape_of(model: Model) -> ModelShape:
    """The figures that a model's memory follows from. LoadFailed: its file does not tell them."""
    shape = gguf_shape(read_header(model.path))
    if shape is None:
        raise LoadFailed(f"cannot load {model.path}: its metadata make no sense")
    return shape


def kv_bytes_per_token(shape: ModelShape, options: Settings) -> float:
    """Bytes that one token takes in the KV cache, over all layers."""
    return token_bytes(shape.caches, options.cache_type_k, options.cache_type_v)


def work_token_bytes(shape: ModelShape, options: Settings) -> int:
    """Bytes that the buffers of the computation grow by with each token of the pool."""
    return llamacpp_work_token_bytes(
        shape, step_tokens=options.max_batch_tokens, flash_attn=options.flash_attn != "off"
    )


def fixed_bytes(shape: ModelShape, options: Settings, sequences: int) -> int:
    """Bytes beside the weights that do not grow with the pool. sequences: ids in use."""
    return llamacpp_fixed_bytes(shape, step_tokens=options.max_batch_tokens, sequences=sequences)


def pool_token_bytes(shape: ModelShape, options: Settings) -> float:
    """Bytes of a token of the pool, and of the buffers that grow with it."""
    return kv_bytes_per_token(shape, options) + work_token_bytes(shape, options)


def choose(
    model: Model,
    shape: ModelShape,
    options: Settings,
    *,
    free_bytes: int,
    draft_token_bytes: float = 0.0,
) -> Size:
    """The context and pool asked for, or the largest that fit.

    free_bytes: memory left beside the weights and what does not grow. draft_token_bytes: of a token
    in a draft model's pool, which is as large. InvalidRequest, OutOfMemory: with both numbers.
    """
    parts = 1 if options.kv_unified else options.parallel
    wanted = Wanted(
        ctx=options.ctx,
        kv_tokens=options.kv_tokens,
        trained=model.ctx_train,
        name=model.path.name,
    )
    return kv_sizing.choose(
        wanted,
        replace(kv_sizing.LLAMACPP, parts=parts),
        token_bytes=pool_token_bytes(shape, options) + draft_token_bytes,
        free_bytes=free_bytes,
    )
