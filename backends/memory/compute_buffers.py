"""Estimates of compute memory, in addition to weights and KV cache."""

from __future__ import annotations

from localgen.backends.formats.architecture.model_shape import ModelShape

_F32, _F16 = 4, 2
# input tensors and allocator rounding
_OVERHEAD_BYTES = 2 << 20


def llamacpp_fixed_bytes(shape: ModelShape, *, max_batch_tokens: int, num_seqs: int) -> int:
    """Estimate llama.cpp's compute and output buffers and recurrent states in bytes.

    Only the part that does not depend on the size of the KV cache.

    max_batch_tokens: maximum number of tokens in a step.
    num_seqs: number of sequence ids; each has its own row of logits.
    """
    # peak usage is in the widest part of a layer or in the logits of all sequences
    layer = max_batch_tokens * max(3 * shape.active_intermediate_size, shape.attention_width) * _F32
    logits = num_seqs * shape.vocab_size * _F32
    compute = max(layer, logits) + max_batch_tokens * 4 * shape.hidden_size * _F32
    return compute + logits + num_seqs * shape.state_bytes + _OVERHEAD_BYTES


def llamacpp_work_bytes_per_token(
    shape: ModelShape, *, max_batch_tokens: int, flash_attn: bool = True
) -> int:
    """Compute-buffer bytes per token of the KV cache.

    One attention mask per kind of layer; without flash attention also the scores of each head.
    """
    kinds = len({cache.window for cache in shape.layer_caches})
    if flash_attn:
        return max_batch_tokens * kinds * _F16
    return max_batch_tokens * (kinds + shape.num_heads) * _F32


def cuda_work_bytes(
    shape: ModelShape, *, max_batch_tokens: int, num_seqs: int, element_bytes: int
) -> int:
    """Estimate the working memory of the largest step on the CUDA backend, in bytes."""
    widest = 3 * shape.active_intermediate_size + 4 * shape.hidden_size + shape.attention_width
    # logits in the compute dtype, in float32, and two more float32 copies during sampling
    logits = 2 * num_seqs * shape.vocab_size * (element_bytes + 3 * _F32)
    return max_batch_tokens * widest * element_bytes + logits
