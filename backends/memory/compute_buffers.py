"""Estimates of compute memory, in addition to weights and KV cache."""

from __future__ import annotations

from localgen.backends.formats.architecture.model_shape import ModelShape

_F32, _F16 = 4, 2
# input tensors and allocator rounding
_OVERHEAD_BYTES = 2 << 20

# CUDA graphs: most sequences, of one row and of several rows each, and most rows of a sequence
MAX_GRAPH_SEQS, MAX_MULTI_ROW_SEQS, MAX_GRAPH_SEQ_ROWS = 256, 16, 8
# torch's workspaces for cuBLAS on compute capability 9.0, in steps and in CUDA graphs
CUBLAS_BYTES = 2 * (32 << 20)
# partial results of attention that is split over keys: its limit, rounded up to twice that; int4
# products have smaller ones, at other times
_ATTENTION_SPLIT_BYTES = 2 * (32 << 20)
# with more rows, int4 weights are dequantized at each use
_MAX_INT4_ROWS = 256


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
    shape: ModelShape,
    *,
    max_batch_tokens: int,
    num_seqs: int,
    max_drafts: int,
    element_bytes: int,
    on_gpu: bool,
) -> int:
    """Estimate the working memory of the largest step on the CUDA backend, in bytes.

    The sampling of a step reuses the memory of its forward pass; CUDA graphs have memory of their
    own, which stays allocated. max_drafts: of one sequence. on_gpu: with CUDA graphs.

    Not counted: the nodes of graphs; FP8 weights that are dequantized, below compute capability
    8.9.
    """
    outputs = cuda_max_outputs(num_seqs, max_drafts)
    # float32 logits, a copy with the masks of grammars, and another with penalties; the
    # distributions of sampled drafts, one by one and stacked
    rows = 3 * outputs + 2 * (outputs - num_seqs)
    sampling = rows * shape.vocab_size * _F32
    step = max(_forward_bytes(shape, max_batch_tokens, element_bytes), sampling)
    if not on_gpu:
        return step
    logits = cuda_graph_rows(num_seqs) * shape.vocab_size * _F32
    graphs = cuda_graph_pool_bytes(shape, num_seqs=num_seqs, element_bytes=element_bytes)
    return step + logits + graphs + CUBLAS_BYTES


def cuda_max_outputs(num_seqs: int, max_drafts: int) -> int:
    """Return the most positions that a step of the CUDA backend samples."""
    return num_seqs + max(num_seqs, max_drafts)


def cuda_graph_rows(num_seqs: int) -> int:
    """Return the rows of the largest CUDA graph. num_seqs: most sequences of a step."""
    size = 1 << (num_seqs - 1).bit_length() if num_seqs < 16 else -(-num_seqs // 16) * 16
    return max(min(size, MAX_GRAPH_SEQS), MAX_GRAPH_SEQ_ROWS * min(size, MAX_MULTI_ROW_SEQS))


def cuda_graph_pool_bytes(shape: ModelShape, *, num_seqs: int, element_bytes: int) -> int:
    """Return the memory that the steps of all CUDA graphs share, without their logits."""
    rows = cuda_graph_rows(num_seqs)
    head = rows * shape.vocab_size * element_bytes
    return max(head, _forward_bytes(shape, rows, element_bytes)) + _ATTENTION_SPLIT_BYTES


def _forward_bytes(shape: ModelShape, rows: int, element_bytes: int) -> int:
    """Peak of the layers of a forward pass, which is that of one layer."""
    hidden, wide = shape.hidden_size, shape.active_intermediate_size
    if shape.num_active_experts:  # the output of each expert
        mlp = wide + (shape.num_active_experts + 4) * hidden
    else:  # gate, up and their product, of which FP8 makes a copy in float32 and one in FP8
        mlp = 7 * wide // 2 + 4 * hidden
    layer = rows * max(mlp, 4 * hidden + 2 * shape.attention_width) * element_bytes
    if not shape.has_int4_weights or rows <= _MAX_INT4_ROWS:
        return layer
    dequantized = 2 * wide * hidden * element_bytes
    return max(layer, rows * (2 * wide + 3 * hidden) * element_bytes + dequantized)
