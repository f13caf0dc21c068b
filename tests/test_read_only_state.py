"""A state folder that cannot be written: each command says so in a line, and does what it can."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import settings_in, short_folder
from terminal_program import run_on_terminal

from localgen.machine.python_process import python_environment

ROOT = Path(__file__).parents[1]
# for root, who may write to any folder, on a file system that nobody can write
MOUNT = 'mount -t tmpfs -o ro,mode=700 none "$0" && exec "$@"'
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def localgen() -> Iterator[Run]:
    """Runs a command with a terminal, and gives its exit status and what it shows."""
    with short_folder() as folder:
        settings = settings_in(folder)
        settings.create_dirs()
        state = str(settings.state_dir)
        in_mount = ["unshare", "--mount", "sh", "-c", MOUNT, state] if os.getuid() == 0 else []
        if in_mount and subprocess.run([*in_mount, "true"], capture_output=True).returncode:
            pytest.skip("root may not mount a file system here")
        if not in_mount:
            settings.state_dir.chmod(0o500)
        env = python_environment() | settings.to_environment()
        env |= {"TERM": "xterm", "COLUMNS": "500", "PYTHONPATH": str(ROOT)}
        env |= {"LOCALGEN_CONFIG_DIR": state}

        def run(*arguments: str, typed: str = "") -> tuple[int, str]:
            command = [*in_mount, sys.executable, "-m", "localgen.cli.main", *arguments]
            return run_on_terminal(command, env, typed)

        yield run
        run("stop")
        settings.state_dir.chmod(0o700)


def test_list_needs_no_state(localgen: Run) -> None:
    status, shown = localgen("list")
    assert status == 0
    assert "tiny" in shown


def test_cp_says_what_it_cannot_write(localgen: Run) -> None:
    status, shown = localgen("cp", "tiny", "mine")
    assert status == 12
    assert shown.startswith("localgen: cannot write ")
    assert shown.count("\n") == 1


def test_run_answers_and_the_log_is_in_the_other_folder(localgen: Run) -> None:
    status, shown = localgen("run", "tiny", "What is 17 + 25?")
    assert status == 0
    assert shown.endswith("17 + 25 = 42.\r\n")
    status, shown = localgen("logs")
    assert status == 0
    assert "tiny is loaded" in shown


def test_chat_goes_on_without_storing(localgen: Run) -> None:
    status, shown = localgen("chat", "tiny", typed="What is 17 + 25?\nWhat is 1 + 1?\n/bye\n")
    assert status == 0
    assert "42" in shown
    assert shown.count("conversation not stored: cannot write to ") == 1
    assert shown.count("prompts of this chat are not kept") == 1
    assert "Traceback" not in shown


def test_history_without_a_database_is_empty(localgen: Run) -> None:
    none = "no stored conversations: localgen chat starts one\r\n"
    assert localgen("history") == (0, none), "no copy of what there is not"
    assert localgen("history", "--json") == (0, "[]\r\n")
    assert localgen("history", "trip")[0] == 3
