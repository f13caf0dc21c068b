"""Tensor parallelism on rank 0: loads a model across ranks and runs its steps.

This process holds the scheduler, the sampler and the page tables. It sends every step and page copy
to the workers; pages have the same numbers on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from localgen.backends.cuda.device import sizing
from localgen.backends.cuda.device.options import CudaOptions
from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.model import process_group
from localgen.backends.cuda.model.batch import Int32Array, StepInputs
from localgen.backends.cuda.model.source import ModelSource
from localgen.backends.cuda.parallel.rank_model import (
    AllocateCache,
    BroadcastTokens,
    CacheAllocated,
    CaptureNext,
    ComputeHiddenStates,
    CopyPages,
    GroupJoined,
    JoinGroup,
    LoadWeights,
    RankModel,
    RunStep,
    ShutdownWorker,
    WeightsLoaded,
)
from localgen.backends.cuda.parallel.worker_group import WorkerGroup
from localgen.backends.cuda.steps.cuda_graphs import PreviousStepTokens
from localgen.backends.errors import EngineDied, LoadFailed, LocalgenError
from localgen.backends.formats.architecture.sharding import ModelShard, ensure_divisible
from localgen.backends.memory.kv_sizing import KVSize
from localgen.backends.runner.interface import StepFailed


class TensorParallelExecutor:
    """A StepExecutor over all ranks. Raises StepFailed if a rank is lost or fails."""

    def __init__(self, rank_model: RankModel, workers: WorkerGroup) -> None:
        self.device = rank_model.device
        self.workers = workers
        self._rank_model = rank_model

    def run(self, inputs: StepInputs, token_source: PreviousStepTokens | None = None) -> Tensor:
        """See StepExecutor.run."""
        tokens = (
            None if token_source is None else BroadcastTokens(self._rank_model.group, token_source)
        )
        with self._raise_step_failed():
            self.workers.broadcast(RunStep(inputs, broadcasts_tokens=token_source is not None))
            return self._rank_model.run(inputs, tokens)

    def advance(self, tokens: Tensor, new_pages: Int32Array | None) -> Tensor | None:
        """See StepExecutor.advance. The other ranks lack the tokens: they need a message anyway."""
        return None

    def hidden_states(self, inputs: StepInputs) -> Tensor:
        """See StepExecutor.hidden_states."""
        with self._raise_step_failed():
            self.workers.broadcast(ComputeHiddenStates(inputs))
            return self._rank_model.hidden_states(inputs)

    @contextmanager
    def _raise_step_failed(self) -> Iterator[None]:
        try:
            yield
        except LocalgenError as error:
            raise StepFailed(error.message) from error
        except RuntimeError as error:
            # most likely from a collective: a rank died during it
            raise StepFailed(self.workers.failure_cause(error).message) from error

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """See StepExecutor.copy_pages."""
        if not pairs:
            return
        try:
            self.workers.broadcast(CopyPages(pairs))
        except LocalgenError as error:
            raise StepFailed(error.message) from error
        self._rank_model.executor.copy_pages(pairs)

    def capture_next(self) -> bool:
        """See StepExecutor.capture_next. All ranks have run the same steps, so all capture one."""
        if self._rank_model.executor.next_capture is None:
            return False
        with self._raise_step_failed():
            self.workers.broadcast(CaptureNext())
            return self._rank_model.executor.capture_next()

    @property
    def is_warming_up(self) -> bool:
        """See StepExecutor.is_warming_up."""
        return self._rank_model.executor.is_warming_up

    def close(self) -> None:
        """See StepExecutor.close."""
        # NCCL's communicators wait for the end of all graphs that use them
        self._rank_model.close()
        self.workers.shut_down(ShutdownWorker())
        process_group.destroy_process_group()
        self.workers.close()


def load_tensor_parallel(
    source: ModelSource,
    options: CudaOptions,
    dtype: torch.dtype,
    limit_bytes: int | None,
    on_progress: Callable[[float], None],
) -> tuple[TensorParallelExecutor, KVSize, int]:
    """Load the model on all ranks; return the executor, the KV cache size and the weight bytes.

    limit_bytes: memory limit of the model on a CPU. Raises the LocalgenError of the rank that
    failed, after all workers are stopped.
    """
    ensure_divisible(source.spec, options.tp)
    try:
        return _load_on_ranks(source, options, dtype, limit_bytes, on_progress)
    except EngineDied as error:
        raise LoadFailed(f"cannot load {source.path}: {error.message}") from error


def _load_on_ranks(
    source: ModelSource,
    options: CudaOptions,
    dtype: torch.dtype,
    limit_bytes: int | None,
    on_progress: Callable[[float], None],
) -> tuple[TensorParallelExecutor, KVSize, int]:
    shard = ModelShard(source.spec, 0, options.tp)
    with ExitStack() as undo:
        workers = WorkerGroup(shard.tp_size)
        undo.callback(workers.close)
        store = process_group.create_store(shard.tp_size)
        workers.send_each(
            lambda rank: LoadWeights(source.path, options, dtype, rank=rank, store_port=store.port)
        )
        rank_model = RankModel(source, options, dtype, shard)
        on_progress(1.0)
        weight_bytes = rank_model.weight_bytes + sum(
            r.weight_bytes for r in workers.gather_replies(WeightsLoaded)
        )
        workers.exit_on_worker_loss()
        workers.broadcast(JoinGroup())
        undo.callback(process_group.destroy_process_group, all_ranks=False)
        try:
            process_group.init_process_group(shard, store, rank_model.device)
        except RuntimeError as error:
            raise workers.failure_cause(error) from error
        own = rank_model.free_bytes(None if limit_bytes is None else limit_bytes - weight_bytes)
        size = sizing.fit_kv_cache(
            rank_model.sizing_spec,
            options,
            free_bytes=min(
                own, *(reply.free_bytes for reply in workers.gather_replies(GroupJoined))
            ),
            allocate=lambda size: _allocate_on_ranks(size, rank_model, workers),
        )
        undo.pop_all()
    return TensorParallelExecutor(rank_model, workers), size, weight_bytes


def tensor_parallel_notes(options: CudaOptions) -> tuple[str, ...]:
    """Return user-visible notes on how the model is split; empty without tensor parallelism."""
    if options.tp == 1:
        return ()
    if options.device == "cpu":
        return (f"each layer is split across {options.tp} processes (--tp)",)
    return (f"each layer is split across {options.tp} GPUs (--tp)",)


def _allocate_on_ranks(size: KVSize, rank_model: RankModel, workers: WorkerGroup) -> bool:
    workers.broadcast(AllocateCache(pages_for(size.kv_tokens), size.ctx))
    fits = rank_model.allocate_cache(pages_for(size.kv_tokens), size.ctx)
    return all([fits, *(reply.fits for reply in workers.gather_replies(CacheAllocated))])
