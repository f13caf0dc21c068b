"""Another engine as a replica: started with its address, and ended however the actor ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from serving import wait_until

from localgen.cluster.autoscaling import REQUESTS, scaling_stats
from localgen.cluster.config import ClusterConfig
from localgen.cluster.other_engine import engine_stats, kill_session, loads_of
from localgen.cluster.replica_server import ReplicaOptions
from localgen.cluster.status import ReplicaStatus

# an engine with a child that ignores signals, which writes what it was given
ENGINE = """
import os, subprocess, sys, time
ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignoring])
with open(sys.argv[1] + ".new", "w") as file:
    print(os.getpid(), child.pid, os.environ.get("VLLM_API_KEY"), *sys.argv[2:], file=file)
time.sleep(0.2)  # the child has begun to ignore them
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""


def started(config: ClusterConfig, *keys: str) -> subprocess.Popen[bytes]:
    options = ReplicaOptions(
        config=config.to_json(),
        host="10.0.0.1",
        port=7000,
        keys=keys,
        kv_listen="",
        secret="",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "localgen.cluster.replica_server"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(options)).encode() + b"\n")
    process.stdin.flush()
    return process


@pytest.mark.parametrize("end", ["the pipe", "a signal", "the engine", "a kill"])
def test_it_gets_its_address_and_ends_with_its_children(tmp_path: Path, end: str) -> None:
    script, told = tmp_path / "engine.py", tmp_path / "told file"
    script.write_text(ENGINE)
    command = f"{sys.executable} {script} '{told}' --host {{host}} --port={{port}}"
    process = started(ClusterConfig(model="m", command=command), "secret-key-1", "other")
    wait_until(told.exists)
    pid, child, *given = told.read_text().split()
    assert given == ["secret-key-1", "--host", "10.0.0.1", "--port=7000"]
    assert process.stdin is not None
    if end == "the pipe":
        process.stdin.close()
    elif end == "a signal":
        process.terminate()
    elif end == "the engine":
        psutil.Process(int(pid)).kill()
    else:
        process.kill()
    process.wait(30)
    wait_until(lambda: not is_running(int(pid)))
    if end == "a kill":  # the engine's own children are left to the actor
        assert is_running(int(child))
        kill_session(process.pid)
    wait_until(lambda: not is_running(int(child)))


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_one_that_is_not_installed() -> None:
    process = started(ClusterConfig(model="m", command="no-such-engine --port {port}"))
    _, said = process.communicate(timeout=30)
    assert process.returncode == 127
    assert said == b"error: no-such-engine: No such file or directory\n"


def test_its_metrics_are_its_statistics() -> None:
    metrics = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 2.0
"""
    stats: dict[str, Any] = engine_stats("m", os.getpid(), metrics)
    assert scaling_stats(stats)[REQUESTS] == 5.0
    row = ReplicaStatus.from_stats("r", stats)
    assert (row.models, row.running, row.waiting) == (("m",), 3, 2)
    assert scaling_stats(engine_stats("m", 1, ""))[REQUESTS] == 0.0
    (load,) = loads_of(stats)["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (3, 2)
