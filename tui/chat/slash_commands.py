"""Slash commands of the TUI: those of the terminal chat, and those about sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.chat import commands

# commands handled by the screen, not by a session
SCREEN_COMMANDS = {
    "/new": ("", "starts a session"),
    "/rename": ("NAME", "renames this session"),
    "/fork": ("[NAME]", "continues in a copy, keeps this session as it is"),
    "/switch": ("[NAME]", "switches to another session"),
    "/delete": ("", "deletes this session; F9 restores it"),
    "/search": ("[TEXT]", "searches all sessions"),
    "/export": ("[PATH]", "writes the transcript: Markdown, or .json for /load"),
    "/compare": ("", "sends one prompt to several models or settings"),
    "/quantize": ("", "quantizes a 16-bit model"),
    "/tokens": ("", "shows what else was likely at each token of the last answer"),
    "/model": ("[NAME]", "switches to another model; without a name, lists them"),
    "/regen": ("", "sends the last prompt again"),
    "/help": ("", "shows the keys and these commands"),
    "/bye": ("", "quits"),
}
# commands of the session whose effect differs from that in the terminal chat
_OTHER_MEANINGS = {"/clear": ("", "deletes all turns, keeps the system prompt; F9 restores them")}


@dataclass(frozen=True, slots=True)
class CompletionSources:
    """Names for argument completion, looked up when needed."""

    models: Callable[[], Iterable[str]]
    saved_chats: Callable[[], Iterable[str]]
    sessions: Callable[[], Iterable[str]]


def command_table() -> list[tuple[str, str, str]]:
    """(name, usage, meaning) of every command."""
    shared = {name: (each.usage, each.help) for name, each in commands.SLASH_COMMANDS.items()}
    rows = shared | _OTHER_MEANINGS | SCREEN_COMMANDS
    return [(name, *row) for name, row in sorted(rows.items())]


def parse_screen_command(line: str) -> tuple[str, str] | None:
    """Return name and argument of a screen command, or None for a command of the session.

    Raises InvalidRequest if there is no such command.
    """
    word, _, argument = line.strip().partition(" ")
    name = commands.COMMAND_ALIASES.get(word, word)
    if name in SCREEN_COMMANDS:
        return name, argument.strip()
    try:
        commands.find_command(name)
    except LocalgenError:
        close = [known for known in SCREEN_COMMANDS if known.startswith(name)]
        if close:
            message = f"no command {word}: did you mean {close[0]}?"
            raise InvalidRequest(message) from None
        raise
    return None


def command_completions(text: str, sources: CompletionSources) -> list[str]:
    """Possible completions of the text, each as the whole line."""
    if not text.startswith("/") or "\n" in text:
        return []
    word, space, argument = text.partition(" ")
    if not space:
        return [name for name, _, _ in command_table() if name.startswith(word)]
    head, _, last = argument.rpartition(" ")
    start = f"{word} {head} " if head else f"{word} "
    choices = _argument_choices(word, head, sources)
    return [start + each for each in choices if each.startswith(last)]


def command_suggestions(text: str, sources: CompletionSources) -> list[tuple[str, str]]:
    """(completion, meaning) of each possible completion."""
    meanings = {name: f"{usage}  {meaning}".strip() for name, usage, meaning in command_table()}
    return [(each, meanings.get(each, "")) for each in command_completions(text, sources)]


def _argument_choices(word: str, head: str, sources: CompletionSources) -> Iterable[str]:
    match "" if head else word:
        case "/model":
            return sources.models()
        case "/save" | "/load":
            return sources.saved_chats()
        case "/switch":
            return sources.sessions()
    return commands.argument_choices(word, head)
