"""Tool calls of `localgen run`: asked for on the terminal, refused without one."""

from __future__ import annotations

import contextlib
import sys
import termios
from concurrent.futures import Future

from localgen.mcp_tools.call_question import CallQuestion, Decision, parse_decision
from localgen.mcp_tools.chat_tools import CallHandlers
from localgen.mcp_tools.results import ToolResult


def one_shot_handlers() -> CallHandlers:
    """Prints calls on stderr."""
    return CallHandlers(_ask, _wait, _print_call, _print)


def _ask(question: CallQuestion) -> Decision:
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
        _print(f"not allowed without a terminal: --mcp-allow {question.title} allows it")
        return Decision.REFUSE
    with contextlib.suppress(termios.error):  # keys typed before the question do not answer it
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
    while True:
        print(f"  {question.text('[a]lways')}", end="", file=sys.stderr, flush=True)
        typed = sys.stdin.readline()
        if not typed:  # Ctrl+D
            return Decision.STOP
        if decision := parse_decision(typed):
            return decision
        if question.asks_for_all(typed):
            _print(question.whole_arguments)


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
