"""The slash commands of the tui: those of the chat in a terminal, and those about sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.chat import commands, parameters

# what is done by the screen rather than by a session
OWN = {
    "/new": ("", "begins a session"),
    "/rename": ("NAME", "renames this session"),
    "/fork": ("[NAME]", "goes on in a copy, keeps this session as it is"),
    "/switch": ("[NAME]", "goes to another session"),
    "/delete": ("", "deletes this session; F9 brings it back"),
    "/search": ("[TEXT]", "finds a text in all sessions"),
    "/export": ("[PATH]", "writes the transcript: Markdown, or .json for /load"),
    "/compare": ("", "sends one prompt to several models or settings"),
    "/quantize": ("", "makes a smaller model of one in 16 bits"),
    "/model": ("[NAME]", "goes on with another model; chooses one without a name"),
    "/regen": ("", "asks the last prompt again"),
    "/help": ("", "the keys and these commands"),
    "/bye": ("", "leaves"),
}


@dataclass(frozen=True, slots=True)
class Names:
    """What can be named: looked up when a completion asks for it."""

    models: Callable[[], Iterable[str]]
    chats: Callable[[], Iterable[str]]
    sessions: Callable[[], Iterable[str]]


def table() -> list[tuple[str, str, str]]:
    """Name, usage and meaning of every command."""
    shared = {name: (each.usage, each.help) for name, each in commands.COMMANDS.items()}
    return [(name, *row) for name, row in sorted((shared | OWN).items())]


def own(line: str) -> tuple[str, str] | None:
    """Name and argument of a command that the screen obeys; None: it is the session's.

    InvalidRequest: there is no such command.
    """
    word, _, argument = line.strip().partition(" ")
    name = commands.ALIASES.get(word, word)
    if name in OWN:
        return name, argument.strip()
    try:
        commands.find(name)
    except LocalgenError:
        close = [known for known in OWN if known.startswith(name)]
        if close:
            message = f"no command {word}: did you mean {close[0]}?"
            raise InvalidRequest(message) from None
        raise
    return None


def completions(text: str, names: Names) -> list[str]:
    """Whole texts that this one may become."""
    if not text.startswith("/") or "\n" in text:
        return []
    word, space, argument = text.partition(" ")
    if not space:
        return [name for name, _, _ in table() if name.startswith(word)]
    head, _, last = argument.rpartition(" ")
    start = f"{word} {head} " if head else f"{word} "
    choices = _choices(word, head, names)
    return [start + each for each in choices if each.startswith(last)]


def suggestions(text: str, names: Names) -> list[tuple[str, str]]:
    """The same with what each means."""
    meanings = {name: f"{usage}  {meaning}".strip() for name, usage, meaning in table()}
    return [(each, meanings.get(each, "")) for each in completions(text, names)]


def _choices(word: str, head: str, names: Names) -> Iterable[str]:
    if word == "/set" and head == "parameter":
        return parameters.NAMES
    if head:
        return ()
    match word:
        case "/model":
            return names.models()
        case "/save" | "/load":
            return names.chats()
        case "/switch":
            return names.sessions()
    shared = commands.COMMANDS.get(word)
    return shared.choices if shared else ()
