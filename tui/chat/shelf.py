"""The models of one session's server, for the picker."""

from __future__ import annotations

from collections.abc import Callable

from localgen.backends.errors import InvalidRequest
from localgen.chat.session import BUILT_IN
from localgen.client import ModelCard, pull
from localgen.client.pull import Offer
from localgen.tui.chat.open_session import OpenSession, Stopped


class SessionShelf:
    """Another server fetches its models itself."""

    def __init__(self, opened: OpenSession) -> None:
        self._opened = opened
        self._is_elsewhere = opened.session.is_elsewhere

    def cards(self) -> list[ModelCard]:
        return self._opened.session.client.models()

    def offers(self) -> list[Offer]:
        return [] if self._is_elsewhere else pull.offers()

    def can_pull(self, name: str) -> bool:
        return not self._is_elsewhere and pull.can_pull(name)

    def pull(self, name: str, on_bytes: Callable[[int, int], None]) -> str:
        if self._is_elsewhere:
            raise InvalidRequest("another server fetches its models itself")
        return pull.pull(name, on_bytes)

    def load(self, name: str, on_progress: Callable[[float], None]) -> None:
        """InvalidRequest: the user has ended it."""
        built_in = name == BUILT_IN and not self._is_elsewhere
        try:
            self._opened.use_model(None if built_in else name, on_progress)
        except Stopped as stopped:
            raise InvalidRequest("stopped") from stopped

    def stop_loading(self) -> None:
        self._opened.stop_command()
