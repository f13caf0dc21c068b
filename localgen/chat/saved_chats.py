"""Save and load chats as JSON files, in the state folder or at any path."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from localgen.backends.errors import InvalidRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.typed_data import decode_json
from localgen.backends.types import Message
from localgen.chat.conversation import Conversation, ToolStep, conversation_from_messages
from localgen.locked_file import LockedFile

FILE_FORMAT: Literal["localgen-chat-1"] = "localgen-chat-1"


@dataclass(frozen=True, slots=True)
class SavedChat:
    """A conversation, its model, and the sampling parameters set by the user."""

    model: str
    params: SamplingParams
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class _SavedMessage:
    role: Literal["system", "user", "assistant"]
    content: str
    stopped: bool = False
    reasoning: str = ""
    steps: tuple[ToolStep, ...] = ()


@dataclass(frozen=True, slots=True)
class _ChatFile:
    format: Literal["localgen-chat-1"]
    model: str
    parameters: SamplingParams
    messages: tuple[_SavedMessage, ...]


def chat_path(name: str, state_dir: Path) -> Path:
    """Return the file of a saved chat: a plain name is in the state folder, a path is used as is.

    Raises InvalidRequest if the name is empty or contains a zero byte.
    """
    if not name or "\0" in name:
        raise InvalidRequest("give a name or a path")
    if os.sep in name or name.startswith("~") or name.endswith(".json"):
        return Path(os.path.expanduser(name))
    return state_dir / "chats" / f"{name}.json"


def create_chats_dir(state_dir: Path) -> None:
    """Create the folder of the chats that are saved by name. Raises InvalidRequest."""
    folder = state_dir / "chats"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"cannot create {folder}: {error.strerror}") from error


def saved_chat_names(state_dir: Path) -> list[str]:
    """Names of the chats in the state folder."""
    return sorted(path.stem for path in (state_dir / "chats").glob("*.json"))


def save_chat(path: Path, chat: SavedChat) -> None:
    """Write a chat atomically.

    Raises InvalidRequest if writing fails, if the folder does not exist, or if the path holds a
    file that is not a saved chat.
    """
    if path.is_dir():
        raise InvalidRequest(f"cannot save to {path}: it is a folder, give a file in it")
    if path.exists():
        load_chat(path)  # raises if the existing file is not a chat
    if not path.parent.is_dir():
        raise InvalidRequest(
            f"cannot save to {path}: the folder {path.parent} does not exist; create it first, or "
            "give a plain name to save with localgen's own files"
        )
    try:
        LockedFile(path).store(encode_chat(chat))
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from error


def encode_chat(chat: SavedChat) -> bytes:
    """The content of a chat's file."""
    return msgspec.json.format(msgspec.json.encode(_to_file(chat)))


def load_chat(path: Path) -> SavedChat:
    """Load a chat. Raises InvalidRequest if the file is unreadable or not a saved chat."""
    try:
        found = decode_json(path.read_bytes(), _ChatFile)
        stopped = frozenset(at for at, spoken in enumerate(found.messages) if spoken.stopped)
        messages = [
            Message(spoken.role, spoken.content, spoken.reasoning or None)
            for spoken in found.messages
        ]
        steps = {at: spoken.steps for at, spoken in enumerate(found.messages)}
        conversation = conversation_from_messages(messages, stopped, steps)
        return SavedChat(found.model, found.parameters, conversation)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{path} is not a saved chat: {error}") from error
    except InvalidRequest as error:
        raise InvalidRequest(f"{path} is not a saved chat: {error.message}") from error


def _to_file(chat: SavedChat) -> _ChatFile:
    system = chat.conversation.system
    spoken = [_SavedMessage("system", system)] if system else []
    for turn in chat.conversation.turns:
        answer = _SavedMessage("assistant", turn.answer, turn.stopped, turn.reasoning, turn.steps)
        spoken += [_SavedMessage("user", turn.prompt), answer]
    return _ChatFile(FILE_FORMAT, chat.model, chat.params, tuple(spoken))
