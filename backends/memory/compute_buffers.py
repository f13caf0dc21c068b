"""Memory that computing takes beside weights and KV cache."""

from __future__ import annotations

from localgen.backends.formats.architecture.model_shape import ModelShape

_F32, _F16 = 4, 2
# inputs, and what the allocator rounds up
_SMALL_BYTES = 2 << 20


def llamacpp_fixed_bytes(shape: ModelShape, *, step_tokens: int, sequences: int) -> int:
    """Bytes of llama.cpp's compute and output buffers and of states: what does not grow with the
    pool, about.

    step_tokens: most tokens of a step. sequences: ids in use, each with logits of its own.
    """
    # the widest place of a layer, or the end, where the logits of all sequences are computed
    layer = step_tokens * max(3 * shape.inner, shape.attention_width) * _F32
    logits = sequences * shape.vocab * _F32
    compute = max(layer, logits) + step_tokens * 4 * shape.hidden * _F32
    return compute + logits + sequences * shape.state_bytes + _SMALL_BYTES


def llamacpp_work_token_bytes(
    shape: ModelShape, *, step_tokens: int, flash_attn: bool = True
) -> int:
    """Bytes that they grow by with each token of the pool: a mask for each kind of layer, and
    without flash attention what every head gives to every token."""
    kinds = len({cache.window for cache in shape.caches})
    if flash_attn:
        return step_tokens * kinds * _F16
    return step_tokens * (kinds + shape.heads) * _F32


def cuda_work_bytes(
    shape: ModelShape, *, step_tokens: int, sequences: int, element_bytes: int
) -> int:
    """Bytes that a step of the largest size needs on our own engine, about."""
    widest = 3 * shape.inner + 4 * shape.hidden + shape.attention_width
    # logits in their own type, in float32, and twice more while they are sampled
    logits = 2 * sequences * shape.vocab * (element_bytes + 3 * _F32)
    return step_tokens * widest * element_bytes + logits
