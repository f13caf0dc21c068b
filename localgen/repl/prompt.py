"""The line editor: persistent history, completion, multi-line prompts, $EDITOR."""

from __future__ import annotations

import datetime
import os
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app, run_in_terminal
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, is_searching
from prompt_toolkit.history import DummyHistory, FileHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout.processors import TabsProcessor
from prompt_toolkit.output import Output

from localgen.chat.commands import SLASH_COMMANDS, argument_choices
from localgen.chat.file_mentions import list_files, matching_files, mention_of, typed_mention
from localgen.locked_file import LockedFile
from localgen.mcp_tools.server_file import server_names

_MAX_MENTIONS = 50
TRIPLE_QUOTES = '"""'
_PREFIXES = ("", "/set system ")
# those that prompt_toolkit tries after $VISUAL and $EDITOR
_EDITORS = tuple(f"/usr/bin/{name}" for name in ("editor", "nano", "pico", "vi", "emacs"))


def has_open_quotes(text: str) -> bool:
    """True if triple quotes are open, at the start or after `/set system`."""
    body = text.lstrip()
    return any(
        body.startswith(opening + TRIPLE_QUOTES)
        and not _is_closed(body.removeprefix(opening).rstrip())
        for opening in _PREFIXES
    )


def strip_quotes(text: str) -> str:
    """Return a prompt without the triple quotes around it."""
    body = text.strip()
    if body.startswith(TRIPLE_QUOTES) and _is_closed(body):
        return body[len(TRIPLE_QUOTES) : -len(TRIPLE_QUOTES)].strip("\n")
    return text


def _is_closed(quoted: str) -> bool:
    return len(quoted) >= 2 * len(TRIPLE_QUOTES) and quoted.endswith(TRIPLE_QUOTES)


class ChatCompleter(Completer):
    """Completes commands, their arguments, parameters, saved chats, models and file names.

    A word that begins with `@` anywhere in a prompt: files below the current folder.
    """

    def __init__(
        self, chats: Callable[[], Iterable[str]], models: Callable[[], Iterable[str]]
    ) -> None:
        self._name_sources = {
            "/save": chats,
            "/load": chats,
            "/model": models,
            "/mcp": server_names,
        }
        self._paths = PathCompleter(expanduser=True)
        self._files: list[str] = []
        self._mention_start = -1

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        before = document.text_before_cursor
        mention = typed_mention(before)
        if mention is not None and not before.startswith("/"):
            yield from self._mentions(*mention, len(before))
        if not before.startswith("/") or "\n" in before:
            return
        word, space, argument = before.partition(" ")
        if not space:
            yield from _prefix_matches(SLASH_COMMANDS, word)
            return
        yield from _prefix_matches(self._choices(word, argument), argument.rpartition(" ")[2])
        if word in ("/save", "/load", "/model"):
            rest = Document(argument, len(argument))
            yield from self._paths.get_completions(rest, event)

    def _mentions(self, start: int, typed: str, end: int) -> Iterator[Completion]:
        if start != self._mention_start or not typed:  # a new mention: files may have been added
            self._mention_start, self._files = start, list_files()
        for path in matching_files(self._files, typed, _MAX_MENTIONS):
            yield Completion(mention_of(path), start_position=start - end, display=path)

    def _choices(self, word: str, argument: str) -> Iterable[str]:
        before = argument.rpartition(" ")[0]
        if word in self._name_sources:
            return () if before else self._name_sources[word]()
        return argument_choices(word, before)


def create_prompt_session(
    history_path: Path,
    completer: Completer,
    *,
    on_failure: Callable[[OSError], None] = lambda error: None,
    can_write: bool = True,
    input: Input | None = None,
    output: Output | None = None,
) -> PromptSession[str]:
    """Create the line editor of a chat. on_failure: called once if the history cannot be written.

    can_write: False: earlier prompts are offered, new ones are not kept. Its prompt() raises
    EOFError at Ctrl+D, and KeyboardInterrupt at Ctrl+C on an empty line.
    """
    return PromptSession(
        history=PromptHistory(history_path, on_failure, can_write=can_write),
        completer=completer,
        complete_while_typing=Condition(_has_completions),
        complete_in_thread=True,  # listing the files of a large folder takes a while
        multiline=Condition(lambda: has_open_quotes(get_app().current_buffer.text)),
        prompt_continuation=_continuation,
        key_bindings=_key_bindings(),
        input_processors=[TabsProcessor(char1=" ", char2=" ")],  # a pasted tab is not shown as ^I
        input=input,
        output=output,
        enable_suspend=True,
    )


def create_question_session() -> PromptSession[str]:
    """Create the line editor of questions: no history, no completion."""
    return PromptSession(history=DummyHistory(), enable_suspend=True)


def _has_completions() -> bool:
    buffer = get_app().current_buffer
    return buffer.text.startswith("/") or bool(typed_mention(buffer.document.text_before_cursor))


class PromptHistory(FileHistory):
    """A history on disk, which several chats write.

    In memory only after the first failure, which is reported.
    """

    def __init__(
        self, path: Path, on_failure: Callable[[OSError], None], *, can_write: bool
    ) -> None:
        super().__init__(str(path))
        self._file = LockedFile(path)  # prompts are private
        self._on_failure = on_failure
        self._can_write = can_write

    def load_history_strings(self) -> Iterable[str]:
        try:
            return super().load_history_strings()
        except OSError as error:
            self._fail(error)
            return ()

    def store_string(self, string: str) -> None:
        if not self._can_write:
            return
        lines = "".join(f"+{line}\n" for line in string.split("\n"))
        entry = f"\n# {datetime.datetime.now()}\n{lines}".encode(errors="replace")
        try:
            with self._file.locked():
                self._file.write(self._file.read_bytes() + entry)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._can_write = False
        self._on_failure(error)


def _continuation(_width: int, _line: int, wraps: int) -> str:
    # no continuation mark for a wrapped line
    return "" if wraps else "... "


def _key_bindings() -> KeyBindings:
    keys = KeyBindings()

    # in a history search both keys leave the search: its text is a buffer of its own
    @keys.add("c-g", filter=~is_searching)
    def _edit(event: KeyPressEvent) -> None:
        problem = _editor_problem()
        if problem is None:
            event.current_buffer.open_in_editor()
        else:
            run_in_terminal(lambda: print(problem))

    @keys.add("c-c", filter=~is_searching)
    def _clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return keys


def _editor_problem() -> str | None:
    """Why no editor opens: the user's do not exist, or none does; None if one opens."""
    missing = []
    for variable in ("VISUAL", "EDITOR"):  # in this order, as prompt_toolkit
        command = os.environ.get(variable)
        if command:
            try:
                program = next(iter(shlex.split(command)), "")
            except ValueError as error:
                return f"{variable}={command}: {error}"
            if shutil.which(program):
                return None
            missing.append(f"{variable}={command}: command not found")
    if missing or any(map(shutil.which, _EDITORS)):
        return "\n".join(missing) or None
    return "no editor found: name one in $EDITOR"


def _prefix_matches(words: Iterable[str], start: str) -> Iterator[Completion]:
    for word in words:
        if word.startswith(start):
            yield Completion(word, start_position=-len(start))
