"""The commands in the documentation exist, and those that the built-in model can answer run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from serving import settings_in, short_folder

from localgen.cli.main import app
from localgen.machine.python_process import python_environment

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# a page of usage lines, and one with drawings
NOT_SHELL = {"cli.md", "architecture.md"}
SHELL_LINE = re.compile(r"^    (?:\$ )?(.*\blocalgen .*)$", re.MULTILINE)
RUNNABLE = {"run", "embed", "ps", "stop", "list"}


def shell_lines() -> list[tuple[str, str]]:
    """Page and line of each command. Lines with [OPTIONAL] parts are usage, not commands."""
    return [
        (page.name, line)
        for page in PAGES
        if page.name not in NOT_SHELL
        for line in SHELL_LINE.findall(page.read_text(encoding="utf-8"))
        if not re.search(r"\[[A-Z-]", line)
    ]


def command_words(line: str) -> list[str]:
    """The arguments of `localgen` in a shell line; none if something else runs it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word == "|":
            words = []
        elif word in ("<", ">"):
            break
        else:
            words.append(word)
    return words[1:] if words[:1] == ["localgen"] else []


def parse(words: list[str]) -> None:
    """Parse a command line without running it. Raises TyperException if that fails."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("localgen", list(words))
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = command.make_context(name, rest, parent=context)


COMMANDS = [(page, line) for page, line in shell_lines() if command_words(line)]


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_and_options_exist(page: str, line: str) -> None:
    parse(command_words(line))


@pytest.mark.parametrize("line", ["localgen rum tiny", "localgen run tiny --tmep 1"])
def test_unknown_commands_and_options_are_detected(line: str) -> None:
    with pytest.raises(typer.TyperException):
        parse(command_words(line))


def can_run(line: str) -> bool:
    words = command_words(line)
    return words[0] in RUNNABLE and not {"--url", "--mcp"} & set(words)


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """A server of its own, the built-in model as the default, short answers."""
    with short_folder() as folder:
        settings = settings_in(folder).to_environment()
        chosen = {"LOCALGEN_MODEL": "tiny", "LOCALGEN_MAX_TOKENS": "40"}
        made = python_environment() | settings | chosen
        yield made
        run_line("localgen stop", made, folder)


def run_line(
    line: str, environment: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    program = f'localgen() {{ {shlex.quote(sys.executable)} -m localgen.cli.main "$@"; }}\n'
    return subprocess.run(
        ["sh", "-c", program + line], env=environment, cwd=folder, capture_output=True, text=True
    )


BATCH_LINE = """{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body":
 {"model": "tiny", "prompt": "a", "max_tokens": 2}}""".replace("\n", "")


@pytest.mark.parametrize("line", [line for _, line in COMMANDS if can_run(line)])
def test_commands_for_the_built_in_model_run(
    line: str, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("The sun is a star.\n")
    (tmp_path / "in.jsonl").write_text(BATCH_LINE)
    (tmp_path / "sentences.txt").write_text("The sun is a star.\nSo is Sirius.\n")
    if "stop tiny" in line:
        run_line("localgen run tiny hi", environment, tmp_path)
    done = run_line(line, environment, tmp_path)
    assert done.returncode == 0, done.stderr
    if "-j" in command_words(line):
        answer = json.loads(done.stdout)
        schema = json.loads(command_words(line)[-1])
        assert schema["required"]
        assert set(schema["required"]) <= answer.keys()


def test_runnable_examples_are_detected() -> None:
    lines = [line for _, line in COMMANDS if can_run(line)]
    assert {command_words(line)[0] for line in lines} >= {"run", "embed", "ps", "stop"}
    assert any("-j" in command_words(line) for line in lines)
