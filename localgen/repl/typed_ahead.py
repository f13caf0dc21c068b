"""Keys typed while nothing reads them: kept for the next prompt, not shown."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from localgen.repl.answer_key import ANSWER_NOW_CODE, has_answer_key

if TYPE_CHECKING:
    from prompt_toolkit.input import Input


# a pause in typing
SETTLE_S = 0.5


@contextmanager
def hide_typed_ahead() -> Iterator[None]:
    """Stop the terminal from showing the keys that it receives, until the end of the block.

    It would write them, and the line break of Enter, into the text at the cursor. The line editor
    shows what it reads itself. Ctrl+C and ANSWER_NOW_KEY do not discard them, as they do by
    default: discard_typed_ahead() does. Keys that are still unread when the process is suspended or
    the block ends are discarded: a shell would run them.
    ANSWER_NOW_KEY becomes a signal if has_answer_key(), ignored except in on_answer_now().
    Has no effect if standard input is not a terminal.
    """
    stdin = sys.stdin.fileno()
    if not os.isatty(stdin):
        yield
        return
    before = termios.tcgetattr(stdin)
    # a shell sets the terminal's modes again when it resumes a suspended process
    on_resume = signal.signal(signal.SIGCONT, lambda *_: _resume(stdin))
    on_suspend = signal.getsignal(signal.SIGTSTP)
    if on_suspend is signal.SIG_DFL:  # else its parent ignores it
        signal.signal(signal.SIGTSTP, lambda *_: _suspend(stdin))
    on_quit = signal.signal(signal.SIGQUIT, lambda *_: None)
    _set_modes(stdin)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(stdin, termios.TCSAFLUSH, before)
        signal.signal(signal.SIGCONT, on_resume)
        signal.signal(signal.SIGTSTP, on_suspend)
        signal.signal(signal.SIGQUIT, on_quit)


def discard_typed_ahead() -> None:
    """Discard what was typed so far: after Ctrl+C, a line typed before it must not be sent."""
    with suppress(OSError, termios.error):  # no terminal
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)


def take_typed_ahead(source: Input) -> str:
    """Read what was typed so far and not read yet; Enter is a newline, other keys are left out.

    If anything was typed, what follows until SETTLE_S without a key belongs to it.
    source: of the line editor, which may hold keys that came with an earlier line.
    """
    from prompt_toolkit.input.typeahead import get_typeahead

    from localgen.repl.key_text import parse_keys, typed_text

    held = get_typeahead(source)
    return typed_text((*held, *parse_keys(_unread_keys(is_typing=bool(held)))))


def _unread_keys(*, is_typing: bool) -> str:
    stdin = sys.stdin.fileno()
    if not os.isatty(stdin):
        return ""
    before = termios.tcgetattr(stdin)
    by_key = termios.tcgetattr(stdin)
    by_key[tty.LFLAG] &= ~termios.ICANON
    by_key[tty.CC][termios.VMIN] = by_key[tty.CC][termios.VTIME] = 0  # do not wait
    termios.tcsetattr(stdin, termios.TCSANOW, by_key)
    try:
        keys = b"".join(iter(lambda: os.read(stdin, 4096), b""))
        while (keys or is_typing) and select.select([stdin], [], [], SETTLE_S)[0]:
            read = os.read(stdin, 4096)
            if not read:  # the terminal was closed
                break
            keys += read
        return keys.decode(errors="ignore")
    finally:
        termios.tcsetattr(stdin, termios.TCSANOW, before)


def _suspend(terminal: int) -> None:
    with suppress(OSError, termios.error):
        if os.tcgetpgrp(terminal) == os.getpgrp():
            termios.tcflush(terminal, termios.TCIFLUSH)
    # the default action: unlike SIGSTOP it does not stop a process that nobody could resume
    ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, ours)


def _resume(terminal: int) -> None:
    # in the background, changing the terminal would suspend the process again
    with suppress(OSError, termios.error):  # not the terminal of this process, or closed
        if os.tcgetpgrp(terminal) == os.getpgrp():
            _set_modes(terminal)


def _set_modes(terminal: int) -> None:
    modes = termios.tcgetattr(terminal)
    modes[tty.LFLAG] = modes[tty.LFLAG] & ~termios.ECHO | termios.NOFLSH
    if has_answer_key():
        modes[tty.CC][termios.VQUIT] = ANSWER_NOW_CODE
    termios.tcsetattr(terminal, termios.TCSADRAIN, modes)
