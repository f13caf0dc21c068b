"""Tool calls of an answer in the terminal: shown, asked for, waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from rich.console import Console
from rich.text import Text

from localgen.backends.types import ToolCall
from localgen.chat.session import ChatSession
from localgen.mcp_tools.call_question import CallQuestion, Decision, parse_decision
from localgen.mcp_tools.chat_tools import CallHandlers, CallResults
from localgen.mcp_tools.results import ToolResult
from localgen.repl.typed_ahead import discard_typed_ahead

ALWAYS = "[a]lways in this chat"


class ToolCallPrinter:
    """Runs calls and prints what happens.

    ask: reads an answer to a question; raises EOFError or KeyboardInterrupt, which stop the answer.
    keep: gets a line that is no answer, such as a prompt that was being typed.
    """

    def __init__(
        self, console: Console, ask: Callable[[str], str], keep: Callable[[str], None]
    ) -> None:
        self._console = console
        self._read, self._keep = ask, keep

    def run(self, session: ChatSession, calls: tuple[ToolCall, ...]) -> CallResults:
        handlers = CallHandlers(self._ask, self._wait, self._print_call, self._print_outcome)
        return session.run_calls(calls, handlers)

    def _ask(self, question: CallQuestion) -> Decision:
        while True:
            try:
                typed = self._read(question.text(ALWAYS))
            except (EOFError, KeyboardInterrupt):
                return Decision.STOP
            if decision := parse_decision(typed):
                return decision
            if question.asks_for_all(typed):
                # wrapped by the terminal: Rich would drop blanks at the ends of lines
                self._console.print(Text(question.whole_arguments), soft_wrap=True)
            elif typed.strip():
                self._keep(typed)
                self._print_outcome("that is no answer: it is kept for the next prompt")

    def _wait(self, call: Future[ToolResult]) -> ToolResult | None:
        try:
            with self._console.status(Text("running; Ctrl+C stops waiting for it", style="dim")):
                return call.result()
        except KeyboardInterrupt:
            call.cancel()
            discard_typed_ahead()
            return None

    def _print_call(self, title: str, arguments: str) -> None:
        self._console.print(Text(f"▸ {title} ", style="cyan").append(arguments, style="dim"))

    def _print_outcome(self, notice: str) -> None:
        self._console.print(Text(f"  {notice}", style="dim"))
