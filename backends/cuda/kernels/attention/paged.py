"""Causal attention of a ragged batch over the pages of the KV cache."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from localgen.backends.cuda.kernels.attention.decode import MAX_DECODE_ROWS, decode_attention_triton
from localgen.backends.cuda.kernels.attention.prefill import prefill_attention_triton
from localgen.backends.cuda.kernels.attention_metadata import AttentionMetadata
from localgen.backends.cuda.kernels.device import upcast
from localgen.backends.cuda.kernels.dispatch import Kernel, choose_kernel
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
    """Return the attention output, [rows, heads, head size] in the queries' dtype.

    queries: [rows, heads, head size]. window: sliding window in tokens, including the row's own, or
    None. softcap: attention scores become tanh(score / softcap) * softcap (Gemma 2).
    """
    longest = _longest_query(queries, metadata)
    kernel = choose_kernel("attention", queries, rows=longest)
    if kernel is Kernel.PREFILL_ATTENTION:  # perhaps with short sequences beside the longest
        kernel = choose_kernel("attention", queries, rows=1)
    if kernel is Kernel.REFERENCE:
        chosen = paged_attention_reference
    elif kernel is Kernel.DECODE_ATTENTION:
        chosen = paged_attention_triton
    else:
        chosen = partial(paged_attention_triton, max_decode_rows=0)
    return chosen(queries, layer_kv, metadata, scale=scale, window=window, softcap=softcap)


def paged_attention_triton(
    queries: Tensor,
    layer_kv: LayerKV,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    max_decode_rows: int = MAX_DECODE_ROWS,
) -> Tensor:
    """Triton implementation of `paged_attention`.

    Launches the decode kernel, the prefill kernel, or both for a mixed batch; each skips the
    sequences of the other. Rows that belong to no sequence are left uninitialized. max_decode_rows:
    MAX_DECODE_ROWS, or 0 for the prefill kernel alone.
    """
    out = torch.empty_like(queries)
    longest = _longest_query(queries, metadata)
    # with several sequences, any may be short (only the device knows)
    some_short = len(metadata.seq_lens) > 1 or longest <= max_decode_rows
    if max_decode_rows and some_short:
        decode_attention_triton(
            queries, layer_kv, metadata, out, scale=scale, window=window, softcap=softcap
        )
    if longest > max_decode_rows:
        prefill_attention_triton(
            queries,
            layer_kv,
            metadata,
            out,
            max_decode_rows=max_decode_rows,
            scale=scale,
            window=window,
            softcap=softcap,
        )
    return out


def _longest_query(queries: Tensor, metadata: AttentionMetadata) -> int:
    """Query rows of the longest sequence, at most; one sequence has all the rows."""
    return min(metadata.max_query_len, len(queries))


def paged_attention_reference(
    queries: Tensor,
    layer_kv: LayerKV,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """PyTorch reference of `paged_attention`; rows that belong to no sequence are 0."""
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
    """Dequantize the pages of one sequence: float32 or float64 [kv heads, length, head size]."""
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
    """Attention of one sequence. q: [rows, heads, size]. k, v: [kv heads, length, size]."""
    rows, heads, size = q.shape
    grouped = upcast(q).transpose(0, 1).reshape(len(k), heads // len(k), rows, size)
    k, v = k.to(grouped.dtype), v.to(grouped.dtype)
    scores = grouped @ k[:, None].transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if rows > 1 or window is not None:  # the last token alone sees all
        seen = torch.arange(k.shape[1], device=q.device)
        hidden = seen > positions[:, None]
        if window is not None:
            hidden |= seen <= positions[:, None] - window
        scores = scores.masked_fill(hidden, -torch.inf)
    mixed = scores.softmax(-1) @ v[:, None]
    return mixed.reshape(heads, rows, size).transpose(0, 1).to(q.dtype)
