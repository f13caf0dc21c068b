"""Export of a transcript to a file."""

from __future__ import annotations

import os
from pathlib import Path

from localgen.backends.errors import InvalidRequest
from localgen.chat import saved_chats
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
            file.write(transcript_markdown(active))
    except FileExistsError as error:
        raise InvalidRequest(f"{path} already exists: give another name") from error
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from error
    return path.absolute()


def transcript_markdown(active: ActiveSession) -> str:
    """The transcript as Markdown, with reasoning in collapsed sections."""
    conversation = active.chat.conversation
    parts = [f"# {active.name}\n"]
    if conversation.system:
        parts.append(f"System prompt:\n\n{_blockquote(conversation.system)}\n")
    for turn in conversation.turns:
        parts.append(f"## You\n\n{turn.prompt}\n")
        thought = (
            f"<details><summary>Reasoning</summary>\n\n{turn.reasoning}\n\n</details>\n\n"
            if turn.reasoning
            else ""
        )
        served = f"\n\n*{' · '.join(turn.summary.splitlines())}*" if turn.summary else ""
        parts.append(f"## Answer\n\n{thought}{turn.answer}{served}\n")
    return "\n".join(parts)


def _blockquote(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines())
