"""`python -m localgen.cluster.replica_server`: the server of a replica, a child of its actor."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from typing import BinaryIO

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.config import ServerSettings
from localgen.hub.resolve import name_for_server
from localgen.server.http.access import AccessPolicy
from localgen.server.lifecycle import run_server
from localgen.server.stats.request_log import create_log_formatter


def main() -> int:
    """Serve until standard input ends, as it does however the actor ends.

    Arguments: the model or an empty string, the host and the port to listen on. The first line of
    standard input is a JSON list of API keys. Returns the exit status.
    """
    model, host, port = sys.argv[1:]
    keys: list[str] = json.loads(sys.stdin.buffer.readline())
    handler = logging.StreamHandler()
    handler.setFormatter(create_log_formatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    access = AccessPolicy(host=host, port=int(port), keys=tuple(keys))
    try:
        settings = ServerSettings.from_environment()
        name = name_for_server(model or None)
        run_server(settings, access, idle_exit=False, model=name)
    except LocalgenError as error:
        print(f"error: {one_line(error.message)}", file=sys.stderr)
        return 1
    return 0


def _end_with(stream: BinaryIO) -> None:
    stream.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
