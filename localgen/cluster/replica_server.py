"""`python -m localgen.cluster.replica_server`: the server of a replica, a child of its actor."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass, replace

from localgen.backends.errors import LocalgenError
from localgen.backends.model_info import KVShare
from localgen.backends.terminal_text import one_line
from localgen.cluster.config import ClusterConfig
from localgen.cluster.other_engine import run_engine
from localgen.config import ServerSettings
from localgen.server.http.access import AccessPolicy
from localgen.server.lifecycle import run_server
from localgen.server.stats.request_log import create_log_formatter

# vLLM and llama-server read an API key there: on a command line, others would see it
_KEY_VARIABLES = ("VLLM_API_KEY", "LLAMA_API_KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Options of a replica's server, from its actor.

    config: of the cluster, as JSON. kv_listen: of KVShare, or empty to share nothing.
    secret: of the cluster.
    """

    config: str
    host: str
    port: int
    keys: tuple[str, ...]
    kv_listen: str
    secret: str


def main() -> int:
    """Serve until standard input ends, as it does however the actor ends.

    The first line of standard input is ReplicaOptions as JSON. Returns the exit status.
    """
    options = ReplicaOptions(**json.loads(_read_line(sys.stdin.fileno())))
    config = ClusterConfig.from_json(options.config)
    if command := config.engine_command(options.host, options.port):
        if options.keys:
            os.environ |= dict.fromkeys(_KEY_VARIABLES, options.keys[0])
        return run_engine(command, sys.stdin.fileno())
    handler = logging.StreamHandler()
    handler.setFormatter(create_log_formatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    threading.Thread(target=_end_with, args=(sys.stdin.fileno(),), daemon=True).start()
    try:
        _serve(config, options)
    except LocalgenError as error:
        print(f"error: {one_line(error.message)}", file=sys.stderr)
        return 1
    return 0


def _serve(config: ClusterConfig, options: ReplicaOptions) -> None:
    access = AccessPolicy(
        host=options.host,
        port=options.port,
        keys=tuple(options.keys),
        timeout_s=config.timeout_s,
        max_body_bytes=config.max_body_bytes(),
        stabilize=config.stabilize,
        gateway_secret=options.secret,
    )
    settings, load = config.server_settings(ServerSettings.from_environment()), config.load
    if options.kv_listen:
        key = hashlib.sha256(b"kv " + options.secret.encode()).digest()
        settings = replace(settings, kv_share=KVShare(options.kv_listen, key))
    if config.prompt_replicas:  # they must share, or end
        load = replace(load, kv_listen=options.kv_listen)
    run_server(
        settings,
        access,
        idle_exit=False,
        model=config.model,
        load_options=load,
    )


def _read_line(pipe: int) -> bytes:
    """A line, and no more: a buffer that a thread reads cannot be closed at the end."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(pipe, 1)):
        line += byte
    return line


def _end_with(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
