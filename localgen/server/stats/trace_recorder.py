"""Traces of requests in Mooncake's format, without a word of their text."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import IO

from localgen.backends.errors import InvalidRequest
from localgen.backends.kv_store.block_file import BlockRefused, load_key
from localgen.config import BadSetting, ServerSettings
from localgen.server.stats.request_log import RequestRecord

_log = logging.getLogger("localgen.server")


class TraceRecorder:
    """Appends a line to a file for each answered prompt: when it came, its lengths, its hashes.

    Lines are in the order in which answers ended. block_hash_key: the user's, which stays here, so
    that traces of several days have the same hashes. Raises InvalidRequest if the file cannot be
    written, and BadSetting if the key cannot be read.
    """

    def __init__(self, path: Path, settings: ServerSettings) -> None:
        self._path = path
        self._file: IO[str] | None = open_trace(path)
        try:
            settings.kv_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.block_hash_key = load_key(settings.kv_dir)
        except (OSError, BlockRefused) as error:
            raise BadSetting(f"--record-trace: the key of its hashes: {error}") from error
        _log.info("recording a trace in %s: times, lengths and hashes, no text", path)

    def on_request_end(self, record: RequestRecord) -> None:
        arrived_ms = round((time.time() - time.monotonic() + record.arrived_s) * 1e3)
        lines = [
            json.dumps(
                {
                    "timestamp": arrived_ms,
                    "input_length": finished.prompt_tokens,
                    # of a prompt that is only computed, or was cancelled before an answer: one
                    "output_length": max(1, finished.completion_tokens),
                    "hash_ids": finished.block_hashes,
                    "model": record.model,
                }
            )
            for finished in record.finished
            if finished.prompt_tokens and finished.block_hashes
        ]
        if self._file is None or not lines:
            return
        try:
            self._file.write("".join(f"{line}\n" for line in lines))
            self._file.flush()
        except OSError as error:
            _log.error("the trace %s ends here: %s", self._path, error.strerror)
            self._file = None


def open_trace(path: Path) -> IO[str]:
    """Open a trace to be continued, for its owner only. Raises InvalidRequest."""
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w")
    except OSError as error:
        message = f"--record-trace {path}: {error.strerror}"
        raise InvalidRequest(message, param="record_trace") from error
