"""A TOML file of names that commands and the user edit: `models.toml`, `endpoints.toml`."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localgen.backends.errors import DISK_FULL_ERRNOS, DiskFull, InvalidRequest, LocalgenError
from localgen.config import BadSetting, make_private_dir
from localgen.locked_file import LockedFile


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
        return self._file.read_text()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from changing the file between reading and writing it.

        Raises BadSetting if the folder is unsafe or not writable, DiskFull if its disk is full.
        """
        make_private_dir(self.path.parent, self.dir_variable)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._file.locked())
            except OSError as error:
                raise self._not_writable(error) from error
            yield

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
        try:
            self._file.write(text)
        except OSError as error:
            raise self._not_writable(error) from error

    @property
    def _file(self) -> LockedFile:
        return LockedFile(self.path)

    def _not_writable(self, error: OSError) -> LocalgenError:
        kind = DiskFull if error.errno in DISK_FULL_ERRNOS else BadSetting
        return kind(f"cannot write {self.path}: {error.strerror}")


def toml_string(text: str) -> str:
    """The text as a TOML string. Raises InvalidRequest if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{text!r} is not valid Unicode and cannot be stored") from error
    # a JSON string is a TOML string, except for escaped surrogate pairs and DEL
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
