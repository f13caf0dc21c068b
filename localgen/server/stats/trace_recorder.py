"""Traces of requests in Mooncake's format, without a word of their text."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import time
from pathlib import Path

from localgen.backends.errors import InvalidRequest
from localgen.backends.kv_store.block_file import BlockRefused, load_key
from localgen.config import BadSetting, ServerSettings
from localgen.server.stats.request_log import RequestRecord

# of each line
_BEGIN = b'{"timestamp": '
_MAX_LINE_BYTES = 1 << 20
_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
_log = logging.getLogger("localgen.server")


class TraceRecorder:
    """Appends a line to a file for each answered prompt: when it came, its lengths, its hashes.

    Lines are in the order in which answers ended. block_hash_key: the user's, which stays here, so
    that traces of several days have the same hashes. Raises InvalidRequest if the file cannot be
    continued, and BadSetting if the key cannot be read.
    """

    def __init__(self, path: Path, settings: ServerSettings) -> None:
        self._path, self._fd = path, open_trace(path)
        self._is_failing = False
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
        if lines:
            self._append("".join(f"{line}\n" for line in lines).encode())

    def _append(self, content: bytes) -> None:
        """Append whole lines or nothing. The first failure is logged, and the next success."""
        size = os.fstat(self._fd).st_size
        try:
            if os.write(self._fd, content) < len(content):
                raise OSError(0, "only a part was written")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            if not self._is_failing:
                _log.error("requests are missing in %s: %s", self._path, error.strerror)
            self._is_failing = True
            return
        if self._is_failing:
            _log.warning("the trace %s is written again", self._path)
        self._is_failing = False


def open_trace(path: Path) -> int:
    """Open a trace to be continued, for its owner only; returns its file descriptor.

    The rest of a line that was never completed is removed. Raises InvalidRequest.
    """
    try:
        fd = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
        )
    except OSError as error:
        raise _refused(path, str(error.strerror)) from error
    found = os.fstat(fd)
    reason = ""
    if not stat.S_ISREG(found.st_mode):
        reason = "it is no regular file"
    elif found.st_size and os.pread(fd, len(_BEGIN), 0) != _BEGIN:
        reason = "it is no trace, and is not overwritten"
    if reason:
        os.close(fd)
        raise _refused(path, reason)
    if found.st_uid == os.getuid():
        os.fchmod(fd, 0o600)
    begin = max(0, found.st_size - _MAX_LINE_BYTES)
    complete = os.pread(fd, _MAX_LINE_BYTES, begin).rfind(b"\n") + 1
    if begin + complete < found.st_size:
        os.ftruncate(fd, begin + complete)
        _log.warning("the last line of %s was incomplete, and is removed", path)
    return fd


def _refused(path: Path, reason: str) -> InvalidRequest:
    return InvalidRequest(f"--record-trace {path}: {reason}", param="record_trace")
