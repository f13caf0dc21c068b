"""Programs of MCP servers end with localgen, also when a signal ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localgen.mcp_tools.server_file import McpServer, add_server

PROGRAM = str(Path(__file__).parent / "mcp_server.py")
# the servers as a command opens them, idle
IDLE = """
import time
from localgen.backends.sampling_params import SamplingParams
from localgen.cli.mcp_options import open_chat_tools
with open_chat_tools(["test"], None, SamplingParams()):
    print("ready", flush=True)
    time.sleep(600)
"""
# the end of stdin and SIGTERM are ignored, and children of the program have its output open
STUBBORN = """
import os, runpy, signal, sys, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    time.sleep(600)
threading.Thread(target=time.sleep, args=(600,)).start()
sys.argv = [{program!r}, "stdio"]
runpy.run_path({program!r}, run_name="__main__")
"""


@pytest.fixture(autouse=True)
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").mkdir(mode=0o700)
    monkeypatch.setenv("LOCALGEN_CONFIG_DIR", str(tmp_path / "config"))


def sessions_of(parent: int) -> list[int]:
    """The sessions that children of a process lead."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            _, _, fields = (path / "stat").read_text().rpartition(") ")
            _, ppid, _, session, *_ = fields.split()
            if (int(ppid), session) == (parent, path.name):
                found.append(int(session))
    return found


def is_running(session: int) -> bool:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            _, _, fields = (path / "stat").read_text().rpartition(") ")
            if fields.split()[3] == str(session) and fields[0] not in "ZX":
                return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_programs_of_idle_servers(number: int) -> None:
    program = STUBBORN.format(program=PROGRAM)
    add_server(McpServer("test", (sys.executable, "-c", program)))
    process = subprocess.Popen([sys.executable, "-c", IDLE], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        (session,) = sessions_of(process.pid)
        process.send_signal(number)
    try:
        assert process.returncode == -number
        assert not is_running(session)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)


def test_a_signal_ends_a_server_that_is_being_started() -> None:
    add_server(McpServer("test", (sys.executable, PROGRAM, "hang")))
    command = [sys.executable, "-m", "localgen", "mcp", "list"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        while not (sessions := sessions_of(process.pid)):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
    try:
        assert process.returncode == -signal.SIGTERM
        assert not is_running(sessions[0])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(sessions[0], signal.SIGKILL)
