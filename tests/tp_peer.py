"""Rank 1 of 2 for tests: a worker process that computes one model after another.

Started once per test module: starting a process that imports torch takes seconds.
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

from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.model import process_group
from localgen.backends.cuda.model.batch import Int32Array, StepInputs
from localgen.backends.cuda.model.source import open_model_source
from localgen.backends.cuda.parallel.rank_model import BroadcastTokens, RankModel
from localgen.backends.cuda.steps.cuda_graphs import PreviousStepTokens
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.machine.python_process import python_environment

SETTINGS = CudaOptions(
    device="cpu", tp=2, cache_type_k="f32", cache_type_v="f32", parallel=8, max_batch_tokens=512
)
CPU = torch.device("cpu")


def shard_of(folder: Path, rank: int) -> RankModel:
    """One rank's half of a model, in float32."""
    source = open_model_source(folder)
    return RankModel(source, SETTINGS, torch.float32, ModelShard(source.spec, rank, 2))


@dataclass(frozen=True, slots=True)
class Peer:
    """The process of rank 1."""

    orders: Any

    def steps(self, folder: Path, *, pages: int, max_len: int) -> PairedSteps:
        """Load a model in both processes."""
        self.orders.send(("load", folder, pages, max_len))
        rank_model = shard_of(folder, 0)
        assert rank_model.allocate_cache(pages, max_len)
        return PairedSteps(rank_model, self.orders)


@dataclass(frozen=True, slots=True)
class PairedSteps:
    """Steps in both processes, as TensorParallelExecutor runs them."""

    rank_model: RankModel
    orders: Any
    device = CPU

    def run(self, inputs: StepInputs, token_source: PreviousStepTokens | None = None) -> Tensor:
        """Run a step. Where tokens exist on rank 0 only, rank 1 gets wrong ones to begin with."""
        theirs = (
            inputs if token_source is None else replace(inputs, tokens=np.zeros_like(inputs.tokens))
        )
        self.orders.send(("run", theirs, token_source is not None))
        tokens = (
            None if token_source is None else BroadcastTokens(self.rank_model.group, token_source)
        )
        return self.rank_model.executor.run(inputs, tokens)

    def advance(self, tokens: Tensor, new_pages: Int32Array | None) -> Tensor | None:
        return None

    def hidden_states(self, inputs: StepInputs) -> Tensor:
        self.orders.send(("states", inputs))
        return self.rank_model.hidden_states(inputs)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        self.orders.send(("copy", pairs))
        self.rank_model.executor.copy_pages(pairs)

    def capture_next(self) -> bool:
        return False

    @property
    def is_warming_up(self) -> bool:
        return False

    def close(self) -> None:
        self.rank_model.executor.close()


@contextmanager
def peer() -> Iterator[Peer]:
    """Start rank 1 and connect to it."""
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=python_environment(),
        )
    store = process_group.create_store(2)
    try:
        ours.send(store.port)
        process_group.init_process_group(_whole(0), store, CPU)
        yield Peer(ours)
    finally:
        ours.send(None)
        process_group.destroy_process_group()
        ours.close()
        assert process.wait(20) == 0


def _whole(rank: int) -> ModelShard:
    spec: Any = None  # joining asks for nothing but the numbers
    return ModelShard(spec, rank, 2)


def _serve(orders: Connection[Any, Any]) -> None:
    process_group.init_process_group(_whole(1), process_group.connect_store(orders.recv(), 2), CPU)
    while (order := orders.recv()) is not None:
        match order:
            case "load", folder, pages, max_len:
                rank_model = shard_of(folder, 1)
                assert rank_model.allocate_cache(pages, max_len)
            case "run", inputs, shared:
                rank_model.executor.run(
                    inputs, BroadcastTokens(rank_model.group) if shared else None
                )
            case "states", inputs:
                rank_model.hidden_states(inputs)
            case "copy", pairs:
                rank_model.executor.copy_pages(pairs)
    process_group.destroy_process_group()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
