"""One SQLite file: opened only if it is whole and ours, written all or nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from localgen.backends.errors import DiskFull, InvalidRequest, LocalgenError

_DAY_S = 86_400.0
# `lgch`: tells our files from those of other programs
APPLICATION = 0x6C676368
_WAIT_S = 5.0


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


class StoreFailed(LocalgenError):
    """The file of chats cannot be used; the message names it and says what to do."""

    code = "store_failed"


class Database:
    """A file of a known layout. schema: the statements of each version, from 1.

    Threads of one program take turns; programs may share the file. StoreFailed: it is damaged, of
    a newer version, or another kind of file; then it is left as it is.
    """

    def __init__(self, path: Path, schema: tuple[str, ...]) -> None:
        self._path = path
        self._lock = threading.RLock()
        with self._telling():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # chats are private, and SQLite would create the file for all to read
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._sqlite = sqlite3.connect(
                path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
            )
        try:
            self._prepare(schema)
        except BaseException:
            self._sqlite.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._sqlite.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One state of the file, whoever writes meanwhile."""
        with self._lock, self._telling(), self._transaction("BEGIN"):
            yield self._sqlite

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Everything or nothing. DiskFull, StoreFailed: nothing was written."""
        with self._lock, self._telling(), self._transaction("BEGIN IMMEDIATE"):
            yield self._sqlite

    def changes(self) -> int:
        """A number that is another one after another program has written."""
        with self._lock, self._telling():
            found: int = self._sqlite.execute("PRAGMA data_version").fetchone()[0]
            return found

    def _prepare(self, schema: tuple[str, ...]) -> None:
        with self._telling():
            self._require_ours(len(schema))
            self._sqlite.execute("PRAGMA journal_mode = WAL")
            # after a crash of the machine the last moments may be missing, the file is whole
            self._sqlite.execute("PRAGMA synchronous = NORMAL")
            self._sqlite.execute("PRAGMA foreign_keys = ON")
        with self.writing() as sqlite:
            version = self._pragma("user_version")
            for number, statements in enumerate(schema[version:], version + 1):
                for statement in statements.split(";"):
                    sqlite.execute(statement)
                sqlite.execute(f"PRAGMA user_version = {number}")
            sqlite.execute(f"PRAGMA application_id = {APPLICATION}")

    def _require_ours(self, newest: int) -> None:
        version, application = self._pragma("user_version"), self._pragma("application_id")
        is_empty = self._pragma("schema_version") == 0
        if not is_empty and application != APPLICATION:
            raise StoreFailed(f"{self._path} is no file of chats: move it away to begin a new one")
        if version > newest:
            raise StoreFailed(
                f"{self._path} was written by a newer localgen (format {version}, this one knows "
                f"{newest}): update localgen, or set LOCALGEN_STATE_DIR to another folder"
            )
        found = self._sqlite.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise self._damaged(found)

    def _pragma(self, name: str) -> int:
        found: int = self._sqlite.execute(f"PRAGMA {name}").fetchone()[0]
        return found

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        self._sqlite.execute(begin)
        try:
            yield
            self._sqlite.execute("COMMIT")
        except BaseException:
            # a full disk may have ended it already
            if self._sqlite.in_transaction:
                self._sqlite.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreFailed(f"cannot use {self._path}: {error.strerror}") from error
        except sqlite3.OperationalError as error:
            raise self._refused(error) from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(str(error)) from error

    def _refused(self, error: sqlite3.OperationalError) -> LocalgenError:
        full = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_SHMSIZE")
        if error.sqlite_errorname in full:
            return DiskFull(f"the disk of {self._path} is full: make room, it is tried again")
        if error.sqlite_errorname.startswith("SQLITE_BUSY"):
            return StoreFailed(f"another program keeps {self._path} locked: end it")
        return StoreFailed(f"cannot use {self._path}: {error}")

    def _damaged(self, what: str) -> StoreFailed:
        found = " ".join(what.split())
        return StoreFailed(
            f"{self._path} is damaged ({found}): it was left as it is; "
            "move it away to begin a new one"
        )
