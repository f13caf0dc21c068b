"""Choose the context length and KV pool size that fit in this machine's memory."""

from __future__ import annotations

from dataclasses import replace

from localgen.backends.errors import LoadFailed
from localgen.backends.formats.architecture.model_shape import ModelShape, kv_cache_bytes_per_token
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
    """The model's dimensions. Raises LoadFailed if its metadata is missing or invalid."""
    shape = shape_from_gguf(model.header)
    if shape is None:
        raise LoadFailed(f"cannot load {model.path}: its metadata is missing or invalid")
    return shape


def kv_bytes_per_token(shape: ModelShape, options: LlamaOptions) -> float:
    """KV cache bytes per token, over all layers."""
    return kv_cache_bytes_per_token(shape.layer_caches, options.cache_type_k, options.cache_type_v)


def compute_bytes_per_token(shape: ModelShape, options: LlamaOptions) -> int:
    """Compute buffer bytes per token of the KV pool."""
    return llamacpp_work_bytes_per_token(
        shape, max_batch_tokens=options.max_batch_tokens, flash_attn=options.flash_attn != "off"
    )


def fixed_buffer_bytes(shape: ModelShape, options: LlamaOptions, num_sequences: int) -> int:
    """Buffer bytes that do not grow with the KV pool, without the weights.

    num_sequences: number of sequence ids.
    """
    return llamacpp_fixed_bytes(
        shape, max_batch_tokens=options.max_batch_tokens, num_seqs=num_sequences
    )


def pool_bytes_per_token(shape: ModelShape, options: LlamaOptions) -> float:
    """Bytes per token of the KV pool, including the compute buffers that grow with it."""
    return kv_bytes_per_token(shape, options) + compute_bytes_per_token(shape, options)


def choose_llama_kv_size(
    model: LlamaModel,
    shape: ModelShape,
    options: LlamaOptions,
    *,
    free_bytes: int,
    draft_token_bytes: float = 0.0,
) -> KVSize:
    """Return the requested context length and pool size, or the largest that fit.

    free_bytes: memory left after the weights and the fixed buffers. draft_token_bytes: bytes per
    token of a draft model's pool, which has the same size. Raises InvalidRequest or OutOfMemory,
    with the required and the available size.
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
