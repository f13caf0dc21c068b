"""Causal attention of a ragged batch over the pages of the KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.attention.decode import MAX_DECODE_ROWS, decode_attention_triton
from localgen.backends.cuda.kernels.attention.prefill import prefill_attention_triton
from localgen.backends.cuda.kernels.attention_metadata import AttentionMetadata
from localgen.backends.cuda.kernels.device import can_use_triton, upcast
from localgen.backends.cuda.kernels.kv_cache import LayerKV, dequantize_kv


def paged_attention(
    queries: Tensor,
    layer_kv: LayerKV,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Mixed values, [rows, heads, size] of the queries' dtype.

    queries: [rows, heads, size]. window: a row sees so many positions up to its own; None: all.
    softcap: logits are bent to stay within it (Gemma 2).
    """
    chosen = paged_attention_triton if can_use_triton(queries) else paged_attention_reference
    return chosen(queries, layer_kv, metadata, scale=scale, window=window, softcap=softcap)


def paged_attention_triton(
    queries: Tensor,
    layer_kv: LayerKV,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The same in one launch for single tokens or for prompts, or in one of each: a kernel leaves
    alone what is for the other. Rows of no sequence are left as they are, which is anything."""
    out = torch.empty_like(queries)
    # a single sequence has all rows there are; of several, any may be short
    longest = min(metadata.max_query_len, len(queries))
    some_short = len(metadata.seq_lens) > 1 or longest <= MAX_DECODE_ROWS
    if some_short:
        decode_attention_triton(
            queries, layer_kv, metadata, out, scale=scale, window=window, softcap=softcap
        )
    if longest > MAX_DECODE_ROWS:
        prefill_attention_triton(
            queries,
            layer_kv,
            metadata,
            out,
            max_decode_rows=MAX_DECODE_ROWS,
            scale=scale,
            window=window,
            softcap=softcap,
        )
    return out


def paged_attention_reference(
    queries: Tensor,
    layer_kv: LayerKV,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """The same in plain torch."""
    out = torch.zeros_like(queries)
    first = metadata.query_starts.tolist()
    for sequence, length in enumerate(metadata.seq_lens.tolist()):
        begin, end = first[sequence], first[sequence + 1]
        pages = metadata.page_tables[sequence, : -(-length // layer_kv.keys.shape[2])].long()
        k = _gather_kv(layer_kv.keys, layer_kv.key_scales, pages, length)
        v = _gather_kv(layer_kv.values, layer_kv.value_scales, pages, length)
        positions = torch.arange(length - (end - begin), length, device=queries.device)
        out[begin:end] = _attend_one_sequence(
            queries[begin:end], k, v, positions, scale, window, softcap
        )
    return out


def _gather_kv(cache: Tensor, scales: Tensor | None, pages: Tensor, length: int) -> Tensor:
    """[pages, kv heads, page tokens, size] -> float32 [kv heads, length, size]."""
    found = dequantize_kv(cache[pages], None if scales is None else scales[pages])
    return found.transpose(0, 1).flatten(1, 2)[:, :length]


def _attend_one_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """One sequence. q: [rows, heads, size]; k, v: [kv heads, length, size]."""
    rows, heads, size = q.shape
    grouped = upcast(q).transpose(0, 1).reshape(len(k), heads // len(k), rows, size)
    k, v = k.to(grouped.dtype), v.to(grouped.dtype)
    scores = grouped @ k[:, None].transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    seen = torch.arange(k.shape[1], device=q.device)
    hidden = seen > positions[:, None]
    if window is not None:
        hidden |= seen <= positions[:, None] - window
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, None]
    return mixed.reshape(heads, rows, size).transpose(0, 1).to(q.dtype)
