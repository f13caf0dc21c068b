"""The processes that compute one model together, and what they tell each other in a step.

NCCL between GPUs, gloo on the CPU; all on the loopback interface, for the ranks are processes of
one machine.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn import functional

from localgen.backends.formats.architecture.sharding import ModelShard

_HOST = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# a rank that has died is noticed at once and otherwise; this is for one that hangs. Long enough for
# kernels that only one of them has to compile.
_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """What a decoder needs of the other ranks; with a shard that is all of the model, nothing.

    All ranks call the same in the same order. Sums come out the same on every rank, to the bit.
    """

    shard: ModelShard

    def all_reduce(self, x: Tensor) -> Tensor:
        """x of all ranks, added up in place."""
        if self.shard.tp_size > 1:
            dist.all_reduce(x)
        return x

    def vocab_parallel_embedding(self, table: Tensor, tokens: Tensor) -> Tensor:
        """The rows of these tokens, each from the rank that has it. table: [own tokens, hidden]."""
        if self.shard.tp_size == 1:
            return table[tokens]
        own = tokens - self.shard.vocab_range[0]
        there = (own >= 0) & (own < len(table))
        found = table[own.where(there, 0)]
        return self.all_reduce(found.masked_fill_(~there[:, None], 0))

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Logits of all tokens, [rows, vocab]. logits: of the own tokens."""
        if self.shard.tp_size == 1:
            return logits
        (rows, own), width = logits.shape, self.shard.vocab_shard_size
        parts = logits.new_empty(self.shard.tp_size, rows, width)
        if rows:
            padded = functional.pad(logits, (0, width - own)).contiguous()
            dist.all_gather(list(parts), padded)
        return parts.transpose(0, 1).flatten(1)[:, : self.shard.spec.vocab_size]

    def broadcast_tokens(self, tokens: Tensor) -> None:
        """Give everybody the tokens that rank 0 has. tokens: int64, on the device."""
        dist.broadcast(tokens, src=0)


def create_store(world_size: int) -> TCPStore:
    """Where ranks find each other; its port is for them. For rank 0, which keeps it."""
    # of its own, the store would listen on every interface
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        _HOST,
        port,
        world_size,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(port: int, world_size: int) -> TCPStore:
    """The same for the other ranks."""
    return TCPStore(_HOST, port, world_size, is_master=False, timeout=_TIMEOUT)


def init_process_group(shard: ModelShard, store: TCPStore, device: torch.device) -> None:
    """Meet the other ranks; returns when all are there. RuntimeError: one does not come."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=shard.rank,
        world_size=shard.tp_size,
        timeout=_TIMEOUT,
        # connects at once: memory is measured afterwards
        device_id=device if on_gpu else None,
    )
    dist.all_reduce(torch.zeros(1, device=device))


def destroy_process_group(*, all_ranks: bool = True) -> None:
    """Let go of the others. all_ranks: every rank does."""
    # NCCL may wait for those that do not; then it goes with this process
    if dist.is_initialized() and (all_ranks or dist.get_backend() == "gloo"):
        dist.destroy_process_group()
