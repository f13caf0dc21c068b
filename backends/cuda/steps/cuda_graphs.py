"""Executes decoder steps, replaying CUDA graphs where one fits.

A graph bakes in every number that the host passes to a kernel, so decode steps are padded to a few
shapes: the number of sequences to a bucket, the length to a power of two. A shape is captured the
second time it occurs, so the first answer does not wait for captures.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.model.batch import (
    StepBatch,
    StepInputs,
    inputs_to_device,
    unpack_inputs,
)
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.host_copy import pack, packed_bytes

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

    def fill(self, batch: StepBatch) -> None:
        """Write the tokens into `batch.tokens`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PreviousStepTokens:
    """Tokens sampled in the previous step, int64 [sampled], on the device.

    A step takes them by its `source_rows`.
    """

    tokens: Tensor

    def fill(self, batch: StepBatch) -> None:
        """See TokenSource.fill."""
        rows = batch.source_rows
        torch.index_select(self.tokens, 0, rows, out=batch.tokens[: len(rows)])


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
        buffers = self._buffers = self._buffers or self._allocate()
        packed = pack(padded.arrays, self.device)
        buffers.inputs[: len(packed)].copy_(packed, non_blocking=True)
        batch, logits = unpack_inputs(buffers.inputs, padded), buffers.logits[: shape.num_seqs]
        if token_source is not None:
            token_source.fill(batch)
        if shape not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=buffers.pool):
                self.decoder.forward(batch, self.cache, logits)
            self._graphs[shape] = graph
        self._graphs[shape].replay()
        return logits

    def _allocate(self) -> _GraphBuffers:
        longest = GraphShape(CAPTURE_SIZES[-1], _padded_len(self.decoder.max_len))
        vocab = self.decoder.spec.vocab_size
        return _GraphBuffers(
            torch.empty(
                packed_bytes(empty_inputs(longest).arrays), dtype=torch.uint8, device=self.device
            ),
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
            token_source.fill(batch)
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


def empty_inputs(shape: GraphShape) -> StepInputs:
    """Inputs of a step of empty sequences, which store nothing in the KV cache."""
    return StepInputs(
        tokens=np.zeros(shape.num_seqs, np.int64),
        slot_mapping=np.full(shape.num_seqs, -1, np.int64),
        output_rows=np.arange(shape.num_seqs),
        positions=np.zeros(shape.num_seqs, np.int32),
        page_tables=np.zeros((shape.num_seqs, pages_for(shape.max_len)), np.int32),
        query_starts=np.zeros(shape.num_seqs + 1, np.int32),
        seq_lens=np.zeros(shape.num_seqs, np.int32),
        max_query_len=1,
        max_seq_len=shape.max_len,
        source_rows=np.zeros(shape.num_seqs, np.int32),
    )


def pad_inputs(inputs: StepInputs, shape: GraphShape) -> StepInputs:
    """Pad a decode step to a shape with empty sequences."""
    padded = empty_inputs(shape)
    for target, array in zip(padded.arrays, inputs.arrays, strict=True):
        target[tuple(map(slice, array.shape))] = array
    padded.query_starts[len(inputs.query_starts) :] = inputs.query_starts[-1]
    return replace(padded, source_rows=inputs.source_rows)
