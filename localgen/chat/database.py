"""A SQLite file with a checked format, atomic writes, and detection of crashed writers."""

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

STORE_NAME = "sessions.db"
_DAY_S = 86_400.0
# `lgch`: marks the file as a chat database of localgen
APPLICATION_ID = 0x6C676368
_BUSY_TIMEOUT_S = 5.0
_COMPLETION_TIMEOUT_S = 0.15

# each entry upgrades the database by one version
SESSIONS_SCHEMA = (
    """
    CREATE TABLE sessions (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL,
        model TEXT,
        system TEXT,
        params TEXT NOT NULL,
        ctx INTEGER,
        revision INTEGER NOT NULL DEFAULT 0,
        changed_s REAL NOT NULL,
        deleted_s REAL
    );
    CREATE TABLE turns (
        session INTEGER NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
        place INTEGER NOT NULL,
        prompt TEXT NOT NULL,
        answer TEXT NOT NULL,
        reasoning TEXT NOT NULL,
        stopped INTEGER NOT NULL,
        served TEXT NOT NULL,
        writer TEXT,
        PRIMARY KEY (session, place)
    );
    CREATE TABLE drafts (
        session INTEGER NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
        writer TEXT NOT NULL,
        text TEXT NOT NULL,
        PRIMARY KEY (session, writer)
    )
    """,
    "ALTER TABLE sessions ADD COLUMN server TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE sessions ADD COLUMN forked_from INTEGER",
    "ALTER TABLE turns ADD COLUMN steps TEXT NOT NULL DEFAULT ''",
)


def session_names(path: Path) -> list[str]:
    """Names of the sessions in a database, latest first, for completion: fast, and changes nothing.

    Empty if the file cannot be read at once.
    """
    query = "SELECT name FROM sessions WHERE deleted_s IS NULL ORDER BY changed_s DESC"
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.as_uri()}?mode=ro", timeout=_COMPLETION_TIMEOUT_S, uri=True)
        ) as connection:
            return [name for (name,) in connection.execute(query) if name]
    except (sqlite3.Error, UnicodeDecodeError):  # Python decodes the text of SQLite's errors
        return []


class WriterLock:
    """A lock file that tells other processes whether this one is still running.

    name: unique for each instance. Raises InvalidRequest if the folder is not writable.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_file = open(self._lock_path(self.name), "a")  # noqa: SIM115
            fcntl.flock(self._lock_file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove_stale_locks()
        except OSError as error:
            raise InvalidRequest(f"cannot write to {folder}: {error.strerror}") from error

    def is_alive(self, name: str) -> bool:
        """Return True if the writer of that name is still running."""
        if name == self.name:
            return True
        try:
            # the name comes from the database and is untrusted: use its last component only
            with open(self._lock_path(Path(name).name)) as lock:
                fcntl.flock(lock.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (FileNotFoundError, ValueError, TypeError):  # or no name at all: a damaged database
            return False
        except OSError:
            return True
        with contextlib.suppress(OSError):
            self._lock_path(Path(name).name).unlink()  # names are never reused
        return False

    def close(self) -> None:
        """Release the lock and remove its file."""
        with contextlib.suppress(OSError):
            self._lock_path(self.name).unlink(missing_ok=True)
        self._lock_file.close()

    def _remove_stale_locks(self) -> None:
        """Remove lock files of killed processes.

        Only files older than a day: a starting process may not have locked its file yet.
        """
        for path in self._folder.glob("*.lock"):
            # its owner may remove it meanwhile
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _DAY_S:
                    self.is_alive(path.stem)

    def _lock_path(self, name: str) -> Path:
        return self._folder / f"{name}.lock"


class StoreFailed(LocalgenError):
    """The chat database cannot be used; the message names the file and the remedy."""

    code = "store_failed"


class Database:
    """A SQLite database with schema migrations. schema: SQL statements of each version, from 1.

    Can be shared by threads and by processes. Raises StoreFailed, and leaves the file unchanged, if
    it is damaged, of a newer version, or not a chat database; transactions, too, once a newer
    localgen has upgraded it.
    """

    def __init__(self, path: Path, schema: tuple[str, ...]) -> None:
        self._path, self._latest_version = path, len(schema)
        self._lock = threading.RLock()
        with self._translate_errors():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # chats are private; SQLite would create the file readable for others
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        try:
            self._migrate(schema)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def read_transaction(self) -> Iterator[sqlite3.Connection]:
        """Read a consistent snapshot, regardless of concurrent writes."""
        with self._lock, self._translate_errors(), self._transaction("BEGIN"):
            yield self._connection

    @contextlib.contextmanager
    def write_transaction(self) -> Iterator[sqlite3.Connection]:
        """Write atomically. Raises DiskFull or StoreFailed; nothing is written then."""
        with self._lock, self._translate_errors(), self._transaction("BEGIN IMMEDIATE"):
            yield self._connection

    def data_version(self) -> int:
        """A number that changes when another process has written."""
        with self._lock, self._translate_errors():
            found: int = self._connection.execute("PRAGMA data_version").fetchone()[0]
            return found

    def _migrate(self, schema: tuple[str, ...]) -> None:
        with self._translate_errors():
            self._validate_file(len(schema))
            self._connection.execute("PRAGMA journal_mode = WAL")
            # a power loss may lose the last transactions but not corrupt the file
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute("PRAGMA foreign_keys = ON")
            if self._pragma("user_version") == len(schema):
                return  # a full disk can be read
        with self.write_transaction() as sqlite:
            version = self._pragma("user_version")
            for number, statements in enumerate(schema[version:], version + 1):
                for statement in statements.split(";"):
                    sqlite.execute(statement)
                sqlite.execute(f"PRAGMA user_version = {number}")
            sqlite.execute(f"PRAGMA application_id = {APPLICATION_ID}")

    def _validate_file(self, latest_version: int) -> None:
        version, application = self._pragma("user_version"), self._pragma("application_id")
        is_empty = self._pragma("schema_version") == 0
        if not is_empty and application != APPLICATION_ID:
            raise StoreFailed(f"{self._path} is not a chat database: move it away to create one")
        if version > latest_version:
            raise StoreFailed(
                f"{self._path} was written by a newer localgen (format {version}, this one reads "
                f"{latest_version}): update localgen, or set LOCALGEN_STATE_DIR to another folder"
            )
        found = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise self._damaged_error(found)

    def _require_known_version(self) -> None:
        version = self._pragma("user_version")
        if version > self._latest_version:
            raise StoreFailed(
                f"a newer localgen has upgraded {self._path} (format {version}, this one writes "
                f"{self._latest_version}): start localgen again to store what follows"
            )

    def _pragma(self, name: str) -> int:
        found: int = self._connection.execute(f"PRAGMA {name}").fetchone()[0]
        return found

    @contextlib.contextmanager
    def _transaction(self, begin: str) -> Iterator[None]:
        self._connection.execute(begin)
        try:
            self._require_known_version()
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            # SQLite may have rolled back already, for example on a full disk
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreFailed(f"cannot use {self._path}: {error.strerror}") from error
        except sqlite3.OperationalError as error:
            raise self._operational_error(error) from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise self._damaged_error(str(error)) from error

    def _operational_error(self, error: sqlite3.OperationalError) -> LocalgenError:
        full = ("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC", "SQLITE_IOERR_SHMSIZE")
        # Python gives errors of its own no name, as for text that is not UTF-8
        name = getattr(error, "sqlite_errorname", "")
        if not name:
            return self._damaged_error(str(error))
        if name in full:
            return DiskFull(f"the disk of {self._path} is full: free some space")
        if name.startswith("SQLITE_BUSY"):
            return StoreFailed(f"another program keeps {self._path} locked: close it")
        return StoreFailed(f"cannot use {self._path}: {error}")

    def _damaged_error(self, detail: str) -> StoreFailed:
        found = " ".join(detail.split())
        return StoreFailed(
            f"{self._path} is damaged ({found}): it was not changed; "
            "move it away to create a new one"
        )
