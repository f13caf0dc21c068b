"""A transcript as a file that other programs read."""

from __future__ import annotations

import os
from pathlib import Path

from localgen.backends.errors import InvalidRequest
from localgen.chat import saved_chats
from localgen.tui.chat.active_session import OpenSession


def export(opened: OpenSession, name: str) -> Path:
    """Write the session to a path: `.json` as `/load` reads it, Markdown otherwise.

    InvalidRequest: it cannot be written, or there is a file already that is no chat.
    """
    path = Path(name).expanduser()
    session = opened.session
    if path.suffix == ".json":
        saved_chats.save(
            path, saved_chats.SavedChat(session.name, session.options.params, session.conversation)
        )
        return path.absolute()
    try:
        with open(path, "x", encoding="utf-8", errors="replace") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(markdown(opened))
    except FileExistsError as error:
        raise InvalidRequest(f"{path} is there already: give another name") from error
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from error
    return path.absolute()


def markdown(opened: OpenSession) -> str:
    """The transcript, what was thought folded away."""
    conversation = opened.session.conversation
    parts = [f"# {opened.name}\n"]
    if conversation.system:
        parts.append(f"System prompt:\n\n{_quoted(conversation.system)}\n")
    for turn in conversation.turns:
        parts.append(f"## You\n\n{turn.prompt}\n")
        thought = (
            f"<details><summary>Thought</summary>\n\n{turn.reasoning}\n\n</details>\n\n"
            if turn.reasoning
            else ""
        )
        served = f"\n\n*{' · '.join(turn.served.splitlines())}*" if turn.served else ""
        parts.append(f"## Answer\n\n{thought}{turn.answer}{served}\n")
    return "\n".join(parts)


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines())
