"""Text of a model or user is shown, never interpreted as commands or markup."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_client import answer
from textual.pilot import Pilot
from textual.widgets import OptionList
from tui_chats import PacedClient, Tui, play, press

from localgen.chat.markup import code_blocks
from localgen.client import ModelCard, TextDelta, pullable_models
from localgen.tui.chat.model_picker import ModelPicker
from localgen.tui.chat.rows import row_text
from localgen.tui.chat.transcript import Transcript

SIZE = (120, 60)
HOSTILE = (
    "\x1b]0;owned\x07 \x1b[2J \x9b31m [red]not red[/] [@click=app.quit]x[/] \u202eevil\u202c ok"
)
# bytes that are not UTF-8, as decoders replace or escape them
BROKEN = b"caf\xe9 \xff\xfe \xed\xa0\x80".decode(errors="replace") + "\ud800 \udcff end"
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")
MARKDOWN = """# Title [b]

A *word* in **bold**, `code [x]`
and a second line.

- one
  - two [link](http://example.org)

| a | b |
|---|---|
| 1 | 2 |

```python
def f(x: int) -> int:  # [red]
    return x
```

```nonsense-language
text
```

> quoted <b>html</b> &amp; ![image](x.png)

~~gone~~ end
"""


def test_escapes_and_markup_are_shown(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, HOSTILE)
        shown = tui.screen_text()
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "\x9b" not in shown
        # in the prompt, the answer and the reasoning
        assert shown.count("[red]not red[/]") >= 2
        assert shown.count(r"\x1b]0;owned\x07") >= 2
        await pilot.press("f5")
        await pilot.pause()
        assert r"[b]thought[/b]\x1b" in tui.screen_text()

    play(Tui(tmp_path, (TextDelta("", 1, "[b]thought[/b]\x1b"), HOSTILE, answer())), scene, SIZE)


def test_a_carriage_return_is_shown_unless_it_ends_a_line(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        assert r"half\rdone" in tui.screen_text()
        assert r"ends\r" in tui.screen_text()
        assert r"line\r" not in tui.screen_text()
        assert code_blocks("".join(pieces).replace("\r\n", "\n")) == ["code\n"]
        assert " code\n" in tui.main.query_one(Transcript).text

    pieces = ["half\r", "done\n\nline\r", "\n```py\r\ncode\r", "\n```\r\nends\r"]
    play(Tui(tmp_path, (*pieces, answer())), scene, SIZE)


def test_hostile_names_and_errors(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        shown = tui.screen_text()
        assert r"[red]it[/] \x1b[2J broke" in shown
        await tui.ask(pilot, "/rename [red]name[/]\x1b[2J")
        # a name is stored as escaped text, whose backslash is one of the name
        await tui.until(lambda: r"[red]name[/]\\x1b[2J" in tui.screen_text())
        await tui.ask(pilot, "/switch [red]x[/]\x1b")
        await tui.until(lambda: r"no session [red]x[/]\x1b" in tui.screen_text())

    play(Tui(tmp_path, (ZeroDivisionError("[red]it[/] \x1b[2J broke"),)), scene, SIZE)


def test_text_that_is_no_text_is_shown_and_kept(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, f"{BROKEN}?")
        shown = tui.screen_text()
        shown.encode()  # what a terminal is sent
        # in the session's name, the prompt and the answer
        assert shown.count("caf\ufffd") >= 3
        assert shown.count(r"\ud800 \udcff end") >= 2
        assert tui.opened.save_error == ""
        await pilot.press("f5")
        await pilot.pause()
        tui.screen_text().encode()
        await tui.ask(pilot, "/rename \ud800x")
        await tui.until(lambda: r"\ud800x" in tui.screen_text())

    async def again(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.until(lambda: len(tui.manager.summaries) > 0)
        await press(tui, pilot, "ctrl+down")
        assert "\ufffd \ufffd end" in tui.screen_text()

    script = (TextDelta("", 1, f"{BROKEN} thought"), BROKEN[:9], BROKEN[9:], answer())
    play(Tui(tmp_path, script), scene, SIZE)
    play(Tui(tmp_path), again, SIZE)


def test_names_of_a_hostile_server_are_inert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = ModelCard("\x1b]0;m\x07[red]x", "\x1b[2J", 1, "\x1b[31mloaded", "\x9b1mhere")
    monkeypatch.setattr(PacedClient, "models", lambda self: [card])
    monkeypatch.setattr(pullable_models, "pullable_models", list)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+o")
        await tui.until(lambda: "]0;m" in tui.screen_text())
        assert not CONTROLS.search(tui.screen_text())
        await press(tui, pilot, "escape")
        await tui.until(lambda: tui.app.session_actions.model_names)
        await pilot.press(*"/model ")
        await tui.until(lambda: "]0;m" in tui.screen_text())
        assert not CONTROLS.search(tui.screen_text())
        await pilot.press("tab")
        await pilot.pause()
        assert not CONTROLS.search(tui.screen_text())

    play(Tui(tmp_path), scene, SIZE)


def picker_text(tui: Tui) -> str:
    options = tui.app.screen.query_one(OptionList).options
    return "\n".join(str(option.prompt) for option in options)


def test_a_backslash_in_a_name_is_no_escape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`\\x1b` as four characters differs from ESC: in the lists of models and of sessions."""
    names = "one\x1b", r"one\x1b"
    cards = [ModelCard(name, "", 1, "loaded", f"/{at}") for at, name in enumerate(names)]
    monkeypatch.setattr(PacedClient, "models", lambda self: cards)
    monkeypatch.setattr(pullable_models, "pullable_models", list)

    def assert_both(shown: str) -> None:
        assert re.search(r"(?<!\\)one\\x1b", shown)
        assert r"one\\x1b" in shown

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for name in names:
            tui.manager.context.store.create(replace(tui.opened.to_record(), name=name))
        tui.manager.reload_summaries()
        tui.main.sync()
        await tui.until(lambda: r"one\x1b" in tui.screen_text())
        assert_both(tui.screen_text())
        await press(tui, pilot, "ctrl+o")
        await tui.until(lambda: isinstance(tui.app.screen, ModelPicker))
        await tui.until(lambda: r"one\\x1b" in picker_text(tui))
        assert_both(picker_text(tui))
        await press(tui, pilot, "escape")
        await press(tui, pilot, "ctrl+f")
        await pilot.press(*"one")
        await tui.until(lambda: r"one\\x1b · name" in tui.screen_text())
        assert_both(tui.screen_text())
        assert not CONTROLS.search(tui.screen_text())

    play(Tui(tmp_path), scene, SIZE)


def test_markdown_is_drawn_and_hides_nothing(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        shown = tui.screen_text()
        for whole in (
            "Title [b]",
            "code [x]",
            "link (http://example.org)",
            "def f(x: int) -> int:  # [red]",
            "<b>html</b> &amp; !image (x.png)",
        ):
            assert whole in shown
        assert "**bold**" not in shown
        row = next(row for row in tui.main.query_one(Transcript).rows if "def f" in row_text(row))
        assert len({segment.style and segment.style.color for segment in row}) > 2

    play(Tui(tmp_path, (MARKDOWN, answer())), scene, SIZE)


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_ends_as_the_whole_would(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    text = MARKDOWN + "odd\u2028line\x85breaks\x0b\x1c.\r\nodd\rend\r\n" + MARKDOWN
    pieces: list[object] = []
    at = 0
    while at < len(text):
        size = rng.choice((1, 3, 17, 60))
        pieces.append(text[at : at + size])
        at += size
    gates = [threading.Event() for _ in range(6)]
    for number, gate in enumerate(gates):
        pieces.insert(len(pieces) * number // 6, gate)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "q")
        await pilot.press("enter")
        for gate in gates:
            gate.set()
            await asyncio.sleep(0.03)
            tui.app.tick()
        await tui.wait_until_idle(pilot)
        transcript = tui.main.query_one(Transcript)
        (shown,) = transcript.shown_turns
        assert shown.turn.answer == text
        streamed = transcript.text
        transcript.show_session(tui.opened)  # renders the whole at once
        assert streamed == transcript.text
        assert len(streamed.splitlines()) > 40

    play(Tui(tmp_path, (*pieces, answer())), scene, SIZE)
