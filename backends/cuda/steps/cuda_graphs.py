"""Executes decoder steps, replaying CUDA graphs where one fits.

A graph bakes in every number that the host passes to a kernel, so decode steps are padded to a few
shapes: the number of sequences to a bucket, the length to a power of two. A shape is captured the
second time it occurs, so the first answer does not wait for captures.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.model.batch import (
    StepBatch,
    StepInputs,
    inputs_to_device,
    pack_inputs,
    unpack_inputs,
)
from localgen.backends.cuda.model.decoder import Decoder, KVCache

# batch sizes (sequences) that are captured
CAPTURE_SIZES = (1, 2, 4, 8, *range(16, 257, 16))
MIN_GRAPH_LEN = 1024
# a shape runs eagerly this many times before it is captured
_EAGER_RUNS = 1


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Shape of a graph: number of sequences, and maximum sequence length."""

    num_seqs: int
    max_len: int


@dataclass(frozen=True, slots=True)
class _GraphBuffers:
    """Buffers shared by all graphs, which never run concurrently.

    inputs: uint8, packed step inputs. logits: float32 [sequences, vocab]. pool: CUDA graph memory
    pool of the intermediate tensors.
    """

    inputs: Tensor
    logits: Tensor
    pool: Any


class TokenSource(Protocol):
    """Source of input tokens that are not known to the host."""

    def fill(self, tokens: Tensor) -> None:
        """Write the tokens into a step's input. tokens: int64 [rows, including padding]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PreviousStepTokens:
    """Tokens sampled in the previous step, on the device: row i takes `tokens[source_rows[i]]`.

    tokens: int64 [sampled]. source_rows: int64 [rows].
    """

    tokens: Tensor
    source_rows: Tensor

    def fill(self, tokens: Tensor) -> None:
        """See TokenSource.fill."""
        tokens[: len(self.source_rows)] = self.tokens[self.source_rows]


class DeviceExecutor:
    """Runs the steps of a decoder on one device.

    use_cuda_graphs: pad decode steps to graph shapes and, on a GPU, capture and replay them.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, *, use_cuda_graphs: bool) -> None:
        self.decoder, self.cache = decoder, cache
        self.device = cache.layers[0].keys.device
        self._use_cuda_graphs = use_cuda_graphs
        self._shape_counts: dict[GraphShape, int] = {}
        self._graphs: dict[GraphShape, Any] = {}
        self._buffers: _GraphBuffers | None = None

    def run(self, inputs: StepInputs, token_source: TokenSource | None = None) -> Tensor:
        """Return the logits of the output rows, float32 [outputs, vocab].

        They are valid until the next step. token_source: fills in input tokens that are not known
        to the host.
        """
        shape = graph_shape(inputs) if self._use_cuda_graphs else None
        if shape is None:
            return self._run_eager(inputs_to_device(inputs, self.device), token_source)
        padded = pad_inputs(inputs, shape)
        count = self._shape_counts[shape] = self._shape_counts.get(shape, 0) + 1
        if count <= _EAGER_RUNS or self.device.type == "cpu":
            return self._run_eager(inputs_to_device(padded, self.device), token_source)[
                : len(inputs.output_rows)
            ]
        return self._replay(padded, shape, token_source)[: len(inputs.output_rows)]

    def _replay(
        self, padded: StepInputs, shape: GraphShape, token_source: TokenSource | None
    ) -> Tensor:
        buffers = self._buffers = self._buffers or self._allocate(padded)
        packed = pack_inputs(padded, pinned=True)
        buffers.inputs[: len(packed)].copy_(packed, non_blocking=True)
        batch, logits = unpack_inputs(buffers.inputs, padded), buffers.logits[: shape.num_seqs]
        if token_source is not None:
            token_source.fill(batch.tokens)
        if shape not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=buffers.pool):
                self.decoder.forward(batch, self.cache, logits)
            self._graphs[shape] = graph
        self._graphs[shape].replay()
        return logits

    def _allocate(self, padded: StepInputs) -> _GraphBuffers:
        longest = GraphShape(CAPTURE_SIZES[-1], _padded_len(self.decoder.max_len))
        size = sum(array.nbytes for array in pad_inputs(padded, longest).arrays)
        vocab = self.decoder.spec.vocab_size
        return _GraphBuffers(
            torch.empty(size, dtype=torch.uint8, device=self.device),
            torch.empty(CAPTURE_SIZES[-1], vocab, dtype=torch.float32, device=self.device),
            torch.cuda.graph_pool_handle(),
        )

    def hidden_states(self, inputs: StepInputs) -> Tensor:
        """See StepExecutor.hidden_states."""
        return self.decoder.hidden_states(inputs_to_device(inputs, self.device), self.cache)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages of the KV cache. pairs: (source, target) page numbers."""
        self.cache.copy_pages(pairs)

    def _run_eager(self, batch: StepBatch, token_source: TokenSource | None) -> Tensor:
        if token_source is not None:
            token_source.fill(batch.tokens)
        return self.decoder.forward(batch, self.cache)

    def close(self) -> None:
        """Free the graphs and the KV cache."""
        self._graphs.clear()
        self._buffers = None
        self.cache.layers.clear()


def graph_shape(inputs: StepInputs) -> GraphShape | None:
    """Return the shape to pad a step to, or None if it needs eager execution.

    Eager: a sequence has several rows or no output, or there are more sequences than
    CAPTURE_SIZES[-1].
    """
    sequences = len(inputs.seq_lens)
    if (
        inputs.max_query_len > 1
        or len(inputs.output_rows) < sequences
        or sequences > CAPTURE_SIZES[-1]
    ):
        return None
    return GraphShape(
        CAPTURE_SIZES[bisect_left(CAPTURE_SIZES, sequences)], _padded_len(inputs.max_seq_len)
    )


def _padded_len(length: int) -> int:
    return max(MIN_GRAPH_LEN, 1 << (length - 1).bit_length())


def pad_inputs(inputs: StepInputs, shape: GraphShape) -> StepInputs:
    """Pad a decode step to a shape with empty sequences, which store nothing in the KV cache."""
    missing = shape.num_seqs - len(inputs.seq_lens)
    width = pages_for(shape.max_len)
    tables = np.zeros((shape.num_seqs, width), np.int32)
    tables[: len(inputs.page_tables), : inputs.page_tables.shape[1]] = inputs.page_tables
    return StepInputs(
        tokens=np.pad(inputs.tokens, (0, missing)),
        slot_mapping=np.pad(inputs.slot_mapping, (0, missing), constant_values=-1),
        output_rows=np.arange(shape.num_seqs),
        positions=np.pad(inputs.positions, (0, missing)),
        page_tables=tables,
        query_starts=np.pad(inputs.query_starts, (0, missing), mode="edge"),
        seq_lens=np.pad(inputs.seq_lens, (0, missing)),
        max_query_len=1,
        max_seq_len=shape.max_len,
    )
