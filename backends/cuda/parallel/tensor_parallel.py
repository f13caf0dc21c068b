"""A model that several ranks compute, each its part of every layer: rank 0 of them.

This process has the scheduler, the sampler and the books of the cache. The others are told each
step, and that pages are copied; pages have the same numbers everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from localgen.backends.cuda.device import sizing
from localgen.backends.cuda.device.options import Settings
from localgen.backends.cuda.kv.page_pool import pages_for
from localgen.backends.cuda.model import process_group
from localgen.backends.cuda.model.batch import StepInputs
from localgen.backends.cuda.model.source import ModelSource
from localgen.backends.cuda.parallel.rank_model import (
    Allocate,
    Allocated,
    Begin,
    Copy,
    Join,
    Joined,
    Leave,
    ReadStates,
    Ready,
    Run,
    Share,
    SharedTokens,
)
from localgen.backends.cuda.parallel.worker_group import Followers
from localgen.backends.cuda.steps.cuda_graphs import Latest
from localgen.backends.errors import EngineDied, LoadFailed, LocalgenError
from localgen.backends.formats.architecture.sharding import Shard, check
from localgen.backends.memory.kv_sizing import Size
from localgen.backends.runner.interface import StepFailed


class TensorParallelSteps:
    """Steps of all ranks together. StepFailed: one of them is lost, or could not compute."""

    def __init__(self, share: Share, followers: Followers) -> None:
        self.device = share.device
        self.followers = followers
        self._share = share

    def run(self, inputs: StepInputs, latest: Latest | None = None) -> Tensor:
        """As Steps.run."""
        tokens = None if latest is None else SharedTokens(self._share.ranks, latest)
        with self._together():
            self.followers.tell(Run(inputs, shared=latest is not None))
            return self._share.run(inputs, tokens)

    def states(self, inputs: StepInputs) -> Tensor:
        """As Steps.states."""
        with self._together():
            self.followers.tell(ReadStates(inputs))
            return self._share.states(inputs)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except LocalgenError as error:
            raise StepFailed(error.message) from error
        except RuntimeError as error:
            # of a collective, most likely: a rank has died in the midst of it
            raise StepFailed(self.followers.loss(error).message) from error

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """As Steps.copy."""
        if not pairs:
            return
        try:
            self.followers.tell(Copy(pairs))
        except LocalgenError as error:
            raise StepFailed(error.message) from error
        self._share.steps.copy(pairs)

    def close(self) -> None:
        """As Steps.close."""
        self.followers.dismiss(Leave())
        process_group.leave()
        self.followers.close()
        self._share.steps.close()


def load(
    source: ModelSource,
    options: Settings,
    dtype: torch.dtype,
    limit: int | None,
    on_progress: Callable[[float], None],
) -> tuple[TensorParallelSteps, Size, int]:
    """The steps, how large the pool is, and the bytes of all weights.

    limit: what there is for this model on a CPU. LocalgenError: of whichever rank; none is left.
    """
    check(source.spec, options.tp)
    try:
        return _load(source, options, dtype, limit, on_progress)
    except EngineDied as error:
        raise LoadFailed(f"cannot load {source.path}: {error.message}") from error


def _load(
    source: ModelSource,
    options: Settings,
    dtype: torch.dtype,
    limit: int | None,
    on_progress: Callable[[float], None],
) -> tuple[TensorParallelSteps, Size, int]:
    shard = Shard(source.spec, 0, options.tp)
    with ExitStack() as undo:
        followers = Followers(shard.size)
        undo.callback(followers.close)
        store = process_group.meeting_point(shard.size)
        followers.tell_each(
            lambda rank: Begin(source.path, options, dtype, rank=rank, port=store.port)
        )
        share = Share(source, options, dtype, shard)
        on_progress(1.0)
        weight_bytes = share.weight_bytes + sum(r.weight_bytes for r in followers.replies(Ready))
        followers.vital()
        followers.tell(Join())
        undo.callback(process_group.leave, together=False)
        try:
            process_group.join(shard, store, share.device)
        except RuntimeError as error:
            raise followers.loss(error) from error
        own = share.free_bytes(None if limit is None else limit - weight_bytes)
        size = sizing.fit(
            share.sized,
            options,
            free=min(own, *(reply.free_bytes for reply in followers.replies(Joined))),
            allocate=lambda size: _allocate(size, share, followers),
        )
        undo.pop_all()
    return TensorParallelSteps(share, followers), size, weight_bytes


def notes(options: Settings) -> tuple[str, ...]:
    """What a user should know of how a model is divided."""
    if options.tp == 1:
        return ()
    if options.device == "cpu":
        return (f"each layer is divided among {options.tp} processes (--tp)",)
    return (f"each layer is divided among {options.tp} GPUs (--tp), without CUDA graphs",)


def _allocate(size: Size, share: Share, followers: Followers) -> bool:
    followers.tell(Allocate(pages_for(size.kv_tokens), size.ctx))
    fits = share.allocate(pages_for(size.kv_tokens), size.ctx)
    return all([fits, *(reply.fits for reply in followers.replies(Allocated))])
