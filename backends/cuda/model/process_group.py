"""Collectives of the tensor-parallel ranks of one model.

NCCL between GPUs, gloo on the CPU. All ranks are processes on one machine, so only the loopback
interface is used.
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
# for ranks that hang (dead ones are detected separately); long enough for a rank to compile kernels
_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """Collectives used by the decoder; without communication if tp_size is 1.

    All ranks must make the same calls in the same order. Sums are bitwise identical on all ranks.
    """

    shard: ModelShard

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, in place."""
        if self.shard.tp_size > 1:
            dist.all_reduce(x)
        return x

    def vocab_parallel_embedding(self, table: Tensor, tokens: Tensor) -> Tensor:
        """Embeddings of the tokens, each looked up on the rank that owns it.

        table: this rank's rows, [vocab shard, hidden].
        """
        if self.shard.tp_size == 1:
            return table[tokens]
        own = tokens - self.shard.vocab_range[0]
        there = (own >= 0) & (own < len(table))
        found = table[own.where(there, 0)]
        return self.all_reduce(found.masked_fill_(~there[:, None], 0))

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary, [rows, vocab]. logits: those of this rank's shard."""
        if self.shard.tp_size == 1:
            return logits
        (rows, own), width = logits.shape, self.shard.vocab_shard_size
        parts = logits.new_empty(self.shard.tp_size, rows, width)
        if rows:
            padded = functional.pad(logits, (0, width - own)).contiguous()
            dist.all_gather(list(parts), padded)
        return parts.transpose(0, 1).flatten(1)[:, : self.shard.spec.vocab_size]

    def max_over_ranks(self, value: int) -> int:
        """The largest value of any rank, on all of them. Waits for the device."""
        if self.shard.tp_size == 1:
            return value
        on_gpu = dist.get_backend() == "nccl"
        found = torch.tensor(value, device="cuda" if on_gpu else "cpu")
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)

    def broadcast_tokens(self, tokens: Tensor) -> None:
        """Broadcast tokens from rank 0, in place. tokens: int64, on the device."""
        dist.broadcast(tokens, src=0)


def create_store(world_size: int) -> TCPStore:
    """Create the rendezvous store on rank 0; the other ranks connect to its port."""
    # by default the store would listen on all interfaces
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
    """Connect to the rendezvous store of rank 0."""
    return TCPStore(_HOST, port, world_size, is_master=False, timeout=_TIMEOUT)


def init_process_group(shard: ModelShard, store: TCPStore, device: torch.device) -> None:
    """Join the process group; returns when all ranks have. Raises RuntimeError on a timeout."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
    # registering the buffers of a CUDA graph may make a rank wait for the captures of the others,
    # one of which may have failed
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=shard.rank,
        world_size=shard.tp_size,
        timeout=_TIMEOUT,
        # connect eagerly: free memory is measured afterwards
        device_id=device if on_gpu else None,
    )
    dist.all_reduce(torch.zeros(1, device=device))


def destroy_process_group(*, all_ranks: bool = True) -> None:
    """Leave the process group. all_ranks: all ranks leave it now."""
    # NCCL may block on ranks that do not leave; then it is freed at process exit
    if dist.is_initialized() and (all_ranks or dist.get_backend() == "gloo"):
        dist.destroy_process_group()
