"""Export of a transcript to a file."""

from __future__ import annotations

import os
from pathlib import Path

from localgen.backends.errors import InvalidRequest
from localgen.chat import saved_chats
from localgen.chat.transcript import transcript_markdown
from localgen.tui.chat.active_session import ActiveSession


def export_transcript(active: ActiveSession, target: str) -> Path:
    """Write the session to a path: JSON for `/load` if it ends in .json, else Markdown.

    Returns the absolute path. Raises InvalidRequest if it cannot be written, or if it is an
    existing file other than a saved chat.
    """
    path = Path(os.path.expanduser(target))
    session = active.chat
    if path.suffix == ".json":
        saved_chats.save_chat(
            path, saved_chats.SavedChat(session.name, session.options.params, session.conversation)
        )
        return path.absolute()
    try:
        with open(path, "x", encoding="utf-8", errors="replace") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(transcript_markdown(active.name, session.conversation))
    except FileExistsError as error:
        raise InvalidRequest(f"{path} already exists: give another name") from error
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from error
    return path.absolute()
