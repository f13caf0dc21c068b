"""Base class of the screens above the main screen that show work in progress."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from textual.screen import Screen

_Result = TypeVar("_Result")


class ToolScreen(Screen[_Result]):
    """A full screen above the main one."""

    @abstractmethod
    def sync(self) -> None:
        """Show what has changed; called many times a second."""

    @abstractmethod
    def action_stop(self) -> None:
        """Stop the work that it shows, or say that there is none."""
