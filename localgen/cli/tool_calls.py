"""Tool calls of `localgen run`: asked for on the terminal, refused without one."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TextIO

from localgen.mcp_tools.call_question import CallQuestion, Decision, parse_decision
from localgen.mcp_tools.chat_tools import CallHandlers
from localgen.mcp_tools.results import ToolResult

_TERMINAL = "/dev/tty"


def one_shot_handlers() -> CallHandlers:
    """Prints calls on stderr."""
    return CallHandlers(_ask, _wait, _print_call, _print)


def _ask(question: CallQuestion) -> Decision:
    with _open_terminal() as terminal:
        if terminal is None:
            return Decision.NOBODY_ASKED
        return _ask_on(terminal, question)


@dataclass(frozen=True, slots=True)
class _Terminal:
    keys: TextIO
    screen: TextIO


@contextlib.contextmanager
def _open_terminal() -> Iterator[_Terminal | None]:
    """The terminal to ask on, also if the prompt comes from a pipe; None if there is none."""
    if sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty():
        yield _Terminal(sys.stdin, sys.stderr)
        return
    with contextlib.ExitStack() as files:
        terminal = None
        with contextlib.suppress(OSError):  # there is none
            keys = files.enter_context(open(_TERMINAL, encoding="utf-8", errors="replace"))
            screen = files.enter_context(open(_TERMINAL, "w", encoding="utf-8", errors="replace"))
            terminal = _Terminal(keys, screen) if _is_in_foreground(keys) else None
        yield terminal


def _is_in_foreground(terminal: TextIO) -> bool:
    """False for a process that would be suspended when it reads."""
    try:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _ask_on(terminal: _Terminal, question: CallQuestion) -> Decision:
    with contextlib.suppress(termios.error):  # keys typed before the question do not answer it
        termios.tcflush(terminal.keys, termios.TCIFLUSH)
    if not sys.stderr.isatty():  # the call was not shown on the terminal
        print(f"▸ {question.title} {question.arguments}", file=terminal.screen)
    while True:
        print(f"  {question.text('[a]lways')}", end="", file=terminal.screen, flush=True)
        typed = terminal.keys.readline()
        if not typed:  # Ctrl+D
            return Decision.STOP
        if decision := parse_decision(typed):
            return decision
        if question.asks_for_all(typed):
            print(f"  {question.whole_arguments}", file=terminal.screen)


def _wait(call: Future[ToolResult]) -> ToolResult | None:
    try:
        return call.result()
    except KeyboardInterrupt:
        call.cancel()
        return None


def _print_call(title: str, arguments: str) -> None:
    _print(f"{title} {arguments}", mark="▸ ")


def _print(line: str, mark: str = "  ") -> None:
    print(f"{mark}{line}", file=sys.stderr)
