"""How large a context and a pool this machine can give a model."""

from __future__ import annotations

from dataclasses import replace

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_shape import ModelShape, kv_cache_bytes_per_token
from localgen.backends.formats.gguf.header import read_gguf_header
from localgen.backends.formats.gguf.shape import shape_from_gguf
from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import LlamaOptions
from localgen.backends.memory import kv_sizing
from localgen.backends.memory.compute_buffers import (
    llamacpp_fixed_bytes,
    llamacpp_work_bytes_per_token,
)
from localgen.backends.memory.kv_sizing import KVSize, KVSizeRequest


def llama_model_shape(model: LlamaModel) -> ModelShape:
    """The figures that a model's memory follows from. LoadFailed: its file does not tell them."""
    shape = shape_from_gguf(read_gguf_header(model.path))
    if shape is None:
        raise LoadFailed(f"cannot load {model.path}: its metadata make no sense")
    return shape


def kv_bytes_per_token(shape: ModelShape, options: LlamaOptions) -> float:
    """Bytes that one token takes in the KV cache, over all layers."""
    return kv_cache_bytes_per_token(shape.layer_caches, options.cache_type_k, options.cache_type_v)


def compute_bytes_per_token(shape: ModelShape, options: LlamaOptions) -> int:
    """Bytes that the buffers of the computation grow by with each token of the pool."""
    return llamacpp_work_bytes_per_token(
        shape, max_batch_tokens=options.max_batch_tokens, flash_attn=options.flash_attn != "off"
    )


def fixed_buffer_bytes(shape: ModelShape, options: LlamaOptions, num_sequences: int) -> int:
    """Bytes beside the weights that do not grow with the pool. num_sequences: ids in use."""
    return llamacpp_fixed_bytes(
        shape, max_batch_tokens=options.max_batch_tokens, num_seqs=num_sequences
    )


def pool_bytes_per_token(shape: ModelShape, options: LlamaOptions) -> float:
    """Bytes of a token of the pool, and of the buffers that grow with it."""
    return kv_bytes_per_token(shape, options) + compute_bytes_per_token(shape, options)


def choose_llama_kv_size(
    model: LlamaModel,
    shape: ModelShape,
    options: LlamaOptions,
    *,
    free_bytes: int,
    draft_token_bytes: float = 0.0,
) -> KVSize:
    """The context and pool asked for, or the largest that fit.

    free_bytes: memory left beside the weights and what does not grow. draft_token_bytes: of a token
    in a draft model's pool, which is as large. InvalidRequest, OutOfMemory: with both numbers.
    """
    parts = 1 if options.kv_unified else options.parallel
    wanted = KVSizeRequest(
        ctx=options.ctx,
        kv_tokens=options.kv_tokens,
        ctx_train=model.ctx_train,
        model_name=model.path.name,
    )
    return kv_sizing.resolve_kv_size(
        wanted,
        replace(kv_sizing.LLAMACPP_POOL, num_parts=parts),
        token_bytes=pool_bytes_per_token(shape, options) + draft_token_bytes,
        free_bytes=free_bytes,
    )
