"""One rank's part of a model: its weights, its pages, its part of every step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from localgen.backends.cuda.device import sizing
from localgen.backends.cuda.device.options import Settings
from localgen.backends.cuda.model.batch import StepInputs
from localgen.backends.cuda.model.decoder import Decoder, KVCache
from localgen.backends.cuda.model.process_group import Ranks
from localgen.backends.cuda.model.source import ModelSource
from localgen.backends.cuda.model.weights import random_weights
from localgen.backends.cuda.steps.cuda_graphs import DeviceSteps, Latest
from localgen.backends.errors import OutOfMemory
from localgen.backends.formats.architecture.model_spec import ModelSpec
from localgen.backends.formats.architecture.sharding import Shard


@dataclass(frozen=True, slots=True, eq=False)
class SharedTokens:
    """A TokenSource for all ranks: what the device of rank 0 knows. own: where it gets them."""

    ranks: Ranks
    own: Latest | None = None

    def fill(self, tokens: Tensor) -> None:
        """As TokenSource.fill; every rank calls it."""
        if self.own is not None:
            self.own.fill(tokens)
        self.ranks.share_tokens(tokens)


class Share:
    """Weights at first; pages and steps once there is room for them."""

    def __init__(
        self, source: ModelSource, options: Settings, dtype: torch.dtype, shard: Shard
    ) -> None:
        """Read the weights. LoadFailed, OutOfMemory."""
        self.shard, self.ranks = shard, Ranks(shard)
        self.device = _device_of(shard, options)
        self._options, self._dtype = options, dtype
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if options.dummy:
            self._weights = random_weights(
                shard.local, device=self.device, dtype=dtype, seed=shard.rank
            )
        else:
            self._weights = source.weights(self.device, dtype, shard)
        self._steps: DeviceSteps | None = None

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return self._weights.num_bytes

    @property
    def sized(self) -> ModelSpec:
        """The model by which memory is measured: logits are whole on every rank."""
        return replace(self.shard.local, vocab=self.shard.spec.vocab)

    @property
    def steps(self) -> DeviceSteps:
        """Its part of each step; only once there is room."""
        assert self._steps is not None
        return self._steps

    def run(self, inputs: StepInputs, tokens: SharedTokens | None) -> Tensor:
        """Its part of a step: logits of all tokens. tokens: those that are not in the inputs.

        OutOfMemory: the other ranks are in the midst of the step, so that none can go on.
        """
        try:
            return self.steps.run(inputs, tokens)
        except torch.OutOfMemoryError:
            raise self._out_of_memory() from None

    def states(self, inputs: StepInputs) -> Tensor:
        """Its part of Steps.states, whose result is the same on every rank. OutOfMemory."""
        try:
            return self.steps.states(inputs)
        except torch.OutOfMemoryError:
            raise self._out_of_memory() from None

    def _out_of_memory(self) -> OutOfMemory:
        return OutOfMemory(
            f"memory ran out on {self.device} in a step of rank {self.shard.rank}: "
            "load with a smaller --batch-size, --parallel or --kv-tokens"
        )

    def free_bytes(self, limit: int | None = None) -> int:
        """Memory for its pages, beside what a step needs. limit: for all ranks on a CPU."""
        sharers = self.shard.size if self.device.type == "cpu" else 1
        work = sizing.work_bytes(self.sized, self._options, self._dtype)
        return sizing.free_bytes(self.device, limit) // sharers - work

    def allocate(self, pages: int, max_len: int) -> bool:
        """Make room, in place of what there was; False: there is not so much."""
        self._steps = None
        try:
            cache = KVCache.zeros(
                self.shard.local, pages, device=self.device, dtype=self._options.cache_dtype
            )
        except torch.OutOfMemoryError:
            return False
        decoder = Decoder(self.shard.local, self._weights, max_len, self.ranks)
        # collectives have not been tried in graphs
        graphs = self.device.type == "cuda" and self.shard.size == 1
        self._steps = DeviceSteps(decoder, cache, graphs=graphs)
        return True


# What rank 0 says to the others, in this order, and what each of them answers.


@dataclass(frozen=True, slots=True)
class Begin:
    """Read the weights of this rank; answered by Ready. port: where the ranks meet."""

    path: Path
    options: Settings
    dtype: torch.dtype
    rank: int
    port: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The weights are there."""

    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Join:
    """Meet the others; answered by Joined."""


@dataclass(frozen=True, slots=True)
class Joined:
    """free_bytes: as Share.free_bytes, once what the ranks tell each other has its memory too."""

    free_bytes: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """As Share.allocate, answered by Allocated; asked again where it did not fit everywhere."""

    pages: int
    max_len: int


@dataclass(frozen=True, slots=True)
class Allocated:
    """Whether there is room."""

    fits: bool


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A step; not answered. shared: only the device of rank 0 knows the tokens."""

    inputs: StepInputs
    shared: bool


@dataclass(frozen=True, slots=True, eq=False)
class ReadStates:
    """As Share.states; not answered."""

    inputs: StepInputs


@dataclass(frozen=True, slots=True)
class Copy:
    """As Share.copy; not answered."""

    pairs: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Leave:
    """The end; not answered."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """In place of any answer, or unasked: this rank cannot go on. code as in LocalgenError."""

    code: str
    message: str


def _device_of(shard: Shard, options: Settings) -> torch.device:
    if shard.size == 1 or options.device == "cpu":  # which all ranks share
        return torch.device(options.device)
    return torch.device("cuda", shard.rank)
