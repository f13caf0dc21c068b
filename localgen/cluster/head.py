"""`python -m localgen.cluster.head`: starts Ray and the application, and ends them at a signal."""

from __future__ import annotations

import os
import signal
import sys
import threading

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.cluster.config import ClusterConfig
from localgen.cluster.machines import check_machines
from localgen.cluster.running import READY
from localgen.server.http.access import open_tcp_socket

# Ray reads them when it is imported; the log has each line of each replica
_RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
}
_OBJECT_STORE_BYTES = 100 << 20


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
    import ray
    from ray import serve

    from localgen.cluster.deployment import APP_NAME, build_app, end_replicas

    machines = None
    if config.address is None:
        ray.init("local", object_store_memory=_OBJECT_STORE_BYTES, include_dashboard=False)
    else:
        ray.init(config.address)
        machines = check_machines(config)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=_wait_for_owner, args=(stop,), daemon=True).start()
    serve.start(proxy_location="Disabled")
    if APP_NAME in serve.status().applications:  # its owner was killed
        serve.delete(APP_NAME)
    open_tcp_socket(config.access()).close()
    serve.run(build_app(config, machines), name=APP_NAME, route_prefix=None)
    print(READY, flush=True)
    stop.wait()
    end_replicas(config)
    serve.delete(APP_NAME)
    if config.address is None:
        serve.shutdown()
    ray.shutdown()


def _wait_for_owner(stop: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    stop.set()


if __name__ == "__main__":
    sys.exit(main())
