"""`localgen top` on a real terminal, with and without a server; and invalid arguments."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from serving import MANY_WORDS, ServerHarness, in_thread, server_harness

from localgen.machine.python_process import python_environment

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?<>=]*[a-zA-Z$]|[()=>].?)")


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(
        self, built: ServerHarness, *arguments: str, size: tuple[int, int] = (40, 120)
    ) -> None:
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "localgen.cli.main", "top", *arguments],
            env=_environment(built),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        os.set_blocking(self._fd, False)
        self.text = ""

    def read(self) -> None:
        try:
            while received := os.read(self._fd, 1 << 16):
                self.text += _ESCAPES.sub("", received.decode(errors="replace"))
        except OSError:  # nothing now, or it has ended
            return

    def until(self, *wanted: str, timeout_s: float = 60.0) -> None:
        """Read until the screen has had these texts, in any order; discards all up to the last."""
        deadline_s = time.monotonic() + timeout_s
        while not all(one in self.text for one in wanted):
            assert time.monotonic() < deadline_s, f"no {wanted!r} in {self.text[-3000:]!r}"
            time.sleep(0.02)
            self.read()
        self.text = self.text[max(self.text.index(one) + len(one) for one in wanted) :]

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def ends_well(self) -> None:
        """Assert that it exits by itself and reports no error."""
        for _ in range(500):
            self.read()
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        self.read()
        assert self.process.poll() == 0, self.text[-5000:]
        assert "Traceback" not in self.text

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)


def _environment(built: ServerHarness) -> dict[str, str]:
    """Without COLUMNS and LINES of the test runner: the terminal's own size counts.

    Python prints a traceback if it crashes itself.
    """
    ours = python_environment() | built.settings.to_environment()
    ours |= {"TERM": "xterm-256color", "PYTHONFAULTHANDLER": "1"}
    return {name: value for name, value in ours.items() if name not in ("COLUMNS", "LINES")}


@contextmanager
def top(built: ServerHarness, *arguments: str) -> Iterator[Terminal]:
    terminal = Terminal(built, *arguments)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.fixture
def built() -> Iterator[ServerHarness]:
    with server_harness() as made:
        yield made


def is_cut_off(built: ServerHarness) -> bool:
    """Whether the server exits during the request."""
    try:
        built.chat(built.model(token_s=0.02), MANY_WORDS)
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return True
    return False


def test_it_waits_for_a_server_and_shows_what_that_does(built: ServerHarness) -> None:
    cuts: list[bool] = []
    with top(built) as screen:
        screen.until("WAITING")
        screen.until("localgen serve starts one")
        assert not built.settings.socket_path.exists(), "it starts none"
        process = built.start()
        screen.until("LIVE")
        asking = in_thread(lambda: cuts.append(is_cut_off(built)))
        screen.until("echo")
        process.send_signal(signal.SIGKILL)
        screen.until("LOST")
        asking.join(10)
        assert cuts == [True]
        screen.press("q")
        screen.ends_well()


@pytest.mark.parametrize("key", ["q", "\x03", "\x11"])
def test_keys_that_quit(built: ServerHarness, key: str) -> None:
    with top(built) as screen:
        screen.until("WAITING")
        screen.press(key)
        screen.ends_well()


def test_server_of_another_version_is_noted(built: ServerHarness) -> None:
    built.start("9.8.7")
    with top(built) as screen:
        # only changed parts of a line are painted
        screen.until("localgen 9.8.7 (this is", "LIVE")


def test_no_color_is_respected(built: ServerHarness) -> None:
    os.environ["NO_COLOR"] = "1"
    try:
        with top(built) as screen:
            screen.until("WAITING")
    finally:
        del os.environ["NO_COLOR"]


def command(built: ServerHarness, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "localgen.cli.main", "top", *arguments],
        env=python_environment() | built.settings.to_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "top needs a terminal"),
        (("--api-key-env", "KEY"), "--api-key-env is for a remote server"),
        (("--url", "ftp://x"), "is not the URL of a server"),
        (("--url", "http://u:p@host/"), "must not contain a user, password"),
        (("--url", "nowhere"), "no endpoint nowhere"),
        (("--url", "http://host:1", "--api-key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY is not set"),
        (("tiny",), "unexpected extra argument"),
    ],
)
def test_invalid_arguments_are_rejected(
    built: ServerHarness, arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    done = command(built, *arguments)
    assert done.returncode != 0
    assert says in done.stderr.lower() or says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
