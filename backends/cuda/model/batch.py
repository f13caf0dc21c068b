"""The inputs of one step, on the host and on the device."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localgen.backends.cuda.kernels.attention_metadata import AttentionMetadata
from localgen.backends.cuda.kernels.decode_inputs import DecodeInputs
from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, pages_for
from localgen.backends.cuda.model.host_copy import HostArray, pack, unpack
from localgen.backends.runner.interface import Chunk
from localgen.backends.runner.sequence import Sequence

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


def _no_rows() -> Int32Array:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """Inputs of a step on the host. Rows are tokens, chunk after chunk.

    tokens: int64 [rows].
    slot_mapping: int64 [rows], KV slot of each token: page * PAGE_TOKENS + offset; -1 stores
    nothing.
    output_rows: int64 [outputs], rows whose logits are computed.
    positions: int32 [rows].
    page_tables: int32 [chunks, pages].
    query_starts: int32 [chunks + 1], first row of each chunk.
    seq_lens: int32 [chunks], tokens in the KV cache after the step.
    max_query_len, max_seq_len: as in AttentionMetadata.
    source_rows: int32 [rows], row of the previous step in which each token was sampled, if only the
    device knows the tokens; else empty.
    """

    tokens: Int64Array
    slot_mapping: Int64Array
    output_rows: Int64Array
    positions: Int32Array
    page_tables: Int32Array
    query_starts: Int32Array
    seq_lens: Int32Array
    max_query_len: int
    max_seq_len: int
    source_rows: Int32Array = field(default_factory=_no_rows)

    @property
    def arrays(self) -> tuple[HostArray, ...]:
        """All arrays in packing order; `source_rows` last, because not every step has them."""
        return (
            self.tokens,
            self.slot_mapping,
            self.output_rows,
            self.positions,
            self.page_tables,
            self.query_starts,
            self.seq_lens,
            self.source_rows,
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """StepInputs on the device."""

    tokens: Tensor
    slot_mapping: Tensor
    output_rows: Tensor
    positions: Tensor
    attn_metadata: AttentionMetadata
    source_rows: Tensor

    @property
    def decode_inputs(self) -> DecodeInputs:
        """The inputs that differ between steps of the same decoding sequences."""
        return DecodeInputs(
            tokens=self.tokens,
            slot_mapping=self.slot_mapping,
            positions=self.positions,
            seq_lens=self.attn_metadata.seq_lens,
            page_tables=self.attn_metadata.page_tables,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ChunkArrays:
    """Chunks of a step as arrays, int32 [chunks].

    starts: position of the first token. num_tokens. num_outputs: see Chunk.
    """

    starts: Int32Array
    num_tokens: Int32Array
    num_outputs: Int32Array

    @classmethod
    def of(cls, chunks: Seq[Chunk]) -> ChunkArrays:
        """The arrays of these chunks."""
        return cls(
            np.array([chunk.start for chunk in chunks], np.int32),
            np.array([len(chunk.tokens) for chunk in chunks], np.int32),
            np.array([chunk.num_outputs for chunk in chunks], np.int32),
        )

    @property
    def ends(self) -> Int32Array:
        """Tokens of each sequence after the step."""
        return self.starts + self.num_tokens

    def output_lengths(self) -> Int64Array:
        """Number of tokens before the token of each output, int64 [outputs]."""
        return last_of_each(self.ends.astype(np.int64) + 1, self.num_outputs)


def last_of_each(ends: NDArray[Any], counts: Int32Array) -> Int64Array:
    """Concatenate the `counts` whole numbers below each of `ends`, int64 [sum of counts]."""
    firsts = ends - np.cumsum(counts)
    return np.repeat(firsts, counts) + np.arange(counts.sum())


def build_step_inputs(
    chunks: Seq[Chunk], page_table: Callable[[Sequence], Int32Array]
) -> StepInputs:
    """Build the inputs of a step. page_table: returns the pages of a sequence, in order."""
    arrays = ChunkArrays.of(chunks)
    ends: list[int] = arrays.ends.tolist()
    tables = np.zeros((len(chunks), pages_for(max(ends))), np.int32)
    for row, chunk, end in zip(tables, chunks, ends, strict=True):
        pages = page_table(chunk.seq)[: pages_for(end)]
        row[: len(pages)] = pages
    return step_inputs(chunks, arrays, tables)


def step_inputs(chunks: Seq[Chunk], arrays: ChunkArrays, page_tables: Int32Array) -> StepInputs:
    """Build the inputs of a step. page_tables: int32 [chunks, pages], for all tokens after it."""
    counts, ends = arrays.num_tokens, arrays.ends
    query_starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    positions = last_of_each(ends, counts)
    sequences = np.repeat(np.arange(len(chunks)), counts)
    tokens = chain.from_iterable([chunk.tokens for chunk in chunks])
    return StepInputs(
        tokens=np.fromiter(tokens, np.int64, len(positions)),
        slot_mapping=kv_slots(page_tables, sequences, positions),
        output_rows=last_of_each(query_starts[1:], arrays.num_outputs),
        positions=positions.astype(np.int32),
        page_tables=page_tables,
        query_starts=query_starts,
        seq_lens=ends,
        max_query_len=int(counts.max()),
        max_seq_len=int(ends.max()),
    )


def kv_slots(page_tables: Int32Array, rows: Int64Array, positions: NDArray[Any]) -> Int64Array:
    """KV slot of each position, int64. rows: of the page table of each."""
    slots: Int64Array = page_tables[rows, positions // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS
    slots += positions % PAGE_TOKENS
    return slots


def unpack_inputs(packed: Tensor, like: StepInputs) -> StepBatch:
    """Views of the inputs in a packed tensor on any device. like: inputs of the same shapes."""
    tokens, slots, outputs, positions, tables, starts, lengths, sources = unpack(
        packed, like.arrays
    )
    ragged = AttentionMetadata(tables, starts, lengths, like.max_query_len, like.max_seq_len)
    return StepBatch(tokens, slots, outputs, positions, ragged, sources)


def inputs_to_device(inputs: StepInputs, device: torch.device) -> StepBatch:
    """Copy the inputs to the device in one asynchronous transfer."""
    packed = pack(inputs.arrays, device)
    return unpack_inputs(packed.to(device, non_blocking=True), inputs)
