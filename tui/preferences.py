"""What the user has chosen on the screens, stored in a file of the state folder."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from localgen.locked_file import LockedFile
from localgen.tui.themes import DARK, MONOCHROME, THEME_NAMES


class Preferences:
    """Preferences of both apps. path: None keeps nothing. no_color: NO_COLOR overrides the theme.

    What cannot be read is as if nothing had been chosen; write errors are ignored.
    """

    def __init__(self, path: Path | None, environ: Mapping[str, str] = os.environ) -> None:
        self._path = path
        self.no_color = bool(environ.get("NO_COLOR"))

    def theme(self) -> str:
        """Name of the theme to start with; dark if none was chosen."""
        if self.no_color:
            return MONOCHROME
        name = self._load().get("theme")
        return name if name in THEME_NAMES else DARK

    def save_theme(self, name: str) -> None:
        if not self.no_color:
            self._save("theme", name)

    def hidden_columns(self) -> frozenset[str]:
        """Keys of the columns that `localgen top` does not show."""
        keys = self._load().get("hidden_columns")
        return frozenset(filter(_is_text, keys)) if isinstance(keys, list) else frozenset()

    def save_hidden_columns(self, keys: Collection[str]) -> None:
        self._save("hidden_columns", sorted(keys))

    def _load(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return stored if isinstance(stored, dict) else {}

    def _save(self, name: str, value: object) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = LockedFile(self._path)
            with file.locked():
                file.write(json.dumps(self._load() | {name: value}))


def _is_text(value: object) -> bool:
    return isinstance(value, str)
