"""Makes docs/chat.svg from a real chat: `python docs/screenshot.py`. Needs tmux."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 24
QUESTIONS = (
    "What is a KV cache?",
    "What is 17 + 25?",
    "Tell me a story.",
)
ANSWER_S = 20.0


def tmux(*arguments: str) -> str:
    """Run a tmux command on a server of our own."""
    command = ["tmux", "-L", "localgen-screenshot", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def wait_for_prompt(prompts: int) -> None:
    """Wait until that many lines begin with the prompt: the answer before the last has ended."""
    deadline_s = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline_s:
        lines = tmux("capture-pane", "-p", "-t", "chat").splitlines()
        if sum(line.startswith(">>>") for line in lines) >= prompts:
            return
        time.sleep(0.1)
    raise TimeoutError(f"no answer within {ANSWER_S:.0f} s")


def record(runtime_dir: str) -> str:
    """The screen after a chat, with its colours as ANSI escapes."""
    localgen = Path(sys.executable).with_name("localgen")
    tmux(
        *("new-session", "-d", "-s", "chat", "-x", str(COLUMNS), "-y", str(ROWS)),
        *("-e", f"XDG_RUNTIME_DIR={runtime_dir}", "-e", "COLORTERM=truecolor"),
        f"{localgen} chat",
    )
    for count, question in enumerate(QUESTIONS, start=1):
        wait_for_prompt(count)
        tmux("send-keys", "-t", "chat", question, "Enter")
    wait_for_prompt(len(QUESTIONS) + 1)
    screen = tmux("capture-pane", "-p", "-e", "-t", "chat")
    tmux("send-keys", "-t", "chat", "C-d")
    return screen.rstrip()


def main() -> None:
    """Chat, then draw."""
    runtime_dir = tempfile.mkdtemp()
    try:
        screen = record(runtime_dir)
    finally:
        subprocess.run(["tmux", "-L", "localgen-screenshot", "kill-server"], check=False)
        shutil.rmtree(runtime_dir, ignore_errors=True)
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(screen))
    target = Path(__file__).with_name("chat.svg")
    console.save_svg(str(target), title="localgen chat")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
