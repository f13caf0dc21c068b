"""The themes of both apps, and loading and saving the user's choice."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from textual.theme import Theme

from localgen.locked_file import LockedFile

DARK, LIGHT, HIGH_CONTRAST, MONOCHROME = "dark", "light", "high-contrast", "monochrome"
TERMINAL = "terminal"  # the colours that the terminal is set to

THEMES = (
    Theme(
        name=DARK,
        primary="#7aa2f7",
        secondary="#7dcfff",
        accent="#e0af68",
        foreground="#c8d0e0",
        background="#12141c",
        surface="#181b25",
        panel="#222634",
        success="#9ece6a",
        warning="#e0af68",
        error="#f7768e",
        dark=True,
        variables={"border": "#3b4261", "border-blurred": "#2b3046", "muted": "#7d86a0"},
    ),
    Theme(
        name=LIGHT,
        primary="#2a5db0",
        secondary="#0b7285",
        accent="#9a5b00",
        foreground="#1f2430",
        background="#fafafa",
        surface="#f1f2f5",
        panel="#e4e6eb",
        success="#2f7d32",
        warning="#9a5b00",
        error="#b3261e",
        dark=False,
        variables={"border": "#b8bec9", "border-blurred": "#d3d7de", "muted": "#5c6475"},
    ),
    Theme(
        name=HIGH_CONTRAST,
        primary="#00ffff",
        secondary="#ffffff",
        accent="#ffff00",
        foreground="#ffffff",
        background="#000000",
        surface="#000000",
        panel="#1a1a1a",
        success="#00ff00",
        warning="#ffff00",
        error="#ff6060",
        dark=True,
        variables={"border": "#ffffff", "border-blurred": "#c0c0c0", "muted": "#ffffff"},
    ),
    Theme(
        name=MONOCHROME,
        primary="#d0d0d0",
        secondary="#d0d0d0",
        accent="#ffffff",
        foreground="#d0d0d0",
        background="#000000",
        surface="#0c0c0c",
        panel="#202020",
        success="#d0d0d0",
        warning="#ffffff",
        error="#ffffff",
        dark=True,
        variables={"border": "#606060", "border-blurred": "#404040", "muted": "#989898"},
    ),
    Theme(
        name=TERMINAL,
        ansi=True,
        primary="ansi_blue",
        secondary="ansi_cyan",
        accent="ansi_magenta",
        foreground="ansi_default",
        background="ansi_default",
        surface="ansi_default",
        panel="ansi_default",
        success="ansi_green",
        warning="ansi_yellow",
        error="ansi_red",
        variables={
            "border": "ansi_bright_black",
            "border-blurred": "ansi_bright_black",
            "muted": "ansi_bright_black",
            "ansi-background": "ansi_default",
            "ansi-foreground": "ansi_default",
            "block-cursor-background": "ansi_blue",
            "block-cursor-foreground": "ansi_bright_white",
            "scrollbar-background": "ansi_default",
            "scrollbar-background-hover": "ansi_default",
            "scrollbar-background-active": "ansi_default",
        },
    ),
)
THEME_NAMES = tuple(theme.name for theme in THEMES)


class ThemeChoice:
    """The selected theme, stored in a file of the state folder. no_color: NO_COLOR overrides it."""

    def __init__(self, path: Path | None, environ: Mapping[str, str] = os.environ) -> None:
        self._path = path
        self.no_color = bool(environ.get("NO_COLOR"))

    def load(self) -> str:
        """Name of the theme to start with; dark if none is stored or the file is unreadable."""
        if self.no_color:
            return MONOCHROME
        if self._path is None:
            return DARK
        try:
            name = json.loads(self._path.read_text(encoding="utf-8"))["theme"]
        except (OSError, ValueError, KeyError, TypeError):
            return DARK
        return name if name in THEME_NAMES else DARK

    def save(self, name: str) -> None:
        """Store the theme. Write errors are ignored."""
        if self._path is None or self.no_color:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            LockedFile(self._path).store(json.dumps({"theme": name}))
