"""One rank's part of a model: its weights, its pages, its part of every step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from localgen.backends.cuda.device import sizing
from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.model.batch import StepInputs
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
    """A TokenSource for all group: what the device of rank 0 knows. source: where it gets them."""

    group: TensorParallelGroup
    source: PreviousStepTokens | None = None

    def fill(self, tokens: Tensor) -> None:
        """As TokenSource.fill; every rank calls it."""
        if self.source is not None:
            self.source.fill(tokens)
        self.group.broadcast_tokens(tokens)


class RankModel:
    """Weights at first; pages and steps once there is room for them."""

    def __init__(
        self, source: ModelSource, options: CudaOptions, dtype: torch.dtype, shard: ModelShard
    ) -> None:
        """Read the weights. LoadFailed, OutOfMemory."""
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
        """Memory of the weights."""
        return self._weights.num_bytes

    @property
    def sizing_spec(self) -> ModelSpec:
        """The model by which memory is measured: logits are whole on every rank."""
        return replace(self.shard.local_spec, vocab_size=self.shard.spec.vocab_size)

    @property
    def executor(self) -> DeviceExecutor:
        """Its part of each step; only once there is room."""
        assert self._executor is not None
        return self._executor

    def run(self, inputs: StepInputs, token_source: BroadcastTokens | None) -> Tensor:
        """Its part of a step: logits of all tokens. token_source: those that are not in the inputs.

        OutOfMemory: the other ranks are in the midst of the step, so that none can go on.
        """
        try:
            return self.executor.run(inputs, token_source)
        except torch.OutOfMemoryError:
            raise self._out_of_memory() from None

    def hidden_states(self, inputs: StepInputs) -> Tensor:
        """Its part of StepExecutor.hidden_states, whose result is the same on every rank.
        OutOfMemory."""
        try:
            return self.executor.hidden_states(inputs)
        except torch.OutOfMemoryError:
            raise self._out_of_memory() from None

    def _out_of_memory(self) -> OutOfMemory:
        return OutOfMemory(
            f"memory ran out on {self.device} in a step of rank {self.shard.rank}: "
            "load with a smaller --batch-size, --parallel or --kv-tokens"
        )

    def free_bytes(self, limit_bytes: int | None = None) -> int:
        """Memory for its pages, beside what a step needs. limit_bytes: for all ranks on a CPU."""
        sharers = self.shard.tp_size if self.device.type == "cpu" else 1
        work = sizing.step_work_bytes(self.sizing_spec, self._options, self._dtype)
        return sizing.device_free_bytes(self.device, limit_bytes) // sharers - work

    def allocate_cache(self, num_pages: int, max_len: int) -> bool:
        """Make room, in place of what there was; False: there is not so much."""
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
        # collectives have not been tried in graphs
        graphs = self.device.type == "cuda" and self.shard.tp_size == 1
        self._executor = DeviceExecutor(decoder, cache, use_cuda_graphs=graphs)
        return True


# What rank 0 says to the others, in this order, and what each of them answers.


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Read the weights of this rank; answered by WeightsLoaded. store_port: where the ranks
    meet."""

    path: Path
    options: CudaOptions
    dtype: torch.dtype
    rank: int
    store_port: int


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """The weights are there."""

    weight_bytes: int


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Meet the others; answered by GroupJoined."""


@dataclass(frozen=True, slots=True)
class GroupJoined:
    """free_bytes: as RankModel.free_bytes, once what the ranks tell each other has its memory
    too."""

    free_bytes: int


@dataclass(frozen=True, slots=True)
class AllocateCache:
    """As RankModel.allocate_cache, answered by CacheAllocated; asked again where it did not fit
    everywhere."""

    num_pages: int
    max_len: int


@dataclass(frozen=True, slots=True)
class CacheAllocated:
    """Whether there is room."""

    fits: bool


@dataclass(frozen=True, slots=True, eq=False)
class RunStep:
    """A step; not answered. broadcasts_tokens: only the device of rank 0 knows the tokens."""

    inputs: StepInputs
    broadcasts_tokens: bool


@dataclass(frozen=True, slots=True, eq=False)
class ComputeHiddenStates:
    """As RankModel.hidden_states; not answered."""

    inputs: StepInputs


@dataclass(frozen=True, slots=True)
class CopyPages:
    """As DeviceExecutor.copy_pages; not answered."""

    pairs: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ShutdownWorker:
    """The end; not answered."""


@dataclass(frozen=True, slots=True)
class WorkerError:
    """In place of any answer, or unasked: this rank cannot go on. code as in LocalgenError."""

    code: str
    message: str


def _rank_device(shard: ModelShard, options: CudaOptions) -> torch.device:
    if shard.tp_size == 1 or options.device == "cpu":  # which all ranks share
        return torch.device(options.device)
    return torch.device("cuda", shard.rank)
