"""A worker process of tensor parallelism with CUDA graphs of FakeCapture.

FAKE_CAPTURE_ERROR names what its first capture raises, as in errors(). When its executor is closed,
as it must be at the end, it writes to FAKE_CAPTURE_REPORT which shapes have a graph.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from fake_capture import FakeCapture

from localgen.backends.cuda.parallel import rank_model, worker
from localgen.backends.cuda.steps.cuda_graphs import DeviceExecutor


def errors(name: str) -> list[Exception]:
    """The errors of the first captures: of none, or of one that lacks memory or fails."""
    found: dict[str, list[Exception]] = {
        "": [],
        "memory": [torch.OutOfMemoryError("out of memory")],
        "failed": [RuntimeError("operation not permitted")],
    }
    return found[name]


def executor_with_graphs(name: str) -> Any:
    """Stands in for DeviceExecutor on the CPU. name: see errors()."""

    def build(*args: Any, **options: Any) -> DeviceExecutor:
        capture = FakeCapture(errors=errors(name))
        return DeviceExecutor(*args, **options | {"use_cuda_graphs": True}, capture=capture)

    return build


def report(executor: DeviceExecutor) -> str:
    """The shapes of steps that ran, whether they have a graph, and how often they ran without."""
    return "\n".join(
        f"{shape} {executor._graphs.get(shape) is not None} {count}"
        for shape, count in executor._eager_runs.items()
    )


def report_and_close(executor: DeviceExecutor) -> None:
    """Stands in for DeviceExecutor.close of the worker."""
    Path(os.environ["FAKE_CAPTURE_REPORT"]).write_text(report(executor))
    close(executor)


if __name__ == "__main__":
    build = executor_with_graphs(os.environ["FAKE_CAPTURE_ERROR"])
    rank_model.__dict__["DeviceExecutor"] = build
    close = DeviceExecutor.close
    setattr(DeviceExecutor, "close", report_and_close)  # noqa: B010
    os._exit(worker.main(int(sys.argv[1])))
