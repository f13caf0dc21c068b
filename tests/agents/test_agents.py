"""Real coding agents, started by `localgen launch`, work through a whole turn with a tool.

The server is real, and its engine plays a script: a model that calls tools well is too large for
tests. The agents are installed by `make test-agents`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from serving import ServerHarness, server_harness

from localgen.machine.python_process import python_environment

AGENTS = Path(sys.prefix) / "agents"
INSTALLED = (AGENTS / "node_modules/.bin", AGENTS / "aider/bin")
COMMAND = "printf made > made.txt"
SAID = "The file is there now."
PROMPT = "Make a file made.txt"
TIMEOUT_S = 300


@dataclass(frozen=True)
class Trial:
    """arguments: for one turn without questions. calls: of the tool that runs a command, by the
    names that it has had, with its arguments. answer: of the model, without or after a call."""

    arguments: tuple[str, ...]
    calls: dict[str, dict[str, Any]]
    answer: str = SAID


TRIALS = {
    "codex": Trial(
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT),
        {
            "exec_command": {"cmd": COMMAND},
            "shell_command": {"command": COMMAND},
            "shell": {"command": ["sh", "-c", COMMAND]},
        },
    ),
    "opencode": Trial(
        ("run", PROMPT), {"bash": {"command": COMMAND, "description": "Makes the file"}}
    ),
    # it calls no tools: files are written as the answer has them
    "aider": Trial(
        ("--message", PROMPT, "--yes-always", "--no-git", "--edit-format", "whole", "made.txt"),
        {},
        f"{SAID}\n\nmade.txt\n```\nmade\n```\n",
    ),
}


@pytest.fixture(scope="module")
def served() -> Iterator[ServerHarness]:
    with server_harness() as built:
        built.start()
        yield built


@pytest.mark.agents
@pytest.mark.parametrize("agent", TRIALS)
def test_an_agent_runs_a_command_and_answers(
    served: ServerHarness, agent: str, tmp_path: Path
) -> None:
    if not any((folder / agent).exists() for folder in INSTALLED):
        pytest.skip(f"{agent} is not installed: make test-agents")
    trial = TRIALS[agent]
    model = served.named(f"model-for-{agent}", calls=trial.calls, answer=trial.answer)
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    environment = {
        "PATH": os.pathsep.join((*map(str, INSTALLED), os.environ["PATH"])),
        "HOME": str(home),
        "PWD": str(work),  # opencode works there
        **{f"XDG_{kind}_HOME": str(home / kind) for kind in ("CONFIG", "DATA", "STATE", "CACHE")},
    }
    command = [sys.executable, "-m", "localgen.cli.main", "launch", agent, "-m", model, "--"]
    done = subprocess.run(
        [*command, *trial.arguments],
        env=python_environment() | served.settings.to_environment() | environment,
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "made.txt").read_text().strip() == "made", done.stdout + done.stderr
    assert SAID in done.stdout
