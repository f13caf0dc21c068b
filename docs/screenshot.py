"""Generates docs/chat.svg, tui.svg, top.svg and quantize.svg from the real programs:
`python docs/screenshot.py [NAME…]`. Needs tmux, and the quant extra for quantize.svg."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

LOCALGEN = f"{sys.executable} -m localgen.cli.main"
QUESTIONS = (
    "Why is the sky blue? One sentence.",
    "What is the capital of France?",
    "Write two lines about the sea.",
)
CODE = "Write a Python function for the Fibonacci numbers, with an example."
LONG = "Tell me a very long story about a fox, a bear and the sea."
WAIT_S, RUN_S, STOP_S = 30.0, 600.0, 5.0


def tmux(*arguments: str) -> str:
    """Run a tmux command on a server of our own."""
    command = ["tmux", "-L", "localgen-screenshot", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True, slots=True)
class Screen:
    """A tmux session in which a command runs."""

    name: str
    columns: int
    rows: int

    @property
    def session(self) -> str:
        """Name of the tmux session."""
        # tmux reads a bare `top` as a position on the screen
        return f"screen-{self.name}"

    def run(self, folder: str, *arguments: str) -> None:
        """Start localgen. folder: its state, runtime and working folder."""
        places = [f"{name}={folder}" for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME")]
        places.append(f"PYTHONPATH={Path(__file__).parents[1]}")
        environment = [word for place in places for word in ("-e", place)]
        tmux(
            *("new-session", "-d", "-s", self.session),
            *("-x", str(self.columns), "-y", str(self.rows)),
            *(*environment, "-e", "COLORTERM=truecolor", "-c", folder),
            " ".join([LOCALGEN, *arguments]),
        )

    def type(self, *keys: str) -> None:
        tmux("send-keys", "-t", self.session, *keys)

    def shows(self, condition: Callable[[str], bool], *, wait_s: float = WAIT_S) -> None:
        """Wait until the text on the screen meets the condition. Raises TimeoutError."""
        deadline_s = time.monotonic() + wait_s
        while not condition(tmux("capture-pane", "-p", "-t", self.session)):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.name} does not show what it should")
            time.sleep(0.1)

    def draw(self) -> None:
        """Write the screen as SVG, with colours."""
        screen = tmux("capture-pane", "-p", "-e", "-t", self.session).rstrip()
        with open("/dev/null", "w") as nowhere:
            console = Console(record=True, width=self.columns, file=nowhere, force_terminal=True)
            console.print(Text.from_ansi(screen))
        target = Path(__file__).with_name(f"{self.name}.svg")
        console.save_svg(str(target), title=f"localgen {self.name}")
        print(f"wrote {target}")


def chat(folder: str) -> None:
    """Three questions, one after the other."""
    screen = Screen("chat", 100, 24)

    def asks(count: int) -> Callable[[str], bool]:
        return lambda text: sum(line.startswith(">>>") for line in text.splitlines()) >= count

    screen.run(folder, "chat", "-n", "200")
    for count, question in enumerate(QUESTIONS, start=1):
        screen.shows(asks(count))
        screen.type(question, "Enter")
    screen.shows(asks(len(QUESTIONS) + 1))
    screen.draw()


def tui(folder: str) -> None:
    """Two sessions, the second while it answers."""
    screen = Screen("tui", 140, 38)
    screen.run(folder, "tui")
    screen.shows(lambda text: "at most" in text or "to download" in text)
    screen.type(LONG, "Enter")
    time.sleep(8)
    screen.type("C-n")
    time.sleep(1)
    screen.type(CODE, "Enter")
    time.sleep(8)
    screen.draw()


def top(folder: str) -> None:
    """Requests that overlap."""
    screen = Screen("top", 120, 36)
    planned = Screen("plan", 80, 24)
    planned.run(folder, "plan", "smollm2")
    time.sleep(5)
    screen.run(folder, "top")
    for batch in range(5):
        for number in range(3):
            tokens = 20 + 30 * number if batch < 4 else 400
            asking = Screen(f"{batch}-{number}", 80, 24)
            asking.run(folder, "run", "smollm2", f"'{LONG}'", "--ignore-eos", "-n", str(tokens))
        time.sleep(4)
    screen.draw()


def quantize(folder: str) -> None:
    """Quantize the built-in model and wait for the verdict."""
    screen = Screen("quantize", 120, 36)
    screen.run(folder, "tui")
    screen.shows(lambda text: "Ask something" in text)
    screen.type("F10")
    screen.shows(lambda text: "suits this machine" in text)
    screen.type("C-r")
    screen.shows(lambda text: "KL" in text, wait_s=RUN_S)
    screen.draw()


SCENES = {"chat": chat, "tui": tui, "top": top, "quantize": quantize}


def main() -> None:
    """Run the scenes and write the SVG files."""
    for name in sys.argv[1:] or SCENES:
        folder = tempfile.mkdtemp()
        try:
            SCENES[name](folder)
        finally:
            # the server outlives the terminals
            Screen("end", 80, 24).run(folder, "stop")
            time.sleep(STOP_S)
            subprocess.run(["tmux", "-L", "localgen-screenshot", "kill-server"], check=False)
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
