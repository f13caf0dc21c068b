"""Every screen of `localgen tui` as it looks, at three sizes."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from scripted_client import answer
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, TextArea
from tui_chats import Tui

from localgen.backends.errors import ServerUnavailable
from localgen.chats.options import ModelOptions
from localgen.client import Text, pulling
from localgen.client.pulling import Offer
from localgen.tui.chat.compare import Column, CompareScreen

SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)], ids=str)
Compare = Callable[..., bool]
Scene = Callable[[Tui, Pilot[None]], Awaitable[None]]
ANSWER = """Sorting keeps *equal* elements in their order:

1. **Stable** sorts do.
2. Others may not.

```python
def by_length(words: list[str]) -> list[str]:
    return sorted(words, key=len)  # stable
```

| sort | stable |
|---|---|
| merge | yes |
| heap | no |
"""
THOUGHT = Text("", 1, "They ask about stability. Say which sorts are stable, with an example.")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    offers = [Offer("llama-8b", "Llama 3.1 8B Instruct", 4_900_000_000)]
    monkeypatch.setattr(pulling, "offers", lambda: offers)


@pytest.fixture
def check(tmp_path: Path, snap_compare: Compare) -> Iterator[Callable[..., None]]:
    made: list[Tui] = []

    def run(scene: Scene, size: tuple[int, int], *scripts: object) -> None:
        tui = Tui(tmp_path, *scripts, options=ModelOptions())  # type: ignore[arg-type]
        made.append(tui)

        async def before(pilot: Pilot[None]) -> None:
            await tui.until(lambda: tui.main.opened)
            tui.prompt.cursor_blink = False
            await scene(tui, pilot)
            for area in tui.app.screen.query(TextArea):
                area.cursor_blink = False
            for field in tui.app.screen.query(Input):
                field.cursor_blink = False
            await pilot.pause()

        assert snap_compare(tui.app, terminal_size=size, run_before=before)

    yield run
    for tui in made:
        tui.close()


async def talk(tui: Tui, pilot: Pilot[None]) -> None:
    """Two sessions, the second with an answer of many parts."""
    await tui.ask(pilot, "Name a colour")
    await tui.open_new(pilot)
    await tui.ask(pilot, "What is a stable sort?")


SCRIPTS = (("Blue.", answer()), (THOUGHT, ANSWER, answer(completion_tokens=123)))


@SIZES
def test_empty(check: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.pause()

    check(scene, size)


@SIZES
def test_conversation(check: Callable[..., None], size: tuple[int, int]) -> None:
    check(talk, size, *SCRIPTS)


@SIZES
def test_writing_in_two_sessions(check: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for number, text in enumerate(("Tell me a story", "Count to ten"), 1):
            if number > 1:
                await tui.open_new(pilot)
            await tui.type(pilot, text)
            await pilot.press("enter")
            await tui.until(lambda: tui.opened.answering and tui.opened.answering.tokens == 2)
        await tui.app.tick()
        await pilot.pause()

    never = threading.Event()
    check(scene, size, ("Once upon", " a time", never), ("One, **two**,", " three", never))


@SIZES
def test_broken_off(check: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "Tell me a story")

    check(scene, size, ("Once upon a", ServerUnavailable("the server went away in mid-answer")))


@SIZES
def test_suggestions(check: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"/s")

    check(scene, size)


@SIZES
def test_settings(check: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await talk(tui, pilot)
        await pilot.press("ctrl+t", *"0.5", "down", "x", "enter")
        await tui.settled(pilot)

    check(scene, size, *SCRIPTS)


@SIZES
def test_models(check: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+o")
        await tui.until(lambda: tui.app.screen.query(OptionList).first().option_count == 3)

    check(scene, size)


@SIZES
def test_search(check: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await talk(tui, pilot)
        await pilot.press("ctrl+f", *"st")
        await tui.until(lambda: tui.app.screen.query(OptionList).first().option_count)

    check(scene, size, *SCRIPTS)


@SIZES
def test_compare_setup(check: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+b")
        await pilot.pause()
        tui.app.screen.query_one(TextArea).text = "tiny\ntiny top-k=many\n"
        await pilot.press("ctrl+s")

    check(scene, size)


@SIZES
def test_comparison(check: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+b")
        await pilot.pause()
        await pilot.press("ctrl+s")
        await tui.until(lambda: isinstance(tui.app.screen, CompareScreen))
        await pilot.pause()
        await pilot.press(*"same?", "enter")
        await tui.until(lambda: all(each.opened.last for each in tui.app.screen.query(Column)))
        await tui.settled(pilot)

    check(scene, size, (ANSWER, answer()), (ANSWER, answer()))


@SIZES
def test_rename(check: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await talk(tui, pilot)
        await pilot.press("f3")
        await pilot.pause()

    check(scene, size, *SCRIPTS)


def test_the_smallest(check: Callable[..., None]) -> None:
    check(talk, (60, 20), *SCRIPTS)


@pytest.mark.parametrize("theme", ["light", "high-contrast", "monochrome"])
def test_themes(check: Callable[..., None], theme: str) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        tui.app.theme = theme
        await talk(tui, pilot)

    check(scene, (120, 40), *SCRIPTS)
