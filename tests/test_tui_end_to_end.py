"""Real programs in real terminals: two sessions that answer at once, with `top` beside them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from serving import short_folder
from slow_processes import slowed

from localgen.backends.errors import LocalgenError
from localgen.client import LocalClient
from localgen.config import ServerSettings

ROOT = Path(__file__).parents[1]
# tokens/s in the list of sessions
ANSWERING = re.compile(r"^│[▌ ][^│]* [\d,]+ *│", re.MULTILINE)
pytestmark = pytest.mark.skipif(
    shutil.which("tmux") is None, reason="needs tmux, which is not installed"
)


class Terminals:
    """Panes of a private tmux server."""

    def __init__(self, folder: Path) -> None:
        self._socket = str(folder / "tmux")
        self.client = LocalClient(
            ServerSettings(runtime_dir=folder / "run", state_dir=folder / "state")
        )
        self._environment = os.environ | {
            "LOCALGEN_STATE_DIR": str(folder / "state"),
            "LOCALGEN_RUNTIME_DIR": str(folder / "run"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]]),
            "TERM": "xterm-256color",
        }

    def run(self, name: str, *arguments: str, size: str = "120x40") -> None:
        """Run localgen in a terminal of this size."""
        columns, _, rows = size.partition("x")
        command = [sys.executable, "-m", "localgen.cli.main", *arguments]
        where = ["new-session", "-d", "-s", name, "-x", columns, "-y", rows]
        keep = [";", "set-option", "-t", name, "remain-on-exit", "on"]  # its last screen
        self._tmux(*where, shlex.join(command), *keep)

    def press(self, name: str, *keys: str) -> None:
        self._tmux("send-keys", "-t", name, *keys)

    def screen(self, name: str) -> str:
        return self._tmux("capture-pane", "-p", "-t", name)

    def until(self, name: str, shown: Callable[[str], object], timeout_s: float = 120.0) -> str:
        """Wait until a screen matches; returns the screen."""
        deadline = time.monotonic() + timeout_s
        while not shown(screen := self.screen(name)):
            assert self.is_open(name), screen
            assert time.monotonic() < deadline, screen
            time.sleep(0.05)
        return screen

    def is_open(self, name: str) -> bool:
        return self._tmux("display-message", "-p", "-t", name, "#{pane_dead}").strip() == "0"

    def close(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True)

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout


@pytest.fixture
def terminals() -> Iterator[Terminals]:
    with short_folder() as folder:
        made = Terminals(folder)
        yield made
        made.close()
        made.client.shutdown()


def engine_pids(client: LocalClient) -> list[int]:
    with suppress(LocalgenError):
        return [model.pid for model in client.running_models()]
    return []


def test_two_sessions_at_once_while_top_watches(terminals: Terminals) -> None:
    # with drafts an answer might end before it is seen
    terminals.run("chats", "tui", "--ignore-eos", "--max-tokens", "1500", "--draft", "none")
    terminals.run("top", "top")
    terminals.until("chats", lambda screen: "Ask something" in screen)
    with slowed(lambda: engine_pids(terminals.client)):
        terminals.press("chats", "Tell me a story", "Enter")
        terminals.until("chats", ANSWERING.search)
        terminals.press("chats", "C-n")
        terminals.until("chats", lambda screen: "What shall we talk about" in screen)
        terminals.press("chats", "Tell me another", "Enter")
        both = terminals.until("chats", lambda screen: len(ANSWERING.findall(screen)) == 2)
        assert len(re.findall(r"│.Tell me", both)) == 2
        terminals.until("top", lambda screen: len(re.findall("tiny .*decod", screen)) == 2)
        terminals.press("chats", "C-c")
        terminals.until("chats", lambda screen: "stopped" in screen)
        terminals.press("chats", "C-q")
        terminals.until("chats", lambda screen: "still being written" in screen)
        terminals.press("chats", "y")
    deadline = time.monotonic() + 30
    while terminals.is_open("chats"):
        assert time.monotonic() < deadline, terminals.screen("chats")
        time.sleep(0.1)
    terminals.run("again", "tui")
    terminals.until("again", lambda screen: "Tell me another" in screen)
    terminals.until("again", lambda screen: re.search(r"│.Tell me a s", screen))


def test_server_killed_during_an_answer_is_replaced(terminals: Terminals) -> None:
    terminals.run("chats", "tui", "--ignore-eos", "--max-tokens", "1500")
    terminals.until("chats", lambda screen: "Ask something" in screen)
    with slowed(lambda: engine_pids(terminals.client)):
        terminals.press("chats", "Tell me a story", "Enter")
        terminals.until("chats", ANSWERING.search)
        health = terminals.client.health()
        assert health is not None
        os.kill(health.pid, signal.SIGKILL)
    terminals.until("chats", lambda screen: "Ctrl+R asks again" in screen)
    lost = terminals.until("chats", lambda screen: "interrupted" in screen)
    assert "Traceback" not in lost
    terminals.until("chats", lambda screen: "LOST" in screen.split("\n")[0])
    terminals.press("chats", "and you?")
    terminals.until("chats", lambda screen: "and you?" in screen)  # it can be typed in
    with slowed(lambda: engine_pids(terminals.client)):
        terminals.press("chats", "C-r")
        again = terminals.until("chats", ANSWERING.search)
        assert "and you?" in again
    terminals.until("chats", lambda screen: "LIVE" in screen.split("\n")[0])
    # the old answer is removed once the new one is complete
    terminals.until("chats", lambda screen: "interrupted" not in screen)
