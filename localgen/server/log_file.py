"""The log file of background servers: a server that ends and the next one may both append to it."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from localgen.locked_file import LockedFile


class LogFile(logging.Handler):
    """Appends each record in one write; renames a file of max_bytes, and keeps one such file.

    Several processes may append. Only one renames the file, and the others then use the new one, so
    that a record is lost with an older file only, once that is replaced. Standard output and error
    follow if they are the log.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__()
        self._path = path
        self._max_bytes = max_bytes
        self._fd = self._open()

    def emit(self, record: logging.LogRecord) -> None:
        """Append a record; errors go to standard error, as those of every handler."""
        try:
            self.append(f"{self.format(record)}\n".encode())
        except Exception:
            self.handleError(record)

    def append(self, line: bytes) -> None:
        """Append to the current file. Raises OSError."""
        is_kept = False
        while not is_kept:
            if not self._is_current():
                self._reopen()
            os.write(self._fd, line)
            status = os.fstat(self._fd)
            # or others have renamed two files since it was current
            is_kept = status.st_nlink > 0
            if status.st_size >= self._max_bytes:
                self._rotate()

    def _rotate(self) -> None:
        with LockedFile(self._path).locked():
            if self._is_current():
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                self._reopen()

    def _is_current(self) -> bool:
        """False if the file has been renamed or removed."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(self._path.stat(), os.fstat(self._fd))
        return False

    def _reopen(self) -> None:
        before, self._fd = self._fd, self._open()
        for stream in (1, 2):
            with contextlib.suppress(OSError):  # closed
                if os.path.samestat(os.fstat(stream), os.fstat(before)):
                    os.dup2(self._fd, stream)
        os.close(before)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
