"""The real server over fake engines: `python tests/fake_server.py [VERSION [PROTOCOL]]`.

TEST_SILENT_S: when an engine counts as silent. TEST_KEEP_ALIVE_S: how often a stream without events
gets some bytes, and how often one reports the progress of its prompt.
TEST_REAL_ENGINE: with engines of llama.cpp.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import localgen
from localgen.backends.errors import LocalgenError
from localgen.config import ServerSettings
from localgen.server.http.access import AccessPolicy, RateLimit
from localgen.server.lifecycle import log_to_file, run_server
from localgen.server.models.engine_process import LLAMACPP_ENGINE

ENGINE = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]


def _access() -> AccessPolicy:
    """Access options of the TCP server, as JSON in TEST_ACCESS."""
    asked = json.loads(os.environ.get("TEST_ACCESS", "{}"))
    limit = RateLimit(*asked.pop("rate_limit", ()))
    lists = {name: tuple(value) for name, value in asked.items() if isinstance(value, list)}
    return AccessPolicy(**(asked | lists), rate_limit=limit)


def main() -> int:
    gc.disable()  # as localgen.server.__main__ does
    from localgen.server import serving
    from localgen.server.models import engine_watch, request_stream
    from localgen.server.requests import generation

    if len(sys.argv) > 1:
        localgen.__version__ = sys.argv[1]
    if len(sys.argv) > 2:
        from localgen.server.stats import server_state

        setattr(server_state, "PROTOCOL", int(sys.argv[2]))  # noqa: B010 - imported there, not its own
    engine_watch.SILENT_AFTER_S = float(
        os.environ.get("TEST_SILENT_S", engine_watch.SILENT_AFTER_S)
    )
    engine_watch.WATCH_PERIOD_S = min(1.0, engine_watch.SILENT_AFTER_S / 10)
    serving.HEADER_TIMEOUT_S = float(os.environ.get("TEST_HEADER_S", serving.HEADER_TIMEOUT_S))
    generation.KEEP_ALIVE_S = float(os.environ.get("TEST_KEEP_ALIVE_S", generation.KEEP_ALIVE_S))
    request_stream.PROGRESS_INTERVAL_S = min(
        generation.KEEP_ALIVE_S, request_stream.PROGRESS_INTERVAL_S
    )
    serving.STALL_TIMEOUT_S = float(os.environ.get("TEST_STALL_S", serving.STALL_TIMEOUT_S))
    try:
        settings = replace(ServerSettings.from_environment(), draft=os.environ.get("TEST_DRAFT"))
        settings.create_dirs()
        log_to_file(settings)
        run_server(
            settings,
            _access(),
            idle_exit=True,
            engine_command=LLAMACPP_ENGINE if "TEST_REAL_ENGINE" in os.environ else ENGINE,
            model=os.environ.get("TEST_MODEL"),
        )
    except LocalgenError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
