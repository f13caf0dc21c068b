"""Keys that were typed before a question do not answer it, and are not lost."""

from __future__ import annotations

import os
import pty
import select
import sys
import termios
import tty

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from scripted_client import ScriptedClient

from localgen.chat.parameters import ModelOptions
from localgen.chat.session import ChatSession
from localgen.mcp_tools.call_question import CallQuestion, Decision
from localgen.repl import typed_ahead
from localgen.repl.line_reader import create_line_reader
from localgen.repl.tool_calls import ToolCallPrinter
from localgen.repl.typed_ahead import take_typed_ahead


class Terminal:
    """Standard input that is a terminal; type() presses keys."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        modes = termios.tcgetattr(self.slave)
        modes[tty.LFLAG] &= ~termios.ECHO
        termios.tcsetattr(self.slave, termios.TCSANOW, modes)

    def fileno(self) -> int:
        return self.slave

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    @property
    def has_keys(self) -> bool:
        by_key = termios.tcgetattr(self.slave)
        by_key[tty.LFLAG] &= ~termios.ICANON
        termios.tcsetattr(self.slave, termios.TCSANOW, by_key)
        return bool(select.select([self.slave], [], [], 0)[0])


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_ahead, "SETTLE_S", 0.0)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("one\x1b[A\x1b[1;5Dtwo\x1bOPthree\x1b", "onetwothree"),  # Up, Ctrl+Left, F1, Escape
        ("word\x1bb and", "word and"),  # Alt+B
        ("helo\x7flo", "hello"),
        ("\x7f\tx\x01", "x"),
        ("\x1b[200~a\rb\x1b[31m\x1b[201~c", "a\nb[31mc"),
    ],
)
def test_only_text_is_kept(monkeypatch: pytest.MonkeyPatch, keys: str, text: str) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdin", terminal)
    terminal.type(keys.encode())
    with create_pipe_input() as source:
        assert take_typed_ahead(source) == text


def test_a_line_that_is_being_typed_is_taken_to_its_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdin", terminal)
    late = [b"lo", b" y\r"]
    real = select.select

    def typing(*_: object) -> object:
        if late:
            terminal.type(late.pop(0))
        return real([terminal.slave], [], [], 0)

    monkeypatch.setattr(select, "select", typing)
    with create_pipe_input() as source:
        assert take_typed_ahead(source) == ""  # no pause to wait for
        terminal.type(b"hel")
        assert take_typed_ahead(source) == "hello y\n"


def test_keys_are_taken_whole_and_the_terminal_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdin", terminal)
    before = termios.tcgetattr(terminal.slave)
    with create_pipe_input() as source:
        assert take_typed_ahead(source) == ""
        terminal.type("y\rné\x1b[A more".encode())
        assert take_typed_ahead(source) == "y\nné more"
        assert termios.tcgetattr(terminal.slave) == before
        assert not terminal.has_keys
        store_typeahead(source, [KeyPress("a"), KeyPress(Keys.ControlM, "\r"), KeyPress("b")])
        terminal.type(b"c\r")
        assert take_typed_ahead(source) == "a\nbc\n"
        assert take_typed_ahead(source) == ""


def test_the_next_prompt_begins_with_what_was_typed_before_a_question(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdin", terminal)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        session = ChatSession(ScriptedClient(), tmp_path, ModelOptions())  # type: ignore[arg-type]
        reader = create_line_reader(session, Console(), keeps_prompts=False)
        keys.send_text("first\ry\r")  # the second line is held by the line editor
        assert reader.read(">>> ") == "first"
        terminal.type(b"es, and ")
        keys.send_text("n\r")
        assert reader.ask("run it? ") == "n"
        keys.send_text("no\r")
        assert reader.read(">>> ") == "y\nes, and no"
        keys.send_text("last\r")
        assert reader.read(">>> ") == "last"


def test_a_line_that_is_no_answer_is_in_the_next_prompt(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdin", terminal)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        session = ChatSession(ScriptedClient(), tmp_path, ModelOptions())  # type: ignore[arg-type]
        reader = create_line_reader(session, Console(), keeps_prompts=False)
        printer = ToolCallPrinter(Console(quiet=True), reader.ask, reader.keep)
        terminal.type(b"and ")
        keys.send_text("what of May?\r")  # typed while the question appeared
        asked: list[str] = []

        def answer(question: str) -> str:
            asked.append(question)
            if len(asked) == 2:
                keys.send_text("n\r")
            return reader.ask(question)

        printer._read = answer
        assert printer._ask(CallQuestion("test.add", "{}", "{}")) is Decision.REFUSE
        assert len(asked) == 2
        keys.send_text("\r")
        assert reader.read(">>> ") == "and what of May?"
