"""The stored conversation that a user wants to continue."""

from __future__ import annotations

from dataclasses import dataclass

from localgen.backends.errors import InvalidRequest
from localgen.backends.terminal_text import collapse


@dataclass(frozen=True, slots=True)
class SessionChoice:
    """The session that a user wants. name: its name or id. is_latest: the one changed last.

    keeps_history: store the conversation and the prompts. Without name and is_latest, a new one.
    """

    name: str | None = None
    is_latest: bool = False
    keeps_history: bool = True

    @property
    def is_stored(self) -> bool:
        """True if the session comes from the store."""
        return self.name is not None or self.is_latest

    def validate(self, *, at_terminal: bool) -> None:
        """Raise InvalidRequest if the choice contradicts itself, or needs a terminal."""
        if self.name is not None and self.is_latest:
            raise InvalidRequest("--session and --continue exclude each other")
        if self.name is not None and not collapse(self.name):
            raise InvalidRequest("--session: give a name")
        if self.is_stored and not self.keeps_history:
            raise InvalidRequest(
                "history is off (--no-history or LOCALGEN_HISTORY): "
                "--session and --continue need --history"
            )
        if self.is_stored and not at_terminal:
            raise InvalidRequest("--session and --continue need a terminal")
