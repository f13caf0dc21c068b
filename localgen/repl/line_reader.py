"""Reads the lines of a chat, with a history and completion."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.chat.session import ChatSession
from localgen.repl.typed_ahead import take_typed_ahead


@dataclass(frozen=True, slots=True)
class LineReader:
    """read: reads a line of a chat with the line editor, at a given prompt.

    ask: reads an answer to a question, without a history. What was typed before the question does
    not answer it: the next read() begins with it, and with the lines given to keep().
    """

    read: Callable[[str], str]
    ask: Callable[[str], str]
    keep: Callable[[str], None]


def create_line_reader(
    session: ChatSession, console: Console, *, keeps_prompts: bool = True
) -> LineReader:
    """Return the line editor of a chat on the terminal."""
    from localgen.chat import saved_chats
    from localgen.repl.prompt import ChatCompleter, create_prompt_session, create_question_session

    # completion runs at every key press, and listing a large model cache is slow
    @functools.cache
    def models() -> list[str]:
        try:
            return [card.name for card in session.client.models()]
        except LocalgenError:
            return []  # the completion menu cannot show that the server is unavailable

    completions = ChatCompleter(lambda: saved_chats.saved_chat_names(session.state_dir), models)
    history = session.state_dir / "chat_history"
    failures: list[OSError] = []
    editor = create_prompt_session(
        history, completions, on_failure=failures.append, can_write=keeps_prompts
    )

    questions = create_question_session()
    typed_before: list[str] = []

    def ask(question: str) -> str:
        typed_before.append(take_typed_ahead(questions.input))
        return questions.prompt(question)

    def read(prompt: str) -> str:
        models.cache_clear()
        begun = "".join(typed_before).strip("\n")
        typed_before.clear()
        try:
            return editor.prompt(prompt, default=begun)
        finally:
            # not before: the editor is still drawing the line
            for error in failures:
                reason = f"cannot use {history} ({error.strerror})"
                text = one_line(f"{reason}: prompts of this chat are not kept")
                console.print(Text(text, style="yellow"), soft_wrap=False)
            failures.clear()

    def keep(line: str) -> None:
        if line.strip():
            typed_before.append(f"{line}\n")

    return LineReader(read, ask, keep)
