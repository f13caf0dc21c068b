"""The tools that a chat offers to its model, and which of them the user has allowed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import TYPE_CHECKING

from localgen.backends.errors import ContextExceeded, InvalidRequest
from localgen.backends.terminal_text import escape_control_chars, one_line
from localgen.backends.types import Tool, ToolCall
from localgen.backends.units import format_count
from localgen.mcp_tools.call_arguments import (
    call_title,
    parse_arguments,
    shown_arguments,
    whole_arguments,
)
from localgen.mcp_tools.call_question import CallQuestion, Decision
from localgen.mcp_tools.connections import McpConnections, McpServerFailed
from localgen.mcp_tools.results import MAX_RESULT_CHARS, ToolResult, cut_result
from localgen.mcp_tools.server_file import McpServer, find_server
from localgen.mcp_tools.server_tools import ServerTool, ServerTools

if TYPE_CHECKING:
    from localgen.client.responses import Completion

# of calls in one answer; the model then has to answer without
MAX_ROUNDS = 16
ROUNDS_NOTICE = f"{MAX_ROUNDS} rounds of tool calls: the model has to answer now"
# of all servers together, as localgen's server allows
MAX_TOOLS = 256
_MAX_NAME_CHARS = 64
# of a result, for the user
_RESULT_LINE_CHARS = 120
# of arguments that are wrong, for the model
_SHOWN_WRONG = 400


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool under the name that the model calls it by."""

    name: str
    server: McpServer
    tool: ServerTool

    @property
    def title(self) -> str:
        """SERVER.TOOL, as it is allowed by."""
        return f"{self.server.name}.{self.tool.name}"


@dataclass(frozen=True, slots=True)
class CallHandlers:
    """What a user interface does with calls.

    ask: called before a call that is not allowed yet. wait: returns the result of a call, or None
    if the user has stopped waiting for it. on_call: gets SERVER.TOOL and the arguments before a
    call; on_outcome: one line on how it ended.
    """

    ask: Callable[[CallQuestion], Decision]
    wait: Callable[[Future[ToolResult]], ToolResult | None]
    on_call: Callable[[str, str], None] = lambda title, arguments: None
    on_outcome: Callable[[str], None] = lambda notice: None


@dataclass(frozen=True, slots=True)
class CallResults:
    """texts: of each call, for the model. was_stopped: by the user; the answer ends with it."""

    texts: tuple[str, ...]
    was_stopped: bool = False


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A call that is over. text: for the model. notice: one line for the user; empty if they
    know."""

    text: str
    notice: str
    was_stopped: bool = False


_NOT_RUN = "[not run: the user stopped the answer]"
_STOPPED_BEFORE = _Outcome(_NOT_RUN, "", was_stopped=True)
# the package tells the server, which may have done it, or may go on
_MAY_STILL_RUN = "the server may still carry it out"
_STOPPED_WAITING = _Outcome(
    f"[the user stopped waiting for this call: {_MAY_STILL_RUN}]",
    f"no longer waited for: {_MAY_STILL_RUN}",
    was_stopped=True,
)


class ChatTools:
    """The tools of the servers in use. allowed: patterns of titles that need no question."""

    def __init__(self, connections: McpConnections, allowed: Sequence[str] = ()) -> None:
        self._connections = connections
        self._allowed = list(allowed)
        self._always: list[tuple[McpServer, str]] = []
        self._by_server: dict[str, tuple[OfferedTool, ...]] = {}
        self._warnings: dict[str, tuple[str, ...]] = {}
        self._starting: Future[ServerTools] | None = None

    def for_another_chat(self) -> ChatTools:
        """The same servers and allowed patterns, without what the user has allowed meanwhile."""
        other = ChatTools(self._connections, self._allowed)
        other._by_server = dict(self._by_server)
        other._warnings = dict(self._warnings)
        return other

    def without_servers(self) -> ChatTools:
        """Of the same connections; none of their tools is offered."""
        return ChatTools(self._connections)

    @property
    def servers(self) -> dict[str, tuple[OfferedTool, ...]]:
        """The tools by the name of their server."""
        return dict(self._by_server)

    def warnings(self, name: str) -> tuple[str, ...]:
        """Lines on tools of a server in use that are not offered, and why."""
        return self._warnings.get(name, ())

    @property
    def offered(self) -> tuple[Tool, ...]:
        """All tools, for a request."""
        return tuple(
            Tool(each.name, each.tool.description, each.tool.parameters) for each in self._offered()
        )

    def add(self, name: str) -> tuple[OfferedTool, ...]:
        """Start a server of the user's file and offer its tools.

        Raises InvalidRequest, BadSetting, McpServerFailed, the last also after stop_start().
        """
        server = find_server(name)
        listed = self._start(server)
        found = listed.tools
        others = [each for each in self._offered() if each.server.name != name]
        if len(others) + len(found) > MAX_TOOLS:
            raise InvalidRequest(
                f"MCP server {name} has {len(found):,} tools, of all servers {MAX_TOOLS} may be "
                f'offered: name some, such as tools = ["read_*"] in mcp.toml'
            )
        taken = {each.name for each in others}
        offered = []
        for tool in found:
            offered.append(OfferedTool(_unique_name(tool, taken), server, tool))
            taken.add(offered[-1].name)
        self._by_server[name] = tuple(offered)
        self._warnings[name] = listed.warnings
        return self._by_server[name]

    def _start(self, server: McpServer) -> ServerTools:
        starting = self._starting = self._connections.begin_start(server)
        try:
            return starting.result()
        except CancelledError:
            raise McpServerFailed(f"the start of {server.name} was stopped") from None
        except BaseException:
            starting.cancel()  # at Ctrl+C
            raise
        finally:
            self._starting = None

    def stop_start(self) -> None:
        """Stop a start in another thread, if there is one."""
        starting = self._starting  # read once: the other thread may reset it
        if starting is not None:
            starting.cancel()

    def remove(self, name: str) -> None:
        """Offer the tools of a server no more. Raises InvalidRequest if they are not offered."""
        if name not in self._by_server:
            raise InvalidRequest(f"MCP server {name} is not in use")
        del self._by_server[name], self._warnings[name]
        self._always = [(server, tool) for server, tool in self._always if server.name != name]

    def forget_permissions(self) -> None:
        """Ask again about each tool that the user has allowed in this chat."""
        self._always.clear()

    def asks_before(self, offered: OfferedTool) -> bool:
        """Whether the user is asked before a call of a tool."""
        is_named = any(fnmatchcase(offered.title, pattern) for pattern in self._allowed)
        return not is_named and (offered.server, offered.tool.name) not in self._always

    def with_remedy(self, error: ContextExceeded) -> ContextExceeded:
        """The error with how to offer fewer tools, if any are offered."""
        if not self._by_server:
            return error
        servers = ", ".join(self._by_server)
        return ContextExceeded(
            f'{error.message}; tools = ["NAME", …] in mcp.toml offers fewer of {servers}',
            param=error.param,
        )

    def unmatched_patterns(self) -> list[str]:
        """Those of `allowed` that allow none of the tools."""
        titles = [each.title for each in self._offered()]
        return [
            pattern
            for pattern in self._allowed
            if not any(fnmatchcase(title, pattern) for title in titles)
        ]

    def run(
        self, calls: Iterable[ToolCall], handlers: CallHandlers, max_chars: int | None
    ) -> CallResults:
        """Run calls in their order, each if it is allowed or the user allows it now.

        max_chars: of each result for the model, MAX_RESULT_CHARS at most. Once the user stops one,
        none after it is run.
        """
        texts: list[str] = []
        was_stopped = False
        for call in calls:
            if was_stopped:
                texts.append(_NOT_RUN)
                continue
            found = self._find(call.name)
            title = call_title(call.name) if found is None else one_line(found.title)
            handlers.on_call(title, shown_arguments(call.arguments))
            outcome = self._run(found, call, handlers, max_chars or MAX_RESULT_CHARS)
            if outcome.notice:
                handlers.on_outcome(outcome.notice)
            texts.append(outcome.text)
            was_stopped = outcome.was_stopped
        return CallResults(tuple(texts), was_stopped)

    def _run(
        self, found: OfferedTool | None, call: ToolCall, handlers: CallHandlers, max_chars: int
    ) -> _Outcome:
        if found is None:
            return _not_run("there is no tool of this name", "no such tool")
        arguments = parse_arguments(call.arguments)
        if arguments is None:
            reason = "the arguments are not a JSON object"
            written = escape_control_chars(call.arguments[:_SHOWN_WRONG])
            return _not_run(f"{reason}, but: {written}", reason)
        if self.asks_before(found):
            question = CallQuestion(
                one_line(found.title),
                shown_arguments(call.arguments),
                whole_arguments(call.arguments),
            )
            match handlers.ask(question):
                case Decision.REFUSE:
                    return _not_run("the user refused this call", "refused")
                case Decision.NOBODY_ASKED:
                    return _not_run(
                        "it is not allowed, and there was no terminal to ask the user on",
                        f"not allowed without a terminal: --mcp-allow {question.title} allows it",
                    )
                case Decision.STOP:
                    return _STOPPED_BEFORE
                case Decision.ALWAYS:
                    self._always.append((found.server, found.tool.name))
        result = handlers.wait(self._connections.call(found.server, found.tool.name, arguments))
        if result is None:
            return _STOPPED_WAITING
        return _outcome(result, min(MAX_RESULT_CHARS, max_chars))

    def _offered(self) -> Iterable[OfferedTool]:
        return (each for offered in self._by_server.values() for each in offered)

    def _find(self, name: str) -> OfferedTool | None:
        return next((each for each in self._offered() if each.name == name), None)


def runnable_calls(completion: Completion, num_rounds: int) -> tuple[ToolCall, ...]:
    """The calls of an answer that is whole; the last one of an answer that was cut may be, too.

    None after MAX_ROUNDS, even if a server goes on to call.
    """
    if num_rounds >= MAX_ROUNDS:
        return ()
    return completion.tool_calls if completion.finish_reason in ("tool_calls", "stop") else ()


def _not_run(reason: str, notice: str) -> _Outcome:
    return _Outcome(f"[not run: {reason}]", f"not run: {notice}")


def _outcome(result: ToolResult, max_chars: int) -> _Outcome:
    text = cut_result(result.text, max_chars)
    if result.failed:
        return _Outcome(f"[failed] {text}", f"failed: {one_line(result.text[:300])}")
    return _Outcome(text, _result_line(result.text, max_chars))


def _result_line(text: str, max_chars: int) -> str:
    """The beginning of a result, and how much there is of it."""
    begin = text.split("\n", 1)[0][:_RESULT_LINE_CHARS]
    if begin and begin == text.rstrip("\n"):
        return one_line(begin)
    size = format_count(len(text), "character")
    if len(text) > max_chars:
        size += f", of which the model gets the first {max_chars:,}"
    return f"{one_line(begin)} … ({size})" if begin else size


def _unique_name(tool: ServerTool, taken: set[str]) -> str:
    """`server__tool` in the characters and the length that models and servers accept."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{tool.server}__{tool.name}")
    if len(name) <= _MAX_NAME_CHARS and name not in taken:
        return name
    digest = sha256(f"{tool.server}\0{tool.name}".encode()).hexdigest()[:8]
    name = f"{name[: _MAX_NAME_CHARS - 9]}_{digest}"
    return name if name not in taken else f"{name[:-3]}{len(taken):03}"
