"""mcp.toml and `localgen mcp`: what is accepted, who may have written it, where it is."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest
from command_line import own_folders
from rich.console import Console
from scripted_client import ScriptedClient

from localgen.backends.errors import InvalidRequest
from localgen.chat import commands
from localgen.chat.parameters import ModelOptions
from localgen.chat.session import ChatSession
from localgen.cli import errors
from localgen.cli.main import run_command_line
from localgen.config import BadSetting
from localgen.mcp_tools.chat_tools import ChatTools
from localgen.mcp_tools.connections import McpConnections
from localgen.mcp_tools.server_file import (
    McpServer,
    add_server,
    find_server,
    read_servers,
    servers_path,
)

__all__ = ["own_folders"]
PROGRAM = str(Path(__file__).parent / "mcp_server.py")
INVALID = errors.EXIT_STATUS_BY_CODE["invalid_request"]
BAD_SETTING = errors.EXIT_STATUS_BY_CODE["bad_setting"]


@pytest.fixture(autouse=True)
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").mkdir(mode=0o700)
    monkeypatch.setenv("LOCALGEN_CONFIG_DIR", str(tmp_path / "config"))


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Status and message of a command that fails."""
    capsys.readouterr()
    status = run_command_line(list(arguments))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("localgen: ")
    assert err.count("\n") == 1
    return status, err.removeprefix("localgen: ").strip()


def test_servers_are_added_listed_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    stdio = ["--env", "A=b=c", "--tool", "a*", "--", sys.executable, PROGRAM, "stdio"]
    assert run_command_line(["mcp", "add", "here", *stdio]) == 0
    away = ["--url", "http://host/mcp", "--header", "Authorization: Bearer ${KEY}"]
    assert run_command_line(["mcp", "add", "there", *away, "--timeout", "5"]) == 0
    told = "the headers of there are sent without encryption: use an https URL\n"
    assert capsys.readouterr().err == told
    assert read_servers() == {
        "here": McpServer(
            "here", (sys.executable, PROGRAM, "stdio"), env={"A": "b=c"}, tools=("a*",)
        ),
        "there": McpServer(
            "there",
            url="http://host/mcp",
            headers={"Authorization": "Bearer ${KEY}"},
            timeout_s=5.0,
        ),
    }
    assert servers_path().stat().st_mode & 0o777 == 0o600
    assert failure(capsys, "mcp", "add", "here", "--url", "http://x")[0] == INVALID
    assert run_command_line(["mcp", "rm", "there"]) == 0
    assert list(read_servers()) == ["here"]
    assert failure(capsys, "mcp", "rm", "there") == (
        INVALID,
        "no MCP server there: servers are here (localgen mcp add)",
    )


def test_list_says_which_tools_there_are_and_what_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    add_server(McpServer("good", (sys.executable, PROGRAM, "stdio"), tools=("e*", "add")))
    add_server(McpServer("bad", (sys.executable, PROGRAM, "die")))
    assert run_command_line(["mcp", "list"]) == 1
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows] == [
        ["good", "echo"],
        ["good", "add"],
        ["good", "environment"],
        ["bad", "-"],
    ]
    assert r"\x1b[31mcannot open" in rows[-1]
    assert run_command_line(["mcp", "list", "good"]) == 0
    capsys.readouterr()
    assert run_command_line(["mcp", "list", "bad", "--json"]) == 1
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["tools"]) == ("bad", [])
    assert "cannot open" in listed["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a b", "--", "ls"], "invalid name 'a b'"),
        (["x" * 33, "--", "ls"], "up to 32 letters"),
        (["x"], "either a command or a url"),
        (["x", "--url", "http://h", "--", "ls"], "either a command or a url"),
        (["x", "--url", "ftp://h"], "give the URL of a server"),
        (["x", "--url", "http://[::1"], "give the URL of a server"),
        (["x", "--", "./server"], "./server depends on the current folder: give a whole path"),
        (["x", "--", "no-such-program"], "the program no-such-program was not found"),
        (["x", "--cwd", "here", "--", "ls"], "cwd: here is not a whole path"),
        (["x", "--env", "SECRET", "--", "ls"], "--env: give NAME=VALUE"),
        (["x", "--header", "A: b", "--", "ls"], "headers are only for a url"),
        (["x", "--url", "http://h", "--env", "A=b"], "env is only for a command"),
        (["x", "--url", "http://h", "--header", "A b: c"], "'A b' is not a valid header"),
        (["x", "--url", "http://h", "--header", "A: b\nC: d"], "'A' is not a valid header"),
        (["x", "--timeout", "0", "--", "ls"], "timeout is 0: give 1 to 86400 seconds"),
        (["x", "--tool", "", "--", "ls"], "tools: give patterns"),
    ],
)
def test_invalid_servers_are_not_added(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = failure(capsys, "mcp", "add", *arguments)
    assert status in (INVALID, BAD_SETTING)
    assert message in text
    assert "SECRET" not in text
    assert not servers_path().exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("files", "correct it or remove it"),
        ("[files", "correct it or remove it"),
        ("files = 1", "files: Expected object, got int"),
        ("[files]\nurl = 1", "files: url: Expected str, got int"),
        ("[files]\nargs = ['a']", "files: give either a command or a url"),
        ("[files]\ncommand = 'ls'\nargs = 'a'", "files: args: Expected array"),
        ("[files]\ncommand = 'ls'\nalways = true", "unknown field always; fields are command"),
        ("[files]\ncommand = 'bin/ls'", "files: command: bin/ls depends on the current folder"),
        ("['a b']\ncommand = 'ls'", "invalid name 'a b'"),
    ],
)
def test_errors_in_the_file_are_named(content: str, message: str) -> None:
    servers_path().write_text(content)
    with pytest.raises(BadSetting) as refused:
        find_server("a b" if "a b" in content else "files")
    assert str(servers_path()) in refused.value.message
    assert message in refused.value.message
    assert "\n" not in refused.value.message


def test_list_without_servers_says_how_to_add_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["mcp", "list"]) == 0
    told = "no MCP servers: add one with localgen mcp add NAME -- COMMAND\n"
    assert capsys.readouterr() == ("", told)
    assert run_command_line(["mcp", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_list_names_the_server_that_is_being_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add_server(McpServer("slow", (sys.executable, PROGRAM, "stdio")))
    monkeypatch.setattr(
        "localgen.cli.one_shot.stderr_console",
        lambda: Console(stderr=True, force_terminal=True, highlight=False),
    )
    assert run_command_line(["mcp", "list"]) == 0
    assert "starting MCP server slow" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:80"])
def test_headers_for_this_machine_need_no_encryption(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    away = ["--url", f"http://{host}/mcp", "--header", "A: b"]
    assert run_command_line(["mcp", "add", "near", *away]) == 0
    assert capsys.readouterr().err == ""


def test_arguments_are_shown_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["mcp", "add", "x", "--", "ls", "my notes", "$HOME"]) == 0
    assert capsys.readouterr().out == ("x is ls 'my notes' '$HOME': localgen chat --mcp x\n")


def test_an_invalid_table_leaves_the_other_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_server(McpServer("good", (sys.executable, PROGRAM, "stdio"), tools=("add",)))
    with servers_path().open("a") as file:
        file.write("[bad]\nurl = 1\n")
    with closing(McpConnections()) as connections:
        session = ChatSession(ScriptedClient(), tmp_path, ModelOptions(), ChatTools(connections))
        for command in ("/mcp good", "/mcp"):
            shown = commands.run_command(session, command, lambda _: None)
        assert isinstance(shown, commands.CommandOutput)
        assert shown.text == (
            f"good.add: Add two numbers\n{servers_path()}: bad: url: Expected str, got int"
        )
        whole = servers_path().read_text()
        servers_path().write_text("[")
        shown = commands.run_command(session, "/mcp", lambda _: None)
        assert isinstance(shown, commands.CommandOutput)
        assert shown.text.startswith("good.add: Add two numbers\n")
        assert "correct it or remove it" in shown.text
        servers_path().write_text(whole)
    assert run_command_line(["mcp", "list"]) == 1
    _, good, bad = capsys.readouterr().out.splitlines()
    assert good.split()[:2] == ["good", "add"]
    assert "bad: url: Expected str, got int" in bad
    status, text = failure(capsys, "mcp", "add", "bad", "--url", "http://host/mcp")
    assert (status, "its table is invalid" in text) == (INVALID, True)
    assert run_command_line(["mcp", "rm", "bad"]) == 0
    assert capsys.readouterr().out == "bad is no longer an MCP server\n"
    assert list(read_servers()) == ["good"]


def test_a_file_that_others_may_write_is_refused() -> None:
    add_server(McpServer("x", ("ls",)))
    servers_path().chmod(0o620)
    with pytest.raises(BadSetting, match="is writable by other users: chmod 600 it"):
        read_servers()
    servers_path().chmod(0o600)
    servers_path().parent.chmod(0o777)
    with pytest.raises(BadSetting, match=r"other users may write to .*config"):
        read_servers()


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    dotfiles = tmp_path / "dotfiles"
    dotfiles.mkdir(mode=0o755)
    (dotfiles / "mcp.toml").write_text("# mine\n[x]\ncommand = 'ls'\n")
    (tmp_path / "hop.toml").symlink_to(dotfiles / "mcp.toml")
    servers_path().symlink_to("../hop.toml")
    add_server(McpServer("y", ("ls",)))
    assert servers_path().is_symlink()
    assert (dotfiles / "mcp.toml").read_text().startswith("# mine\n[x]")
    assert list(read_servers()) == ["x", "y"]
    assert dotfiles.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in dotfiles.iterdir()] == ["mcp.toml"]
    dotfiles.chmod(0o777)
    with pytest.raises(BadSetting, match=r"other users may write to .*dotfiles, where .*leads"):
        read_servers()
    with pytest.raises(BadSetting, match="other users may write to"):
        add_server(McpServer("z", ("ls",)))
    dotfiles.chmod(0o755)
    (dotfiles / "mcp.toml").chmod(0o666)
    with pytest.raises(BadSetting, match="is writable by other users"):
        read_servers()


def test_a_link_in_a_chain_that_others_may_replace_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "mcp.toml").write_text("[x]\ncommand = 'ls'\n")
    (shared / "hop").symlink_to(tmp_path / "mcp.toml")
    servers_path().symlink_to(shared / "hop")
    assert list(read_servers()) == ["x"]
    shared.chmod(0o777)
    with pytest.raises(BadSetting, match=r"other users may write to .*shared"):
        read_servers()
    servers_path().unlink()
    servers_path().symlink_to(servers_path())
    with pytest.raises(BadSetting, match="too many symbolic links"):
        read_servers()


def test_a_file_in_a_project_is_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    sprung = tmp_path / "sprung"
    trap = project / "trap"
    (project / ".localgen").mkdir(parents=True)
    trap.write_text(f"#!/bin/sh\ntouch {sprung}\n")
    trap.chmod(0o755)
    table = f"[trap]\ncommand = '{trap}'\n"
    for name in ("mcp.toml", ".mcp.toml", ".localgen/mcp.toml", "localgen.toml"):
        (project / name).write_text(table)
    as_json = json.dumps({"mcpServers": {"trap": {"command": str(trap)}}})
    for name in (".mcp.json", "mcp.json", ".localgen/mcp.json"):
        (project / name).write_text(as_json)
    monkeypatch.chdir(project)
    assert read_servers() == {}
    with pytest.raises(InvalidRequest, match="no MCP server trap: none is defined"):
        find_server("trap")
    assert run_command_line(["mcp", "list"]) == 0
    assert failure(capsys, "run", "--mcp", "trap", "tiny", "hi")[0] == INVALID
    assert not sprung.exists()
