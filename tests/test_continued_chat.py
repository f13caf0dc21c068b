"""A chat that goes on after the server was stopped: its tokens are not computed again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from serving import settings_in, short_folder
from terminal_program import run_on_terminal

from localgen.backends.kv_store.inventory import stored_models
from localgen.config import ServerSettings

LONG = " ".join(f"ship {number}" for number in range(300))
LOCALGEN = [sys.executable, "-m", "localgen.cli.main"]


@pytest.fixture
def settings() -> Iterator[ServerSettings]:
    with short_folder() as folder:
        made = settings_in(folder)
        yield made
        stop(made)


def environment(settings: ServerSettings) -> dict[str, str]:
    return os.environ | settings.to_environment() | {"TERM": "xterm", "COLUMNS": "500"}


def stop(settings: ServerSettings) -> str:
    """Stop the server; returns what is said on standard error."""
    command = [*LOCALGEN, "stop"]
    done = subprocess.run(command, env=environment(settings), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def chat(settings: ServerSettings, *arguments: str, typed: str) -> str:
    """What a chat on a terminal shows."""
    command = [*LOCALGEN, "chat", *arguments, "--verbose", "-n", "8"]
    status, shown = run_on_terminal(command, environment(settings), f"{typed}\n/bye\n")
    assert status == 0, shown
    return shown


def test_a_chat_that_goes_on_is_not_computed_again(settings: ServerSettings) -> None:
    """The server is stopped as soon as the chat has ended."""
    shown = chat(settings, "tiny", typed=LONG)
    assert "restored" not in shown
    stop(settings)
    (stored,) = stored_models(settings.kv_dir)
    assert stored.tokens > 600
    shown = chat(settings, "--continue", typed="What is 17 + 25?")
    restored = re.search(r"restored: .*", shown)
    assert restored is not None, shown
    # an idle engine reads the disk into RAM
    counts = re.findall(r"([\d,]+) tokens from (?:RAM|disk)", restored[0])
    assert sum(int(count.replace(",", "")) for count in counts) >= 0.9 * stored.tokens
