"""What a streamed answer writes to a real terminal."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from benchmarks.tui import Terminal, markdown_tokens, scripted_server

TOKENS, MAX_BYTES_PER_TOKEN = 1_000, 400


# select graphic rendition
SGR = re.compile(rb"\x1b\[([\d;]*)m")
COLOURS = {*range(30, 39), *range(40, 49), *range(90, 98), *range(100, 108)}


def test_no_color_draws_no_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    # it ends in its code, which is on the screen then, even if only the end is drawn
    with scripted_server(markdown_tokens(113), rate=TOKENS) as url:
        terminal = Terminal([sys.executable, "-m", "localgen", "tui", "--url", url], tmp_path)
        written = b""
        try:
            terminal.first_paint_s()
            terminal.write("Ask\r")
            deadline_s = time.monotonic() + 60
            while b"softmax" not in written and time.monotonic() < deadline_s:
                written += terminal.read(0.1)
        finally:
            terminal.close()
    assert b"softmax" in written
    codes = [int(code) for found in SGR.findall(written) for code in found.split(b";") if code]
    assert codes, "bold and reverse are drawn"
    assert not COLOURS & {*codes}


def test_bytes_written_per_token_are_bounded(tmp_path: Path) -> None:
    with scripted_server(markdown_tokens(TOKENS), rate=TOKENS) as url:
        terminal = Terminal([sys.executable, "-m", "localgen", "tui", "--url", url], tmp_path)
        try:
            terminal.first_paint_s()
            terminal.settle(1.0)
            terminal.write("Ask\r")
            written = terminal.watch(4.0).bytes_written
        finally:
            terminal.close()
    assert 10 * TOKENS < written < MAX_BYTES_PER_TOKEN * TOKENS


def test_inline_leaves_what_was_on_the_screen(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "localgen", "tui", "--inline", "--url"]
    with scripted_server(markdown_tokens(10), rate=TOKENS) as url:
        terminal = Terminal([*command, url], tmp_path)
        written = b""
        try:
            deadline_s = time.monotonic() + 60
            # what terminals answer to the question where the cursor is
            terminal.write("\x1b[1;1R")
            pasted = "\x1b[200~AB\x1b[3~C\x1b[201~"
            while b"sk something" not in written and time.monotonic() < deadline_s:
                written += terminal.read(0.1)
            terminal.write(pasted)
            while b"C" not in written.partition(b"sk something")[2].partition(b"AB")[2]:
                assert time.monotonic() < deadline_s
                written += terminal.read(0.1)
        finally:
            terminal.close()
    assert b"\x1b[?1049h" not in written  # the alternate screen


def test_the_mouse_is_left_to_the_terminal(tmp_path: Path) -> None:
    with scripted_server(markdown_tokens(10), rate=TOKENS) as url:
        terminal = Terminal([sys.executable, "-m", "localgen", "tui", "--url", url], tmp_path)
        written, deadline_s = b"", time.monotonic() + 60
        try:
            terminal.first_paint_s()
            for key, report in (("\x1bm", b"\x1b[?1000l"), ("\x1bm", b"\x1b[?1000h")):
                terminal.write(key)
                while report not in written:
                    assert time.monotonic() < deadline_s
                    written += terminal.read(0.1)
        finally:
            terminal.close()
