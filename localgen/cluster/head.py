"""`python -m localgen.cluster.head`: the process that owns a cluster, until a signal."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.cluster.config import ClusterConfig
from localgen.cluster.machines import check_machines, require_listening
from localgen.cluster.running import READY, hold_lock
from localgen.config import ServerSettings
from localgen.server.http.access import open_tcp_socket

_OBJECT_STORE_BYTES = 100 << 20


def main() -> int:
    """Argument: the ClusterConfig as JSON. Prints `ready` when all replicas are up."""
    config = ClusterConfig(**json.loads(sys.argv[1]))
    try:
        with hold_lock(ServerSettings.from_environment()):
            _run(config)
    except LocalgenError as error:
        print(f"error: {one_line(error.message)}", file=sys.stderr)
        return 1
    return 0


def _run(config: ClusterConfig) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    from localgen.cluster.deployment import APP_NAME, build_app

    machines = None
    if config.address is None:
        ray.init("local", object_store_memory=_OBJECT_STORE_BYTES, include_dashboard=False)
    else:
        require_listening(config.address)
        ray.init(config.address)
        machines = check_machines(config)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    serve.start(proxy_location="Disabled")
    if APP_NAME in serve.status().applications:  # its owner was killed
        serve.delete(APP_NAME)
    open_tcp_socket(config.access()).close()
    serve.run(build_app(config, machines), name=APP_NAME, route_prefix=None)
    print(READY, flush=True)
    stop.wait()
    serve.delete(APP_NAME)
    if config.address is None:
        serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
