"""The model shard of one rank: weights, KV cache and step execution; messages between ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from localgen.backends.cuda.device import sizing
from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.model.batch import StepBatch, StepInputs
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.process_group import TensorParallelGroup
from localgen.backends.cuda.model.source import ModelSource
from localgen.backends.cuda.model.weights import random_weights
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor, PreviousStepTokens
from localgen.backends.errors import OutOfMemory
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.architecture.sharding import ModelShard


@dataclass(frozen=True, slots=True, eq=False)
class BroadcastTokens:
    """A TokenSource that broadcasts rank 0's tokens to all ranks. source: set on rank 0 only."""

    group: TensorParallelGroup
    source: PreviousStepTokens | None = None

    def fill(self, batch: StepBatch) -> None:
        """See TokenSource.fill. A collective: every rank must call it."""
        if self.source is not None:
            self.source.fill(batch)
        self.group.broadcast_tokens(batch.tokens)


class RankModel:
    """The model shard of one rank. Runs steps once `allocate_cache` has succeeded."""

    def __init__(
        self, source: ModelSource, options: CudaOptions, dtype: torch.dtype, shard: ModelShard
    ) -> None:
        """Load the weights. Raises LoadFailed or OutOfMemory."""
        self.shard, self.group = shard, TensorParallelGroup(shard)
        self.device = _rank_device(shard, options)
        self._options, self._dtype = options, dtype
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if options.dummy:
            self._weights = random_weights(
                shard.local_spec, device=self.device, dtype=dtype, seed=shard.rank
            )
        else:
            self._weights = source.load_weights(self.device, dtype, shard)
        self._executor: DeviceExecutor | None = None

    @property
    def weight_bytes(self) -> int:
        """Size of this rank's weights."""
        return self._weights.num_bytes

    @property
    def sizing_spec(self) -> ModelSpec:
        """The spec for memory estimates: the shard's, but with logits of the full vocabulary."""
        return replace(self.shard.local_spec, vocab_size=self.shard.spec.vocab_size)

    @property
    def executor(self) -> DeviceExecutor:
        """Runs this rank's part of steps. Requires a successful `allocate_cache`."""
        assert self._executor is not None
        return self._executor

    def run(self, inputs: StepInputs, token_source: BroadcastTokens | None) -> Tensor:
        """Run this rank's part of a step; return logits of the full vocabulary.

        token_source: fills in tokens that are not in the inputs. Raises OutOfMemory, which is fatal
        for all ranks: the others are in the middle of the step.
        """
        try:
            return self.executor.run(inputs, token_source)
        except torch.OutOfMemoryError:
            raise self._out_of_memory() from None

    def hidden_states(self, inputs: StepInputs) -> Tensor:
        """Run this rank's part of StepExecutor.hidden_states; every rank gets the full result.

        Raises OutOfMemory.
        """
        try:
            return self.executor.hidden_states(inputs)
        except torch.OutOfMemoryError:
            raise self._out_of_memory() from None

    def _out_of_memory(self) -> OutOfMemory:
        return OutOfMemory(
            f"out of memory on {self.device} in a step of rank {self.shard.rank}: "
            "load with a smaller --batch-size, --parallel or --kv-tokens"
        )

    def close(self) -> None:
        """Free the graphs and the KV cache, if there are any."""
        if self._executor is not None:
            self._executor.close()

    def free_bytes(self, limit_bytes: int | None = None) -> int:
        """Return the memory available for KV pages, after reserving the work memory of a step.

        limit_bytes: cap on the free memory of a CPU, shared by all ranks.
        """
        sharers = self.shard.tp_size if self.device.type == "cpu" else 1
        work = sizing.step_work_bytes(self.sizing_spec, self._options, self._dtype)
        return sizing.device_free_bytes(self.device, limit_bytes) // sharers - work

    def allocate_cache(self, num_pages: int, max_len: int) -> bool:
        """Allocate the KV cache, replacing any previous one. Returns False if it does not fit."""
        self._executor = None
        try:
            cache = KVCache.zeros(
                self.shard.local_spec,
                num_pages,
                device=self.device,
                dtype=self._options.cache_dtype,
            )
        except torch.OutOfMemoryError:
            return False
        decoder = Decoder(self.shard.local_spec, self._weights, max_len, self.group)
        self._executor = DeviceExecutor(
            decoder,
            cache,
            use_cuda_graphs=self.device.type == "cuda",
            max_seqs=self._options.parallel,
            pool_bytes=sizing.graph_pool_bytes(self.sizing_spec, self._options, self._dtype),
        )
        return True


# Messages from rank 0 to the workers, in this order, and their replies.


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Load the weights of a rank. Reply: WeightsLoaded. store_port: port of rank 0's TCPStore."""

    path: Path
    options: CudaOptions
    dtype: torch.dtype
    rank: int
    store_port: int


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """Reply to LoadWeights."""

    weight_bytes: int


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Join the process group. Reply: GroupJoined."""


@dataclass(frozen=True, slots=True)
class GroupJoined:
    """Reply to JoinGroup.

    free_bytes: RankModel.free_bytes, after the process group has allocated its buffers.
    """

    free_bytes: int


@dataclass(frozen=True, slots=True)
class AllocateCache:
    """Call RankModel.allocate_cache. Reply: CacheAllocated. Sent again if a rank lacks memory."""

    num_pages: int
    max_len: int


@dataclass(frozen=True, slots=True)
class CacheAllocated:
    """Reply to AllocateCache. fits: the allocation succeeded."""

    fits: bool


@dataclass(frozen=True, slots=True, eq=False)
class RunStep:
    """Run a step; no reply. broadcasts_tokens: rank 0 broadcasts the input tokens."""

    inputs: StepInputs
    broadcasts_tokens: bool


@dataclass(frozen=True, slots=True, eq=False)
class ComputeHiddenStates:
    """Call RankModel.hidden_states; no reply."""

    inputs: StepInputs


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Call DeviceExecutor.copy_pages; no reply."""

    pairs: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CaptureNext:
    """Call DeviceExecutor.capture_next; no reply."""


@dataclass(frozen=True, slots=True)
class ShutdownWorker:
    """Exit; no reply."""


@dataclass(frozen=True, slots=True)
class WorkerError:
    """A worker failed and exits; sent at any time. code, message: as in LocalgenError."""

    code: str
    message: str


def _rank_device(shard: ModelShard, options: CudaOptions) -> torch.device:
    if shard.tp_size == 1 or options.device == "cpu":  # all ranks share the CPU
        return torch.device(options.device)
    return torch.device("cuda", shard.rank)
