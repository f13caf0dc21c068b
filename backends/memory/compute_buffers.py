"""Memory that computing takes beside weights and KV cache."""

from __future__ import annotations

from localgen.backends.formats.architecture.model_shape import ModelShape

_F32, _F16 = 4, 2
# inputs, and what the allocator rounds up
_OVERHEAD_BYTES = 2 << 20


def llamacpp_fixed_bytes(shape: ModelShape, *, max_batch_tokens: int, num_seqs: int) -> int:
    """Bytes of llama.cpp's compute and output buffers and of states: what does not grow with the
    pool, about.

    max_batch_tokens: most tokens of a step. num_seqs: ids in use, each with logits of its own.
    """
    # the widest place of a layer, or the end, where the logits of all sequences are computed
    layer = max_batch_tokens * max(3 * shape.active_intermediate_size, shape.attention_width) * _F32
    logits = num_seqs * shape.vocab_size * _F32
    compute = max(layer, logits) + max_batch_tokens * 4 * shape.hidden_size * _F32
    return compute + logits + num_seqs * shape.state_bytes + _OVERHEAD_BYTES


def llamacpp_work_bytes_per_token(
    shape: ModelShape, *, max_batch_tokens: int, flash_attn: bool = True
) -> int:
    """Bytes that they grow by with each token of the pool: a mask for each kind of layer, and
    without flash attention what every head gives to every token."""
    kinds = len({cache.window for cache in shape.layer_caches})
    if flash_attn:
        return max_batch_tokens * kinds * _F16
    return max_batch_tokens * (kinds + shape.num_heads) * _F32


def cuda_work_bytes(
    shape: ModelShape, *, max_batch_tokens: int, num_seqs: int, element_bytes: int
) -> int:
    """Bytes that a step of the largest size needs on our own engine, about."""
    widest = 3 * shape.active_intermediate_size + 4 * shape.hidden_size + shape.attention_width
    # logits in their own type, in float32, and twice more while they are sampled
    logits = 2 * num_seqs * shape.vocab_size * (element_bytes + 3 * _F32)
    return max_batch_tokens * widest * element_bytes + logits
