"""A line of the shell (`!make test`), whose output goes into the prompt."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from rich.text import Text

from localgen.backends.errors import InvalidRequest
from localgen.backends.terminal_text import escape_control_chars
from localgen.chat.commands import is_command
from localgen.chat.fences import fenced

MAX_OUTPUT_BYTES = 100_000
_CHUNK_BYTES = 65_536


def is_shell_line(line: str) -> bool:
    """Return True for `!command` of one line. A leading space sends it as a prompt."""
    return line.startswith("!") and "\n" not in line.rstrip("\n")


def is_prompt(line: str) -> bool:
    """Return True for text that is sent to the model: no command, and no line of the shell."""
    return not is_shell_line(line) and not is_command(line)


class ShellCommand:
    """A command of the user's shell, without a terminal. run() may be awaited once."""

    def __init__(self, command: str) -> None:
        self.command = command
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopped = False

    async def run(self) -> str:
        """Return the command and its output as a code block, for a prompt.

        Of an output above MAX_OUTPUT_BYTES the end is kept. Raises InvalidRequest if the shell
        cannot be run.
        """
        shell = os.environ.get("SHELL") or "/bin/sh"
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(shell, "-c", self.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # it must not read keys, and is stopped with its children
            )
        except OSError as error:
            raise InvalidRequest(f"cannot run {shell}: {error.strerror}") from error
        except ValueError as error:
            raise InvalidRequest(f"cannot run this line: {error}") from error
        try:
            output, num_dropped = await _read_end(process)
            status = await process.wait()
        except BaseException:  # the app quits
            self.stop()
            raise
        shown = output.decode(errors="replace").replace("\r\n", "\n")
        text = escape_control_chars(Text.from_ansi(shown).plain)
        lines = [f"$ {self.command}"]
        lines += [f"[{num_dropped:,} bytes before this left out]"] if num_dropped else []
        lines += [text.rstrip("\n")] if text.strip() else []
        lines += ["[stopped]"] if self._is_stopped else []
        lines += [f"[exit status {status}]"] if status and not self._is_stopped else []
        return fenced("\n".join(lines), "console")

    def stop(self) -> None:
        """Kill the command and its children, whose output is still read."""
        if self._process is not None:
            self._is_stopped = True
            # the shell may have ended before a child in the background
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


async def _read_end(process: asyncio.subprocess.Process) -> tuple[bytes, int]:
    """The end of the output, and how many bytes before it are left out."""
    assert process.stdout is not None
    output, num_read = b"", 0
    while chunk := await process.stdout.read(_CHUNK_BYTES):
        num_read += len(chunk)
        output = (output + chunk)[-MAX_OUTPUT_BYTES:]
    return output, num_read - len(output)
