"""Which programs that write chats are alive: each holds a lock for as long as it runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from pathlib import Path

from localgen.backends.errors import InvalidRequest

_DAY_S = 86_400.0


class Writer:
    """This program among those that share a folder. Its name is new each time.

    InvalidRequest: the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = open(self._path(self.name), "a")  # noqa: SIM115
            fcntl.flock(self._lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._sweep()
        except OSError as error:
            raise InvalidRequest(f"cannot write to {folder}: {error.strerror}") from error

    def is_alive(self, name: str) -> bool:
        """Whether a program of that name still runs."""
        if name == self.name:
            return True
        try:
            # a name comes from a file that others may have written
            with open(self._path(Path(name).name)) as lock:
                fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        with contextlib.suppress(OSError):
            self._path(Path(name).name).unlink()  # nobody takes that name again
        return False

    def close(self) -> None:
        """Tell the others that this one has left."""
        with contextlib.suppress(OSError):
            self._path(self.name).unlink(missing_ok=True)
        self._lock.close()

    def _sweep(self) -> None:
        """Remove what killed programs left; not what one that starts has not locked yet."""
        for path in self._folder.glob("*.lock"):
            if time.time() - path.stat().st_mtime > _DAY_S:
                self.is_alive(path.stem)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.lock"
