"""The cluster that this user started: started in the background, found, and ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import psutil

from localgen.backends.errors import LoadFailed, ServerUnavailable
from localgen.backends.terminal_text import one_line
from localgen.cluster.config import ClusterConfig
from localgen.config import ServerSettings
from localgen.locked_file import LockedFile
from localgen.machine.python_process import python_command, python_environment
from localgen.server.http.access import host_and_port, open_tcp_socket, read_api_keys

# in the runtime folder
REPLICA_DIRS = "replica-*"
HEAD = "localgen.cluster.head"  # the module that starts Ray
READY = "ready"  # printed by the owner of the cluster, and by its head
START = b"start\n"  # from the owner to the head
# of the owner and its head, besides SIGTERM: running requests end with an error
END_AT_ONCE = signal.SIGINT
# how long running requests may continue when a cluster ends
DRAIN_TIMEOUT_S = 30.0
# then for the gateway, the replicas, and Serve, which deletes the deployments
_END_TIMEOUT_S = 120.0
_POLL_S = 0.1
_STARTS = "a cluster of yours is starting: wait, or press Ctrl+C there"
_LOG_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """pid: of the process that owns it. url: of the gateway. model: default of its requests.

    api_key_file: as in ClusterConfig.
    """

    pid: int
    url: str
    model: str
    api_key_file: str | None

    @classmethod
    def find(cls, settings: ServerSettings) -> RunningCluster | None:
        """The cluster that runs, or None if there is none or it still starts."""
        text = _state_file(settings).read_text() if _is_locked(settings) else ""
        return cls(**json.loads(text)) if text else None

    def api_key(self) -> str | None:
        """A key that the gateway takes, or None without keys. Raises BadSetting."""
        return read_api_keys(Path(self.api_key_file))[0] if self.api_key_file else None

    @classmethod
    def get(cls, settings: ServerSettings) -> RunningCluster:
        """The cluster that runs. Raises ServerUnavailable if there is none or it still starts."""
        found = cls.find(settings)
        if found is None and _is_locked(settings):
            raise ServerUnavailable(f"{_STARTS} (log: {log_path(settings)})")
        if found is None:
            raise ServerUnavailable("no cluster runs: `localgen cluster up` starts one")
        return found


def hold_lock(settings: ServerSettings) -> IO[str]:
    """The lock that shows that a cluster runs, until the file is closed or the process ends.

    Raises ServerUnavailable if another one does.
    """
    lock = open(lock_path(settings), "a")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ServerUnavailable("another cluster of yours runs or starts") from error
    return lock


def require_startable(config: ClusterConfig, settings: ServerSettings) -> None:
    """Raise LoadFailed without Ray, BadSetting for a port that is taken, ServerUnavailable if a
    cluster runs or starts."""
    if find_spec("ray") is None:
        raise LoadFailed("localgen cluster needs Ray: pip install 'localgen[cluster]'")
    running = RunningCluster.find(settings)
    if running is not None:
        raise ServerUnavailable(
            f"a cluster runs at {running.url}: `localgen cluster down` ends it first"
        )
    if _is_locked(settings):
        raise ServerUnavailable(f"{_STARTS} (log: {log_path(settings)})")
    access = config.access()
    if config.record_trace is not None:
        from localgen.server.stats.trace_recorder import open_trace  # numpy is heavy

        os.close(open_trace(Path(config.record_trace)))
    if config.address is None:  # else a gateway whose owner was killed may hold the port
        open_tcp_socket(access).close()


def start(config: ClusterConfig, model: str, settings: ServerSettings) -> RunningCluster:
    """Start a cluster and wait until all replicas are ready. model: its name, for clients.

    Raises as require_startable(), and ServerUnavailable if it does not start.
    """
    require_startable(config, settings)
    settings.create_dirs()
    _state_file(settings).path.unlink(missing_ok=True)  # of one that was killed
    with open(log_path(settings), "wb") as log:
        process = subprocess.Popen(
            python_command("localgen.cluster.owner", config.to_json()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=python_environment(),
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        with process.stdout:
            if READY not in (line.decode().strip() for line in process.stdout):
                raise ServerUnavailable(_failure(settings))
    except BaseException:  # Ctrl+C as well
        _end(psutil.Process(process.pid))
        raise
    # what listens on all addresses is reached at this one
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    url = f"http://{host_and_port(host, config.port)}"
    cluster = RunningCluster(process.pid, url, model, config.api_key_file)
    _state_file(settings).store(json.dumps(asdict(cluster)))
    return cluster


def stop(cluster: RunningCluster, settings: ServerSettings) -> None:
    """End a cluster: running requests have DRAIN_TIMEOUT_S, or end with an error at Ctrl+C."""
    with contextlib.suppress(psutil.NoSuchProcess):
        _end(psutil.Process(cluster.pid))
    _state_file(settings).path.unlink(missing_ok=True)


def log_path(settings: ServerSettings) -> Path:
    """Log of the cluster and all its replicas on this machine."""
    return settings.log_path.with_name("cluster.log")


def lock_path(settings: ServerSettings) -> Path:
    return settings.runtime_dir / "cluster.lock"


def _is_locked(settings: ServerSettings) -> bool:
    """True while the process that owns a cluster runs."""
    try:
        with open(lock_path(settings)) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _state_file(settings: ServerSettings) -> LockedFile:
    return LockedFile(settings.runtime_dir / "cluster.json")


def _end(process: psutil.Process) -> None:
    """Ask the process to end, after Ctrl+C at once; kill it with its children if it does not."""
    children = process.children(recursive=True)
    try:
        process.send_signal(signal.SIGTERM)
        has_ended = _wait(process, DRAIN_TIMEOUT_S + _END_TIMEOUT_S)
    except KeyboardInterrupt:
        process.send_signal(END_AT_ONCE)
        has_ended = _wait(process, _END_TIMEOUT_S)
    if not has_ended:
        process.kill()
    _, alive = psutil.wait_procs(children, timeout=5.0)
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _wait(process: psutil.Process, timeout_s: float) -> bool:
    """Returns False if the process has not ended after this time."""
    deadline = time.monotonic() + timeout_s
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _failure(settings: ServerSettings) -> str:
    """The reason why no cluster has started: the last error in its log, if possible our own, and
    the other machine where it was, if any."""
    path = log_path(settings)
    lines = path.read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace").splitlines()
    errors = [line for line in lines if re.match(r"(\(.*?\) )?error: ", line)]
    errors = errors or [line for line in lines if "Error: " in line]
    reason = one_line(errors[-1].split("rror: ", 1)[1])[:300] if errors else "it has ended"
    # Ray names another machine in front of each line of its processes
    if errors and (machine := re.match(r"\([^)]*, ip=([^)]*)\) ", errors[-1])):
        reason = f"machine {machine[1]}: {reason}"
    return f"the cluster did not start: {reason} (log: {path})"
