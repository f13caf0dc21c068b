"""What a model or a user writes is shown, and never obeyed or taken for markup."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from scripted_client import answer
from textual.pilot import Pilot
from textual.widgets.markdown import MarkdownFence
from tui_chats import Tui

from localgen.client import Text
from localgen.tui.chat.markdown import ModelMarkdown
from localgen.tui.chat.turn_view import TurnView

Play = Callable[[Tui, Pilot[None]], Awaitable[None]]

HOSTILE = (
    "\x1b]0;owned\x07 \x1b[2J \x9b31m [red]not red[/] [@click=app.quit]x[/] \u202eevil\u202c ok"
)
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


def play(tui: Tui, scene: Play) -> None:
    async def run() -> None:
        try:
            async with tui.running((120, 60)) as pilot:
                await scene(tui, pilot)
        finally:
            tui.close()

    asyncio.run(run())


def test_escapes_and_markup_are_shown(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, HOSTILE)
        shown = tui.screen_text()
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "\x9b" not in shown
        # in the prompt, the answer and what was thought
        assert shown.count("[red]not red[/]") >= 2
        assert shown.count("␛]0;owned␇") >= 2
        await pilot.press("f5")
        await pilot.pause()
        assert "[b]thought[/b]␛" in tui.screen_text()

    play(Tui(tmp_path, (Text("", 1, "[b]thought[/b]\x1b"), HOSTILE, answer())), scene)


def test_hostile_names_and_errors(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        shown = tui.screen_text()
        assert "[red]it[/] ␛[2J broke" in shown
        await tui.ask(pilot, "/rename [red]name[/]\x1b[2J")
        await tui.until(lambda: "[red]name[/]␛[2J" in tui.screen_text())
        await tui.ask(pilot, "/switch [red]x[/]\x1b")
        await tui.until(lambda: "no session [red]x[/]␛" in tui.screen_text())

    play(Tui(tmp_path, (ZeroDivisionError("[red]it[/] \x1b[2J broke"),)), scene)


def test_markdown_is_drawn_and_hides_nothing(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        shown = tui.screen_text()
        for whole in (
            "Title [b]",
            "code [x]",
            "[link](http://example.org)",
            "def f(x: int) -> int:  # [red]",
            "<b>html</b> &amp; ![image](x.png)",
        ):
            assert whole in shown
        assert "**bold**" not in shown
        fence = tui.main.query(MarkdownFence).first()
        assert len({str(span.style) for span in fence._highlighted_code.spans}) > 2

    play(Tui(tmp_path, (MARKDOWN, answer())), scene)


def blocks(widget: ModelMarkdown) -> list[str]:
    """What the widget shows, block by block, whatever it is made of."""
    return [
        f"{type(block).__name__}: {getattr(block, '_content', '')}"
        for block in widget.query("MarkdownBlock")
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_ends_as_the_whole_would(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    text = MARKDOWN + "odd\u2028line\x85breaks\x0b\x1c.\r\n" + MARKDOWN
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
            await tui.app.tick()
        await tui.settled(pilot)
        view = tui.main.query(TurnView).first()
        streamed = blocks(view._answer)
        assert view.turn.answer == text
        whole = ModelMarkdown(text)
        await tui.main.query_one("#centre").mount(whole)
        await pilot.pause()
        assert streamed == blocks(whole)
        assert len(streamed) > 20

    play(Tui(tmp_path, (*pieces, answer())), scene)
