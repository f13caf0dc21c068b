"""A TOML file of names that commands and the user edit: `models.toml`, `endpoints.toml`."""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localgen.backends.errors import DISK_FULL_ERRNOS, DiskFull, InvalidRequest, LocalgenError
from localgen.config import BadSetting, make_private_dir
from localgen.locked_file import LockedFile

if TYPE_CHECKING:
    from tomlkit import TOMLDocument


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

    def change(self, apply: Callable[[TOMLDocument], None]) -> None:
        """Apply a change to the content; comments, order and layout of the rest are kept.

        To be called while locked, and after read(). Raises InvalidRequest for text that is not
        valid Unicode, and for a layout that can only be edited by hand.
        """
        # only commands that change the file need it
        import tomlkit
        from tomlkit.exceptions import TOMLKitError

        try:
            document = tomlkit.parse(self.read_text())
            apply(document)
            content = tomlkit.dumps(document).encode()
            is_kept = tomllib.loads(content.decode()) == document.unwrap()
        except UnicodeEncodeError as error:
            text = error.object[max(0, error.start - 40) : error.end + 40]
            raise InvalidRequest(f"{text!r} is not valid Unicode and cannot be stored") from error
        except (ValueError, TOMLKitError):
            is_kept = False
        if not is_kept:
            raise InvalidRequest(f"the layout of {self.path} is unusual: edit it by hand")
        try:
            # a link stays, such as one to a folder of dotfiles
            LockedFile(Path(os.path.realpath(self.path))).write(content)
        except OSError as error:
            raise self._not_writable(error) from error

    @property
    def _file(self) -> LockedFile:
        return LockedFile(self.path)

    def _not_writable(self, error: OSError) -> LocalgenError:
        kind = DiskFull if error.errno in DISK_FULL_ERRNOS else BadSetting
        return kind(f"cannot write {self.path}: {error.strerror}")
