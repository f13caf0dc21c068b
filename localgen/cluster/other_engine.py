"""An engine other than localgen as a replica, such as vLLM or llama-server."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

import localgen
from localgen.client.prometheus import MetricsParser
from localgen.server.stats import loads

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
# for its requests to end
_END_TIMEOUT_S = 10.0


def run_engine(command: Sequence[str], alive: int) -> int:
    """Run an engine until it ends, or until the pipe `alive` does: then end it and its children.

    Returns its exit status; 127 if it cannot be started.
    """
    try:
        engine = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_end_with_parent
        )
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    threading.Thread(target=_end_after, args=(engine, alive), daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _signal_group(engine, signal.SIGTERM))
    status = engine.wait()
    _signal_group(engine, signal.SIGKILL)  # children that it has left
    return status


def kill_session(leader: int) -> None:
    """Kill what is left of the session of a process that called run_engine() and was killed.

    The engine ends with that process, but its own children may not, as those of vLLM.
    """
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Called in the engine's process: it is killed when this one is, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _end_after(engine: subprocess.Popen[bytes], alive: int) -> None:
    while os.read(alive, 1):
        pass
    _signal_group(engine, signal.SIGTERM)
    deadline = time.monotonic() + _END_TIMEOUT_S
    while engine.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    _signal_group(engine, signal.SIGKILL)


def _signal_group(engine: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(engine.pid, number)


def engine_stats(model: str, pid: int, metrics: str) -> dict[str, Any]:
    """Statistics of an engine, in the form of localgen's /v1/stats.

    metrics: its /metrics, or empty. Raises ServerUnavailable if that is no page of metrics.
    """
    parsed = MetricsParser().parse(metrics, time.monotonic()).models if metrics else ()
    counts = {
        "running": sum(each.running or 0 for each in parsed),
        "waiting": sum(each.waiting or 0 for each in parsed),
    }
    return {
        "server": {"pid": pid, "status": "ok", "version": localgen.__version__},
        "models": [{"name": model, "id": model, "memory_bytes": 0, "stats": counts}],
        "ended": [],
    }


def loads_of(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The body of /v1/loads. stats: of engine_stats()."""
    counts = stats["models"][0]["stats"]
    load = loads.ServerLoad(num_running_reqs=counts["running"], num_waiting_reqs=counts["waiting"])
    return loads.loads_body(load, loads.read_sections(None))
