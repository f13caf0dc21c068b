"""Tools that a server lists and that cannot be offered: each is named, the others are offered."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from command_line import own_folders, scripted
from scripted_client import ScriptedClient, answer

from localgen.chat import commands
from localgen.chat.parameters import ModelOptions
from localgen.chat.session import ChatSession
from localgen.cli.main import run_command_line
from localgen.mcp_tools.chat_tools import ChatTools
from localgen.mcp_tools.connections import McpConnections
from localgen.mcp_tools.server_file import McpServer, add_server

__all__ = ["own_folders", "scripted"]
PROGRAM = str(Path(__file__).parent / "mcp_server.py")
OK = {"name": "ok", "description": "Fine", "inputSchema": {"type": "object"}}


@pytest.fixture(autouse=True)
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").mkdir(mode=0o700)
    monkeypatch.setenv("LOCALGEN_CONFIG_DIR", str(tmp_path / "config"))


def listing(*tools: object, patterns: tuple[str, ...] = ("*",)) -> McpServer:
    command = (sys.executable, PROGRAM, "listing", json.dumps(tools))
    return McpServer("test", command, tools=patterns)


@pytest.mark.parametrize(
    ("server", "names", "warnings"),
    [
        (listing(), [], ["MCP server test has no tools"]),
        (
            listing(OK, patterns=("ok", "typo")),
            ["ok"],
            [
                'MCP server test: "typo" of tools in mcp.toml matches none of its tools: ok',
            ],
        ),
        (
            listing(OK, OK | {"name": "x" * 129}),
            ["ok"],
            [
                f"test.{'x' * 40}… is not offered: its name has 129 characters, 128 are allowed",
            ],
        ),
        (
            listing(OK, OK | {"name": "odd", "inputSchema": {"type": "string"}}),
            ["ok"],
            ["test.odd is not offered: inputSchema.type: Input should be 'object'"],
        ),
        (
            listing({"name": "odd", "inputSchema": {}}, OK),
            ["ok"],
            ["test.odd is not offered: inputSchema.type: Field required"],
        ),
        (
            listing(OK, {"inputSchema": {"type": "object"}}, 3),
            ["ok"],
            [
                "test.tool 2 is not offered: name: Field required",
                "test.tool 3 is not offered: Input should be a valid dictionary or instance of "
                "Tool",
            ],
        ),
        (listing(OK, {"name": "odd", "inputSchema": {}}, patterns=("ok",)), ["ok"], []),
    ],
)
def test_what_is_not_offered_is_named(
    server: McpServer, names: list[str], warnings: list[str]
) -> None:
    with closing(McpConnections()) as connections:
        listed = connections.start(server)
    assert [tool.name for tool in listed.tools] == names
    assert list(listed.warnings) == warnings


def test_commands_say_what_is_not_offered(
    scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    add_server(listing(OK, patterns=("typo\x1b",)))
    told = r'MCP server test: "typo\x1b" of tools in mcp.toml matches none of its tools: ok'
    assert run_command_line(["mcp", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"test     -      warning: {told}"
    assert run_command_line(["mcp", "list", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["tools"], len(record["warnings"])) == ([], 1)
    scripted(("hello", answer()))
    assert run_command_line(["run", "tiny", "hi", "--mcp", "test"]) == 0
    assert told in capsys.readouterr().err.splitlines()


def test_a_long_name_does_not_widen_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    add_server(listing(OK, OK | {"name": "x" * 120}))
    assert run_command_line(["mcp", "list"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[1:] for row in rows] == [["ok", "Fine"], ["x" * 40 + "…", "Fine"]]
    assert run_command_line(["mcp", "list", "--json"]) == 0
    assert "x" * 120 in capsys.readouterr().out


def test_a_server_without_tools_is_in_use(tmp_path: Path) -> None:
    add_server(listing())
    with closing(McpConnections()) as connections:
        session = ChatSession(ScriptedClient(), tmp_path, ModelOptions(), ChatTools(connections))
        for command in ("/mcp test", "/mcp"):
            shown = commands.run_command(session, command, lambda _: None)
            assert isinstance(shown, commands.CommandOutput)
            assert shown.text == (
                "test is in use and offers no tools\nMCP server test has no tools"
            )
