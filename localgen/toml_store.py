"""A TOML file of names that commands and the user edit: `models.toml`, `endpoints.toml`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from localgen.backends.errors import InvalidRequest
from localgen.config import BadSetting, make_private_dir


@dataclass(frozen=True, slots=True)
class TomlStore:
    """Adds and removes entries, and keeps everything else as the user wrote it.

    path: the file, which may not exist. dir_variable: the setting that names its folder.
    """

    path: Path
    dir_variable: str

    def read(self) -> dict[str, Any]:
        """The entries by name. Raises BadSetting if the file cannot be read."""
        try:
            return tomllib.loads(self.read_text())
        except (OSError, ValueError) as error:
            raise BadSetting(f"{self.path}: {error}: correct it or remove it") from error

    def read_text(self) -> str:
        """The content, empty if there is no file."""
        try:
            return self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from changing the file between reading and writing it.

        Raises BadSetting if the folder is unsafe or not writable.
        """
        make_private_dir(self.path.parent, self.dir_variable)
        lock_path = self.path.with_name(f".{self.path.name}.lock")
        try:
            lock = _open_locked(lock_path)
        except OSError as error:
            raise self._not_writable(error) from error
        with lock:
            try:
                yield
            finally:
                lock_path.unlink(missing_ok=True)

    def append(self, entry: str, *, separator: str = "") -> None:
        """Add an entry, and a separator if it is not the first. To be called while locked."""
        before = self.read_text()
        if before:
            before += separator if before.endswith("\n") else f"\n{separator}"
        self._write(f"{before}{entry}")

    def remove(self, name: str, text_without: str) -> bool:
        """Write the text without an entry. To be called while locked.

        Returns False and writes nothing if the text differs in anything but that entry.
        """
        expected = {other: value for other, value in self.read().items() if other != name}
        try:
            is_right = tomllib.loads(text_without) == expected
        except tomllib.TOMLDecodeError:
            is_right = False
        if is_right:
            self._write(text_without)
        return is_right

    def _write(self, text: str) -> None:
        # atomically: another process may be reading the file
        fresh = self.path.with_name(f".{self.path.name}.new")
        try:
            fresh.touch(mode=0o600)
            with fresh.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise self._not_writable(error) from error

    def _not_writable(self, error: OSError) -> BadSetting:
        return BadSetting(f"cannot write {self.path}: {error.strerror}")


def toml_string(text: str) -> str:
    """The text as a TOML string. Raises InvalidRequest if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{text!r} is not valid Unicode and cannot be stored") from error
    # a JSON string is a TOML string, except for escaped surrogate pairs and DEL
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _open_locked(path: Path) -> IO[str]:
    """Create and lock a file that its owner removes before it unlocks it; waits for the owner."""
    while True:
        lock = open(path, "a")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        # the previous owner may have removed this file meanwhile
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        lock.close()
