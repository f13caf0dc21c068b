"""Snapshots of every screen of `localgen tui`, at two sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
import top_script
from scripted_client import answer
from textual.pilot import Pilot
from textual.widgets import OptionList, TextArea
from tui_chats import PacedClient, Tui

from localgen.backends.errors import LoadFailed, ServerUnavailable
from localgen.backends.model_info import ModelInfo
from localgen.client import TextDelta, pullable_models
from localgen.client.pullable_models import PullableModel
from localgen.tui.chat.compare import CompareColumn, CompareScreen
from localgen.tui.chat.model_picker import PullCancelled
from localgen.tui.feed import SampleReceived
from localgen.tui.widgets.dialog import ConfirmDialog, ScrollableTextDialog

SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)], ids=str)
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
THOUGHT = TextDelta("", 1, "They ask about stability. Say which sorts are stable, with an example.")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    offers = [PullableModel("llama-8b", "Llama 3.1 8B Instruct", 4_900_000_000, fits=True)]
    monkeypatch.setattr(pullable_models, "pullable_models", lambda: offers)


async def talk(tui: Tui, pilot: Pilot[None]) -> None:
    """Two sessions, the second with an answer of many parts."""
    await tui.ask(pilot, "Name a colour")
    await tui.open_new(pilot)
    await tui.ask(pilot, "What is a stable sort?")


SCRIPTS = (("Blue.", answer()), (THOUGHT, ANSWER, answer(completion_tokens=123)))


@SIZES
def test_empty(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.pause()

    snap_tui(scene, size)


@SIZES
def test_conversation(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    snap_tui(talk, size, *SCRIPTS)


@SIZES
def test_writing_in_two_sessions(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for number, text in enumerate(("Tell me a story", "Count to ten"), 1):
            if number > 1:
                await tui.open_new(pilot)
            await tui.type(pilot, text)
            await pilot.press("enter")
            await tui.until(
                lambda: tui.opened.answer_stream and tui.opened.answer_stream.num_tokens == 2
            )
        tui.app.tick()
        await pilot.pause()

    never = threading.Event()
    snap_tui(scene, size, ("Once upon", " a time", never), ("One, **two**,", " three", never))


@SIZES
def test_interrupted_answer(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "Tell me a story")

    snap_tui(scene, size, ("Once upon a", ServerUnavailable("the server went away in mid-answer")))


@SIZES
def test_suggestions(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press(*"/s")

    snap_tui(scene, size)


@SIZES
def test_settings(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await talk(tui, pilot)
        await pilot.press("ctrl+t", *"0.5", "down", "x", "enter")
        await tui.wait_until_idle(pilot)

    snap_tui(scene, size, *SCRIPTS)


@SIZES
def test_models(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+o")
        await tui.until(lambda: tui.app.screen.query(OptionList).first().option_count == 3)

    snap_tui(scene, size)


@SIZES
def test_search(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await talk(tui, pilot)
        await pilot.press("ctrl+f", *"st")
        await tui.until(lambda: tui.app.screen.query(OptionList).first().option_count)

    snap_tui(scene, size, *SCRIPTS)


@SIZES
def test_compare_setup(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+b")
        await pilot.pause()
        tui.app.screen.query_one(TextArea).text = "tiny\ntiny top-k=many\n"
        await pilot.press("ctrl+s")

    snap_tui(scene, size)


@SIZES
def test_comparison(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+b")
        await pilot.pause()
        await pilot.press("ctrl+s")
        await tui.until(lambda: isinstance(tui.app.screen, CompareScreen))
        await pilot.pause()
        await pilot.press(*"same?", "enter")
        await tui.until(
            lambda: all(each.active.last_stream for each in tui.app.screen.query(CompareColumn))
        )
        await tui.wait_until_idle(pilot)

    snap_tui(scene, size, (ANSWER, answer()), (ANSWER, answer()))


@SIZES
def test_rename(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await talk(tui, pilot)
        await pilot.press("f3")
        await pilot.pause()

    snap_tui(scene, size, *SCRIPTS)


@SIZES
def test_help(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("?")
        await pilot.pause()

    snap_tui(scene, size)


@SIZES
def test_a_long_text(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "/show parameters")
        await pilot.press("enter")
        await tui.until(lambda: isinstance(tui.app.screen, ScrollableTextDialog))

    snap_tui(scene, size)


@SIZES
def test_confirm_delete(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await talk(tui, pilot)
        await pilot.press("f8")
        await tui.until(lambda: isinstance(tui.app.screen, ConfirmDialog))

    snap_tui(scene, size, *SCRIPTS)


@SIZES
def test_palette(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await talk(tui, pilot)
        await pilot.press("ctrl+p")
        await tui.until(lambda: tui.app.screen.query(OptionList).first().option_count)

    snap_tui(scene, size, *SCRIPTS)


async def pick(tui: Tui, pilot: Pilot[None], name: str, says: str) -> None:
    """Choose a model and wait until its status is shown."""
    await pilot.press("ctrl+o")
    await tui.until(lambda: tui.app.screen.query(OptionList).first().option_count == 3)
    await pilot.press(*name, "enter")
    await tui.until(lambda: says in tui.screen_text())


@SIZES
def test_fetching_a_model(
    snap_tui: Callable[..., None], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def pull(name: str, on_bytes: Callable[[int, int], None]) -> str:
        with suppress(PullCancelled):
            while not ended.wait(0.01):
                on_bytes(1_200_000_000, 4_900_000_000)
        return name

    monkeypatch.setattr(pullable_models, "can_pull", lambda name: True)
    monkeypatch.setattr(pullable_models, "pull_model", pull)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pick(tui, pilot, "llama-8b", "1.2 GB of 4.9 GB")

    try:
        snap_tui(scene, size)
    finally:
        ended.set()


@SIZES
def test_loading_a_model(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        tui.gate_loads()
        await pick(tui, pilot, "other", "50%")

    snap_tui(scene, size)


@SIZES
def test_a_model_that_does_not_load(
    snap_tui: Callable[..., None], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> ModelInfo:
        raise LoadFailed("cannot load other: tensor 3 ends after the file does: fetch it again")

    monkeypatch.setattr(PacedClient, "load", load)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pick(tui, pilot, "other", "fetch it again")

    snap_tui(scene, size)


@SIZES
def test_reasoning(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "Which sorts are stable?")
        await pilot.press("f5")

    snap_tui(scene, size, (THOUGHT, "Merge sort.", answer()))


@SIZES
def test_gauges(snap_tui: Callable[..., None], size: tuple[int, int]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "Name a colour")
        if size[0] < 100:
            await pilot.press("f6")
            await pilot.pause()
        tui.app.post_message(SampleReceived(top_script.reading()))
        await pilot.pause()

    snap_tui(scene, size, ("Blue.", answer()))


def test_largest_size(snap_tui: Callable[..., None]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await talk(tui, pilot)
        tui.app.post_message(SampleReceived(top_script.reading()))
        await pilot.pause()

    snap_tui(scene, (250, 80), *SCRIPTS)


def test_too_small(snap_tui: Callable[..., None]) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.pause()

    snap_tui(scene, (59, 20))


def test_smallest_size(snap_tui: Callable[..., None]) -> None:
    snap_tui(talk, (60, 20), *SCRIPTS)


@pytest.mark.parametrize("theme", ["light", "high-contrast", "monochrome", "terminal"])
def test_themes(snap_tui: Callable[..., None], theme: str) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        tui.app.theme = theme
        await talk(tui, pilot)

    snap_tui(scene, (120, 40), *SCRIPTS)
