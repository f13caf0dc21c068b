"""`python -m localgen.backends.cuda.parallel.worker FD`: a rank of a model that is not the first.

It does what rank 0 says over the socket FD. Its standard input is a pipe that nobody writes to: it
closes when rank 0 is gone, however that came, and this process goes with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

import torch

from localgen.backends.cuda.model import process_group
from localgen.backends.cuda.model.source import open_source
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
    Trouble,
)
from localgen.backends.errors import LocalgenError
from localgen.backends.formats.architecture.sharding import Shard


def main(fd: int) -> int:
    """Serve until told to leave; the exit status."""
    # Ctrl+C is for rank 0
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    orders: Connection[object, object] = Connection(fd)
    try:
        begin = orders.recv()
        assert isinstance(begin, Begin)
        obey(orders, begin)
    except EOFError:
        return 1
    except LocalgenError as error:
        trouble = Trouble(error.code, error.message)
    except Exception as error:  # whatever our bug, rank 0 must not wait for this step
        trouble = Trouble("internal_error", f"{type(error).__name__}: {error}")
    else:
        return 0
    with contextlib.suppress(OSError):
        orders.send(trouble)
    return 1


def obey(orders: Connection[object, object], begin: Begin) -> None:
    """Compute one model until Leave. EOFError: rank 0 is gone."""
    source = open_source(begin.path)
    shard = Shard(source.spec, begin.rank, begin.options.tp)
    share = Share(source, begin.options, begin.dtype, shard)
    if share.device.type == "cpu":  # its cores are for all ranks
        torch.set_num_threads(max(1, torch.get_num_threads() // shard.size))
    orders.send(Ready(share.weight_bytes))
    while True:
        order = orders.recv()
        match order:
            case Run(inputs, shared):
                share.run(inputs, SharedTokens(share.ranks) if shared else None)
            case ReadStates(inputs):
                share.states(inputs)
            case Copy(pairs):
                share.steps.copy(pairs)
            case Join():
                process_group.join(
                    shard, process_group.store_at(begin.port, shard.size), share.device
                )
                orders.send(Joined(share.free_bytes()))
            case Allocate(pages, max_len):
                orders.send(Allocated(share.allocate(pages, max_len)))
            case Leave():
                process_group.leave()
                return
            case _:
                raise ValueError(f"unexpected {type(order).__name__}")


def _leave_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    # without taking down what waits for ranks that may be gone
    os._exit(main(int(sys.argv[1])))
