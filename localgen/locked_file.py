"""A small file of the user's that several processes read, change and write."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True, slots=True)
class LockedFile:
    """Readers see the whole file before or after a change, and no change of another is lost.

    path: the file, which may not exist. mode: of a new file. scratch: an existing folder on the
    same disk for the lock and the unfinished file, by default that of the file. A killed writer
    leaves both there; the next one uses and removes them.
    """

    path: Path
    mode: int = 0o600
    scratch: Path | None = None

    def read_text(self) -> str:
        """The content, empty if there is no file. Raises OSError, ValueError if it is no UTF-8."""
        return self.read_bytes().decode()

    def read_bytes(self) -> bytes:
        """The content, empty if there is no file. Raises OSError."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from changing the file meanwhile. Raises OSError."""
        lock_path = self._beside("lock")
        with _open_locked(lock_path, self.mode):
            try:
                yield
            finally:
                lock_path.unlink(missing_ok=True)

    def write(self, content: str | bytes) -> None:
        """Replace the content. To be called while locked. Raises OSError, and keeps the old one."""
        unfinished = self._beside("new")
        try:
            unfinished.unlink(missing_ok=True)
            fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.mode)
            with open(fd, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(fd)
            unfinished.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def store(self, content: str | bytes) -> None:
        """Lock the file and replace its content. Raises OSError."""
        with self.locked():
            self.write(content)

    def _beside(self, suffix: str) -> Path:
        return (self.scratch or self.path.parent) / f".{self.path.name}.{suffix}"


def _open_locked(path: Path, mode: int) -> IO[bytes]:
    """Create and lock a file that its owner removes before it unlocks it; waits for the owner."""
    while True:
        lock = open(os.open(path, os.O_RDWR | os.O_CREAT, mode), "rb+", buffering=0)  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        # the previous owner may have removed this file meanwhile
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()
