"""Worker process of a tensor-parallel rank: `python -m localgen.backends.cuda.parallel.worker FD`.

It executes the messages of rank 0 from the socket FD. Its standard input is a pipe that is never
written to: it closes when rank 0 exits or crashes, and then this process exits too.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading

import torch

from localgen.backends.cuda.model import process_group
from localgen.backends.cuda.model.source import open_model_source
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
    WorkerError,
)
from localgen.backends.errors import LocalgenError
from localgen.backends.formats.architecture.sharding import ModelShard
from localgen.backends.messages import FrameSocket, inherited_socket


def main(fd: int) -> int:
    """Serve until ShutdownWorker; return the exit status."""
    # rank 0 handles Ctrl+C
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    rank_0 = inherited_socket(fd)
    try:
        begin = pickle.loads(rank_0.receive())
        assert isinstance(begin, LoadWeights)
        serve(rank_0, begin)
    except EOFError:
        return 1
    except LocalgenError as error:
        failure = WorkerError(error.code, error.message)
    except Exception as error:  # on any bug here, rank 0 must not wait for this step
        failure = WorkerError("internal_error", f"{type(error).__name__}: {error}")
    else:
        return 0
    with contextlib.suppress(OSError):
        rank_0.send(pickle.dumps(failure))
    return 1


def serve(rank_0: FrameSocket, request: LoadWeights) -> None:
    """Load one model and run its steps until ShutdownWorker. Raises EOFError if rank 0 is gone."""
    source = open_model_source(request.path)
    shard = ModelShard(source.spec, request.rank, request.options.tp)
    rank_model = RankModel(source, request.options, request.dtype, shard)
    if rank_model.device.type == "cpu":  # all ranks share the cores
        torch.set_num_threads(max(1, torch.get_num_threads() // shard.tp_size))
    rank_0.send(pickle.dumps(WeightsLoaded(rank_model.weight_bytes)))
    while True:
        order = pickle.loads(rank_0.receive())
        match order:
            case RunStep(inputs, shared):
                rank_model.run(inputs, BroadcastTokens(rank_model.group) if shared else None)
            case ComputeHiddenStates(inputs):
                rank_model.hidden_states(inputs)
            case CopyPages(pairs):
                rank_model.executor.copy_pages(pairs)
            case CaptureNext():
                rank_model.executor.capture_next()
            case JoinGroup():
                process_group.init_process_group(
                    shard,
                    process_group.connect_store(request.store_port, shard.tp_size),
                    rank_model.device,
                )
                rank_0.send(pickle.dumps(GroupJoined(rank_model.free_bytes())))
            case AllocateCache(pages, max_len):
                rank_0.send(pickle.dumps(CacheAllocated(rank_model.allocate_cache(pages, max_len))))
            case ShutdownWorker():
                rank_model.close()  # NCCL waits for the end of all graphs that use it
                process_group.destroy_process_group()
                return
            case _:
                raise ValueError(f"unexpected {type(order).__name__}")


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    # skip the interpreter's teardown: it may wait for ranks that are gone
    os._exit(main(int(sys.argv[1])))
