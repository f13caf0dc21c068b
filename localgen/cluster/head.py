"""`python -m localgen.cluster.head`: starts Ray and the application when its owner says so.

It imports them first, and ends them at a signal: SIGTERM lets running requests be answered.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType

import psutil

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.cluster.config import ClusterConfig
from localgen.cluster.machines import (
    check_machines,
    require_gpus,
    require_listening,
    require_unowned,
)
from localgen.cluster.running import END_AT_ONCE, READY, START
from localgen.server.http.access import open_tcp_socket

# Ray reads them when it is imported; the log has each line of each replica
_RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    # if memory runs short, Ray kills actors, which have none to give: engines have it
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray's own is 15: engines would give way to a build beside them
    "RAY_worker_niceness": "0",
}
_OBJECT_STORE_BYTES = 100 << 20
_RAY_PROCESSES = frozenset({"raylet", "gcs_server"})
_WATCH_PERIOD_S = 0.5


def main() -> int:
    """Argument: the ClusterConfig as JSON. Prints `ready` when all replicas are up.

    Ends with standard input too, as it does when its owner is killed.
    """
    config = ClusterConfig.from_json(sys.argv[1])
    try:
        _run(config)
    except LocalgenError as error:
        print(f"error: {one_line(error.message)}", file=sys.stderr)
        return 1
    return 0


def _run(config: ClusterConfig) -> None:
    os.environ.update(_RAY_VARIABLES | dict(os.environ))
    stop, at_once = threading.Event(), threading.Event()
    is_ready = False

    def end(number: int, frame: FrameType | None) -> None:
        if number == END_AT_ONCE:
            at_once.set()
        stop.set()
        if not is_ready:
            raise SystemExit(0)

    _on_signals(end)
    import ray
    from ray import serve

    from localgen.cluster.broadcast import require_broadcast
    from localgen.cluster.deployment import APP_NAME, build_app, delete_app, drain, end_servers

    require_broadcast()
    if os.read(sys.stdin.fileno(), len(START)) != START:  # the owner has ended
        return
    threading.Thread(target=_end_with_owner, daemon=True).start()
    machines = None
    if config.address is None:
        ray.init("local", object_store_memory=_OBJECT_STORE_BYTES, include_dashboard=False)
    else:
        require_listening(config.address)
        ray.init(config.address)
        require_unowned()
        machines = check_machines(config)
    _on_signals(end)  # Ray has set a handler that prints its own stack
    require_gpus(config, ray.cluster_resources().get("GPU", 0))
    serve.start(proxy_location="Disabled")
    if APP_NAME in serve.status().applications:  # its owner was killed
        end_servers(config)
        delete_app()
    open_tcp_socket(config.access()).close()
    try:
        serve.run(build_app(config, machines), name=APP_NAME, route_prefix=None)
        is_ready = True
        print(READY, flush=True)
        if lost := _wait(stop, _ray_processes()):
            # Ray would end its actors after 11 s, and this process some 15 s later
            print(f"error: {lost} of Ray has ended", file=sys.stderr, flush=True)
            os._exit(1)
        drain(at_once)
    finally:
        is_ready = True  # another signal does not interrupt the end
        end_servers(config)
        if config.address is not None:
            delete_app()
        ray.shutdown()


def _ray_processes() -> dict[psutil.Process, str]:
    """The processes of the Ray that this one has started, without which its cluster ends."""
    named = {each: each.name() for each in psutil.Process().children()}
    return {each: name for each, name in named.items() if name in _RAY_PROCESSES}


def _wait(stop: threading.Event, processes: Mapping[psutil.Process, str]) -> str:
    """Wait until `stop` is set. Returns the name of a process that has ended before, or nothing."""
    while not stop.wait(_WATCH_PERIOD_S):
        for process, name in processes.items():
            if _has_ended(process):
                return name
    return ""


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _on_signals(end: Callable[..., None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def _end_with_owner() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), END_AT_ONCE)


if __name__ == "__main__":
    sys.exit(main())
