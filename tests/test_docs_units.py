"""The units in docs/units start a server that the command line understands."""

from __future__ import annotations

import plistlib
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import typer

from localgen.cli import errors
from localgen.cli.commands import load_command
from localgen.server import serving

UNITS = Path(__file__).parents[1] / "docs" / "units"
SERVICE = UNITS / "localgen.service"
PLIST = UNITS / "org.localgen.server.plist"
STOP_S = serving.DRAIN_TIMEOUT_S + 3 + 2  # answers, engines, and their last words


@pytest.fixture
def service() -> ConfigParser:
    parser = ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(SERVICE.read_text(encoding="utf-8"))
    return parser


@pytest.fixture
def plist() -> dict[str, Any]:
    found: dict[str, Any] = plistlib.loads(PLIST.read_bytes())
    return found


def served(words: list[str]) -> dict[str, Any]:
    """Parameters of a `localgen serve` command line. Raises if it would be rejected."""
    program, name, *arguments = words
    assert program.endswith("/localgen")
    command = load_command(name)
    with command.make_context(name, arguments) as context:
        params: dict[str, Any] = context.params
        return params


def shell_line(plist: dict[str, Any]) -> list[str]:
    shell, flag, script = plist["ProgramArguments"]
    assert (shell, flag) == ("/bin/sh", "-c")
    command, _, log = script.removeprefix("exec ").partition(" 2>> ")
    assert log == '"$HOME/Library/Logs/localgen.log"'
    return shlex.split(command)


def test_wrong_options_are_detected() -> None:
    with pytest.raises(typer.TyperException):
        served(["/bin/localgen", "serve", "--prot", "1"])


def test_service_command_is_valid(service: ConfigParser) -> None:
    found = served(shlex.split(service["Service"]["ExecStart"]))
    assert found["port"] == 8080
    assert found["api_key_file"] == Path("%h/.config/localgen/keys")


def test_agent_command_is_valid(plist: dict[str, Any]) -> None:
    found = served(shell_line(plist))
    assert found["port"] == 8080
    assert found["api_key_file"] == Path("$HOME/.config/localgen/keys")


def test_agent_script_is_valid_shell(plist: dict[str, Any]) -> None:
    script = plist["ProgramArguments"][2]
    subprocess.run(["/bin/sh", "-n", "-c", script], check=True, timeout=10)


def test_a_stop_takes_no_longer_than_allowed(service: ConfigParser, plist: dict[str, Any]) -> None:
    assert STOP_S < int(service["Service"]["TimeoutStopSec"]) <= 60
    assert STOP_S < plist["ExitTimeOut"] <= 60
    # a signal to the engines too would cut answers short
    assert service["Service"]["KillMode"] == "mixed"


def test_restart_is_prevented_for_configuration_errors(service: ConfigParser) -> None:
    wanted = {
        errors.USAGE_ERROR,
        errors.exit_status("bad_setting"),
        errors.exit_status("model_not_found"),
    }
    assert set(map(int, service["Service"]["RestartPreventExitStatus"].split())) == wanted


def test_launch_agent_properties(plist: dict[str, Any]) -> None:
    assert plist["Label"] == PLIST.stem
    assert plist["RunAtLoad"] is True
    assert plist["KeepAlive"] == {"SuccessfulExit": False}
    assert plist["Umask"] == 0o077


def test_systemd_understands_it(tmp_path: Path) -> None:
    verifier = shutil.which("systemd-analyze")
    if verifier is None:
        pytest.skip("there is no systemd-analyze here")
    program = tmp_path / ".local" / "bin" / "localgen"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    done = subprocess.run(
        [verifier, "verify", "--user", str(SERVICE)],
        env={"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")
