"""MCP servers over stdio and streamable HTTP: whole ones, and those that hang, die or flood."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mcp_http_server import scripted_mcp_server

from localgen.config import BadSetting
from localgen.mcp_tools.connections import McpConnections, McpServerFailed
from localgen.mcp_tools.results import ToolResult
from localgen.mcp_tools.server_file import McpServer

PROGRAM = Path(__file__).parent / "mcp_server.py"
_TOO_MANY = "it ended: it sent more than 2,000 messages at once (100 a second are allowed)"
STDIO = McpServer("test", (sys.executable, str(PROGRAM), "stdio"))


def broken(kind: str) -> McpServer:
    return McpServer(kind, (sys.executable, str(PROGRAM), kind))


@pytest.fixture
def connections() -> Iterator[McpConnections]:
    with contextlib.closing(McpConnections()) as made:
        yield made


@pytest.fixture(scope="module")
def http_port() -> Iterator[int]:
    with http_server() as port:
        yield port


@contextlib.contextmanager
def http_server(port: int = 0) -> Iterator[int]:
    """A server of streamable HTTP on loopback; yields its port."""
    with socket.create_server(("127.0.0.1", port)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), "http", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> McpServer:
    if request.param == "stdio":
        return STDIO
    port = request.getfixturevalue("http_port")
    return McpServer("test", url=f"http://127.0.0.1:{port}/mcp")


def called(
    connections: McpConnections, server: McpServer, tool: str, **given: object
) -> ToolResult:
    return connections.call(server, tool, given).result(60)


def test_tools_are_listed_and_called(connections: McpConnections, server: McpServer) -> None:
    tools = {tool.name: tool for tool in connections.start(server).tools}
    assert tools["echo"].description == "Echo the input text"
    assert '"required": ["text"]' in tools["echo"].parameters
    assert called(connections, server, "echo", text="né 漢 🌟") == ToolResult("né 漢 🌟")
    assert called(connections, server, "add", a=17, b=25) == ToolResult("42")
    failed = called(connections, server, "fail")
    assert failed == ToolResult("Error executing tool fail", failed=True)
    assert called(connections, server, "add", a="x").failed
    assert called(connections, server, "no such tool").failed


def test_calls_at_once(connections: McpConnections, server: McpServer) -> None:
    connections.start(server)
    calls = [connections.call(server, "echo", {"text": str(number)}) for number in range(20)]
    assert [call.result(30).text for call in calls] == [str(number) for number in range(20)]


def test_only_the_tools_that_the_file_names(connections: McpConnections) -> None:
    some = replace(STDIO, tools=("a*", "echo"))
    assert {tool.name for tool in connections.start(some).tools} == {"add", "echo"}


def test_a_result_is_not_searched_by_patterns_of_the_server(connections: McpConnections) -> None:
    assert connections.call(STDIO, "shaped", {}).result().text.endswith('aaa!"\n}')


def test_a_call_that_hangs(connections: McpConnections, server: McpServer, tmp_path: Path) -> None:
    quick = replace(server, timeout_s=0.3)
    connections.start(quick)
    assert called(connections, quick, "sleep", seconds=60) == ToolResult(
        "no result within 0.3 s", failed=True
    )


def test_a_cancelled_call_ends_at_once(
    connections: McpConnections, server: McpServer, tmp_path: Path
) -> None:
    connections.start(server)
    begun = tmp_path / "begun"
    call = connections.call(server, "sleep", {"seconds": 2, "begun": str(begun)})
    while not begun.exists():
        time.sleep(0.01)
    assert call.cancel()
    assert call.cancelled()
    assert called(connections, server, "echo", text="next") == ToolResult("next")


def test_a_server_that_never_answers() -> None:
    with (
        contextlib.closing(McpConnections(start_timeout_s=1.0)) as connections,
        pytest.raises(McpServerFailed, match=r"hang .* did not answer within 1 s"),
    ):
        connections.start(broken("hang"))


def test_no_program_is_left() -> None:
    mark = f"mark-{os.getpid()}"
    command = (sys.executable, "-c", f"import sys, time; {mark!r}; time.sleep(600)")
    with (
        contextlib.closing(McpConnections(start_timeout_s=0.5)) as connections,
        pytest.raises(McpServerFailed),
    ):
        connections.start(McpServer("sleeper", command))
    with contextlib.closing(McpConnections()) as connections:
        connections.start(STDIO)
        assert server_pids()
    assert not [each for each in children() if mark in each or "mcp_server.py\0stdio" in each]


def children() -> list[str]:
    """Command lines of the processes that this one started."""
    lines = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"PPid:\t{os.getpid()}\n" in (path / "status").read_text():
                lines.append((path / "cmdline").read_text())
    return lines


def test_a_server_that_dies_at_its_start(connections: McpConnections) -> None:
    # escapes of the server are visible, and have no effect
    why = r"MCP server die .*it ended: \\x1b\[31mcannot open\\x1b\[0m the shop$"
    with pytest.raises(McpServerFailed, match=why):
        connections.start(broken("die"))


def test_a_server_that_dies_is_started_again(connections: McpConnections) -> None:
    connections.start(STDIO)
    died = called(connections, STDIO, "die")
    assert died == ToolResult(r"it ended: \x1b]0;title\x07out of luck", failed=True)
    assert called(connections, STDIO, "echo", text="again") == ToolResult("again")


def test_a_server_that_is_killed_between_calls(connections: McpConnections) -> None:
    connections.start(STDIO)
    (pid,) = server_pids()
    os.kill(pid, signal.SIGKILL)
    for _ in range(100):
        if not server_pids():
            break
        time.sleep(0.02)
    time.sleep(0.1)
    assert called(connections, STDIO, "echo", text="again") == ToolResult("again")


def server_pids() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = f"PPid:\t{os.getpid()}\n" in (path / "status").read_text()
            if is_ours and "mcp_server.py\0stdio" in (path / "cmdline").read_text():
                found.append(int(path.name))
    return found


def test_a_url_whose_server_starts_anew(connections: McpConnections) -> None:
    with http_server() as port:
        server = McpServer("test", url=f"http://127.0.0.1:{port}/mcp")
        connections.start(server)
    assert called(connections, server, "echo", text="gone").failed
    with http_server(port):
        results = [called(connections, server, "echo", text="back") for _ in range(2)]
    assert results[-1] == ToolResult("back")


def test_the_model_does_not_read_the_command_line(
    connections: McpConnections, tmp_path: Path
) -> None:
    program = tmp_path / "server.py"
    program.write_text(PROGRAM.read_text(encoding="utf-8"), encoding="utf-8")
    server = McpServer("test", (sys.executable, "-X", "key=secret", str(program), "stdio"))
    connections.start(server)
    program.write_text("raise SystemExit(1)", encoding="utf-8")
    called(connections, server, "die")
    restarted = called(connections, server, "echo")
    assert restarted.text.startswith("MCP server test: it ended")
    assert "secret" not in restarted.text


def test_a_url_whose_server_is_down_during_a_call(connections: McpConnections) -> None:
    with scripted_mcp_server() as scripted:
        server = McpServer("test", url=scripted.url)
        connections.start(server)
    down = called(connections, server, "echo")
    assert down == ToolResult(
        f"{server.origin}: no connection: All connection attempts failed", failed=True
    )


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (401, "HTTP 401 Unauthorized: check its headers in mcp.toml"),
        (500, "HTTP 500 Internal Server Error"),
        (599, "HTTP 599"),
    ],
)
def test_a_status_is_named(connections: McpConnections, status: int, told: str) -> None:
    with scripted_mcp_server() as scripted:
        server = McpServer("test", url=scripted.url)
        connections.start(server)
        scripted.replies = [(status, None)]
        assert called(connections, server, "echo") == ToolResult(
            f"{server.origin}: {told}", failed=True
        )
        scripted.start_status = status
        with pytest.raises(McpServerFailed) as refused:
            connections.start(replace(server, timeout_s=5))
        assert refused.value.message == f"MCP server test ({scripted.url}): {told}"


def text_reply(text: str) -> tuple[int, dict[str, object]]:
    return 200, {"result": {"content": [{"type": "text", "text": text}]}}


@pytest.mark.parametrize(
    "reply",
    [
        (200, {"error": {"code": -32000, "message": "Session budget exceeded"}}),
        (500, {"error": {"code": -32603, "message": "Session store is down"}}),
        (200, {"result": {"content": "not a list"}}),
        (400, {"error": {"code": -32602, "message": "Invalid arguments"}}),
    ],
    ids=str,
)
def test_an_error_of_a_call_does_not_restart_the_server(
    connections: McpConnections, reply: tuple[int, dict[str, object]]
) -> None:
    with scripted_mcp_server() as scripted:
        server = McpServer("test", url=scripted.url)
        connections.start(server)
        scripted.replies = [reply, text_reply("as before")]
        assert called(connections, server, "echo").failed
        assert called(connections, server, "echo") == ToolResult("as before")
        assert scripted.num_sessions == 1


def test_a_session_that_the_server_has_forgotten_is_begun_again(
    connections: McpConnections,
) -> None:
    with scripted_mcp_server() as scripted:
        server = McpServer("test", url=scripted.url)
        connections.start(server)
        gone: dict[str, object] = {"error": {"code": -32001, "message": "nobody is here"}}
        scripted.replies = [(404, gone), text_reply("anew")]
        assert called(connections, server, "echo").failed
        assert called(connections, server, "echo") == ToolResult("anew")
        assert scripted.num_sessions == 2


def test_two_definitions_of_a_name_lead_to_one_server(
    connections: McpConnections, tmp_path: Path
) -> None:
    edited = replace(STDIO, timeout_s=30.0)
    connections.start(STDIO)
    begun = tmp_path / "begun"
    running = connections.call(STDIO, "sleep", {"seconds": 60, "begun": str(begun)})
    while not begun.exists():
        time.sleep(0.01)
    connections.start(edited)
    told = "mcp.toml defines test otherwise now: /mcp test offers what it has"
    assert running.result(30) == ToolResult(f"it ended: {told}", failed=True)
    pids = server_pids()
    for _ in range(2):
        assert called(connections, edited, "echo", text="new") == ToolResult("new")
        assert called(connections, STDIO, "echo", text="old") == ToolResult(told, failed=True)
    assert server_pids() == pids
    assert len(pids) == 1


def test_a_start_can_be_cancelled(connections: McpConnections) -> None:
    starting = connections.begin_start(broken("hang"))
    while not any("mcp_server.py\0hang" in each for each in children()):
        time.sleep(0.01)
    assert starting.cancel()
    connections.close()
    assert not any("mcp_server.py\0hang" in each for each in children())


def test_a_url_without_a_server(connections: McpConnections) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(McpServerFailed, match=r"test \(http://127.0.0.1:\d+/mcp\): "):
        connections.start(McpServer("test", url=f"http://user:pw@127.0.0.1:{port}/mcp?key=secret"))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("line", "it ended: it sent a message above 8 MB"),
        (
            "messages",
            _TOO_MANY,
        ),
        ("log", _TOO_MANY),
    ],
)
def test_a_server_that_floods(connections: McpConnections, kind: str, why: str) -> None:
    connections.start(STDIO)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert called(connections, STDIO, "flood", kind=kind) == ToolResult(why, failed=True)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    assert grown_kb < 100_000
    assert called(connections, STDIO, "echo", text="again") == ToolResult("again")


def test_stderr_is_read_and_dropped(
    connections: McpConnections, capfd: pytest.CaptureFixture[str]
) -> None:
    connections.start(STDIO)
    assert called(connections, STDIO, "flood", kind="stderr") == ToolResult("flooded")
    assert capfd.readouterr() == ("", "")


def test_a_response_that_floods(
    connections: McpConnections, http_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localgen.mcp_tools import http_client

    monkeypatch.setattr(http_client, "MAX_RESPONSE_BYTES", 1 << 20)
    server = McpServer("test", url=f"http://127.0.0.1:{http_port}/mcp")
    connections.start(server)
    assert called(connections, server, "repeat", text="x" * 1000, times=2000).failed
    assert called(connections, server, "echo", text="again") == ToolResult("again")


def test_a_program_gets_no_secrets_and_not_the_current_folder(
    connections: McpConnections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("GIVEN", "wanted")
    monkeypatch.chdir(tmp_path)
    server = replace(STDIO, env={"TOKEN": "it is ${GIVEN}"})
    folder, *variables = called(connections, server, "environment").text.splitlines()
    assert folder == os.path.realpath(Path.home())
    assert "TOKEN=it is wanted" in variables
    assert not [each for each in variables if each.startswith(("HF_", "GIVEN"))]


def test_a_variable_that_is_not_set(
    connections: McpConnections, http_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MISSING", raising=False)
    for server in (
        replace(STDIO, env={"TOKEN": "${MISSING}"}),
        McpServer("test", url=f"http://127.0.0.1:{http_port}/mcp", headers={"X": "${MISSING}"}),
    ):
        with pytest.raises(BadSetting, match="MCP server test needs MISSING, which is not set"):
            connections.start(server)


def test_programs_of_the_current_folder_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "trap"
    trap.write_text("#!/bin/sh\ntouch sprung\n")
    trap.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for path in (f".{os.pathsep}/usr/bin", f"{os.pathsep}/usr/bin", "."):
        monkeypatch.setenv("PATH", path)
        with pytest.raises(BadSetting, match="the program trap was not found"):
            McpServer("test", ("trap",)).program()
