"""Rank 1 of 2 for tests: a process that computes one model after another, as a follower does.

Started once for a test module: each start of a process that imports torch takes seconds.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localgen.backends.cuda.device.options import Settings
from localgen.backends.cuda.model import process_group
from localgen.backends.cuda.model.batch import StepInputs
from localgen.backends.cuda.model.source import open_source
from localgen.backends.cuda.parallel.rank_model import Share, SharedTokens
from localgen.backends.cuda.steps.cuda_graphs import Latest
from localgen.backends.formats.architecture.sharding import Shard
from localgen.machine.python_process import python_environment

SETTINGS = Settings(
    device="cpu", tp=2, cache_type_k="f32", cache_type_v="f32", parallel=8, max_batch_tokens=512
)
CPU = torch.device("cpu")


def shard_of(folder: Path, rank: int) -> Share:
    """Half of a model, in float32."""
    source = open_source(folder)
    return Share(source, SETTINGS, torch.float32, Shard(source.spec, rank, 2))


@dataclass(frozen=True, slots=True)
class Peer:
    """The other process."""

    orders: Any

    def steps(self, folder: Path, *, pages: int, max_len: int) -> PairedSteps:
        """A model in both processes."""
        self.orders.send(("load", folder, pages, max_len))
        share = shard_of(folder, 0)
        assert share.allocate(pages, max_len)
        return PairedSteps(share, self.orders)


@dataclass(frozen=True, slots=True)
class PairedSteps:
    """Steps of both, as TensorParallelSteps has them."""

    share: Share
    orders: Any
    device = CPU

    def run(self, inputs: StepInputs, latest: Latest | None = None) -> Tensor:
        """Where the tokens are only on this side, the other gets wrong ones to begin with."""
        theirs = inputs if latest is None else replace(inputs, tokens=np.zeros_like(inputs.tokens))
        self.orders.send(("run", theirs, latest is not None))
        tokens = None if latest is None else SharedTokens(self.share.ranks, latest)
        return self.share.steps.run(inputs, tokens)

    def states(self, inputs: StepInputs) -> Tensor:
        self.orders.send(("states", inputs))
        return self.share.states(inputs)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        self.orders.send(("copy", pairs))
        self.share.steps.copy(pairs)

    def close(self) -> None:
        self.share.steps.close()


@contextmanager
def peer() -> Iterator[Peer]:
    """Start rank 1 and meet it."""
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=python_environment(),
        )
    store = process_group.meeting_point(2)
    try:
        ours.send(store.port)
        process_group.join(_whole(0), store, CPU)
        yield Peer(ours)
    finally:
        ours.send(None)
        process_group.leave()
        ours.close()
        assert process.wait(20) == 0


def _whole(rank: int) -> Shard:
    spec: Any = None  # joining asks for nothing but the numbers
    return Shard(spec, rank, 2)


def _serve(orders: Connection[Any, Any]) -> None:
    process_group.join(_whole(1), process_group.store_at(orders.recv(), 2), CPU)
    while (order := orders.recv()) is not None:
        match order:
            case "load", folder, pages, max_len:
                share = shard_of(folder, 1)
                assert share.allocate(pages, max_len)
            case "run", inputs, shared:
                share.steps.run(inputs, SharedTokens(share.ranks) if shared else None)
            case "states", inputs:
                share.states(inputs)
            case "copy", pairs:
                share.steps.copy(pairs)
    process_group.leave()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
