"""Terminal input: a paste is a text, whatever is in it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from textual.events import Key, Paste
from textual.message import Message

from localgen.tui.preferences import Preferences
from localgen.tui.terminal import PasteSafeParser, TerminalDriver
from localgen.tui.top.app import TopApp

# parsed by Textual as Ctrl+G, Ctrl+Q, Enter, the start of a paste and half of its end
HOSTILE = "a\x1b[31mred\x1b[0m\x1b\x1b]0;x\x07 \x11\r\x1b[200~ \x1b[20 \x1b[201 \x9b\u20ac\nz"


def pieces(*data: str) -> list[Message]:
    parser = PasteSafeParser()
    return [message for each in data for message in parser.feed(each)]


def texts(messages: list[Message]) -> list[str]:
    """Names of keys, and pastes with their text."""
    return [
        f"paste {each.text}" if isinstance(each, Paste) else each.key
        for each in messages
        if isinstance(each, Key | Paste)
    ]


def test_a_paste_is_one_text_wherever_it_is_cut() -> None:
    sent = f"k\x1b[200~{HOSTILE}\x1b[201~\x1b[A"
    expected = ["k", f"paste {HOSTILE}", "up"]
    assert texts(pieces(sent)) == expected
    for at in range(1, len(sent)):
        assert texts(pieces(sent[:at], sent[at:])) == expected, at
    assert texts(pieces(*sent)) == expected


def test_two_pastes_and_what_is_typed_between() -> None:
    sent = "\x1b[200~\x1b[31mone\x1b[201~x\x1b[200~two\x1b\x1b[201~\r"
    assert texts(pieces(sent)) == ["paste \x1b[31mone", "x", "paste two\x1b", "enter"]


def test_a_paste_of_100_kb_in_reads_of_4_kb() -> None:
    text = "a line with \x1b[1mcolour\x1b[0m\n" * 4_000
    sent = f"\x1b[200~{text}\x1b[201~"
    assert texts(pieces(*(sent[at : at + 4096] for at in range(0, len(sent), 4096)))) == [
        f"paste {text}"
    ]


def test_keys_are_parsed_as_before() -> None:
    assert texts(pieces("a\x11\x1b[A\x1b[1;5B\r")) == ["a", "ctrl+q", "up", "ctrl+down", "enter"]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_alt_keys_in_one_burst(size: int) -> None:
    burst = "\x1by\x1by\x1b[A\x1ba\x1bOPx\x1by\x1b[200~\x1by\x1by\x1b[201~\x1br\x1b[B"
    parser = PasteSafeParser()
    pieces = [burst[at : at + size] for at in range(0, len(burst), size)]
    found = [message for piece in pieces for message in parser.feed(piece)]
    keys = [each.key for each in found if isinstance(each, Key)]
    assert keys == ["alt+y", "alt+y", "up", "alt+a", "f1", "x", "alt+y", "alt+r", "down"]
    assert [each.text for each in found if isinstance(each, Paste)] == ["\x1by\x1by"]


def test_invalid_utf8_does_not_end_input(pipe: tuple[int, int]) -> None:
    heard: list[Message] = []
    is_over = threading.Event()

    class Heard(TerminalDriver):
        def __init__(self) -> None:
            self.fileno, self.exit_event = pipe[0], is_over

        def process_message(self, message: Message) -> None:
            heard.append(message)
            if texts([message]) == ["q"]:
                is_over.set()

    thread = threading.Thread(target=Heard().run_input_thread, daemon=True)
    thread.start()
    os.write(pipe[1], b"\xff\x1b[200~caf\xc3")
    os.write(pipe[1], b"\xa9 \xe9\x1b[201~q")
    assert is_over.wait(30)
    thread.join(30)
    assert not thread.is_alive()
    assert texts(heard)[1:] == ["paste caf\u00e9 \ufffd", "q"]


def test_both_programs_use_the_terminal_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textual.constants.DRIVER", None)
    assert TopApp(lambda: None, "", "", Preferences(None)).driver_class is TerminalDriver  # type: ignore
