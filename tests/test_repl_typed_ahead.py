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
from localgen.repl.line_reader import create_line_reader
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


def test_keys_are_taken_whole_and_the_terminal_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdin", terminal)
    before = termios.tcgetattr(terminal.slave)
    with create_pipe_input() as source:
        assert take_typed_ahead(source) == ""
        terminal.type("y\rné\x1b[A more".encode())
        assert take_typed_ahead(source) == "y\nné[A more"
        assert termios.tcgetattr(terminal.slave) == before
        assert not terminal.has_keys
        store_typeahead(source, [KeyPress("a"), KeyPress(Keys.ControlM, "\r"), KeyPress("b")])
        terminal.type(b"c\r")
        assert take_typed_ahead(source) == "a\nbc"
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
