"""The inputs of one step, on the host and on the device."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localgen.backends.cuda.kernels.attention_metadata import AttentionMetadata
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


def build_step_inputs(
    chunks: Seq[Chunk], page_table: Callable[[Sequence], Int32Array]
) -> StepInputs:
    """Build the inputs of a step. page_table: returns the pages of a sequence, in order."""
    lengths = np.array([chunk.start + len(chunk) for chunk in chunks], np.int32)
    rows = np.array([len(chunk) for chunk in chunks], np.int32)
    starts = np.zeros(len(chunks) + 1, np.int32)
    np.cumsum(rows, out=starts[1:])
    tables = np.zeros((len(chunks), pages_for(int(lengths.max()))), np.int32)
    positions = np.empty(starts[-1], np.int32)
    slots = np.empty(starts[-1], np.int64)
    outputs: list[int] = []
    for i, chunk in enumerate(chunks):
        pages = page_table(chunk.seq)[: pages_for(int(lengths[i]))]
        tables[i, : len(pages)] = pages
        here = np.arange(chunk.start, lengths[i], dtype=np.int32)
        own = slice(starts[i], starts[i + 1])
        positions[own] = here
        slots[own] = pages[here // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + here % PAGE_TOKENS
        if chunk.is_sampled:
            outputs += range(starts[i + 1] - 1 - chunk.num_drafts, starts[i + 1])
    return StepInputs(
        tokens=np.fromiter((token for chunk in chunks for token in chunk.tokens), np.int64),
        slot_mapping=slots,
        output_rows=np.array(outputs, np.int64),
        positions=positions,
        page_tables=tables,
        query_starts=starts,
        seq_lens=lengths,
        max_query_len=int(rows.max()),
        max_seq_len=int(lengths.max()),
    )


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
