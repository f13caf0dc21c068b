"""The transcript: what is finished is drawn once, and the view stays where the user put it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scripted_client import answer
from textual.pilot import Pilot
from textual.screen import Screen
from tui_chats import Tui, notice_text, play, press

from localgen.chat.conversation import Turn
from localgen.tui.chat.markdown import RowRenderer
from localgen.tui.chat.rows import row_text
from localgen.tui.chat.transcript import Transcript
from localgen.tui.chat.turn_rows import TurnRows
from localgen.tui.themes import DARK, THEMES

PAGE = """## Part {n}

Some **bold** text with `code` in it.

| left | right |
|:-----|------:|
| a    | 1     |

```python
def part(): return {n}
```

"""
PAGES = [PAGE.format(n=number) for number in range(40)]


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the blocks that are rendered."""
    lengths: list[int] = []
    real: Callable[[RowRenderer, str], object] = RowRenderer.markdown

    def counted(renderer: RowRenderer, source: str) -> object:
        lengths.append(len(source))
        return real(renderer, source)

    monkeypatch.setattr(RowRenderer, "markdown", counted)
    return lengths


def dark_renderer(width: int) -> RowRenderer:
    (dark,) = (theme for theme in THEMES if theme.name == DARK)
    return RowRenderer(width, {**dark.to_color_system().generate(), **dark.variables})


def is_in(transcript: Transcript, text: str) -> bool:
    return text in transcript.text


def test_finished_blocks_are_rendered_once(tmp_path: Path, rendered: list[int]) -> None:
    gates = [threading.Event() for _ in PAGES]
    script = [step for gate, page in zip(gates, PAGES, strict=True) for step in (gate, page)]

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "q")
        await pilot.press("enter")
        transcript = tui.main.query_one(Transcript)
        for number, gate in enumerate(gates):
            gate.set()
            await tui.until(partial(is_in, transcript, f"return {number}"))
        await tui.wait_until_idle(pilot)
        assert max(rendered) < 2 * len(PAGES[0])
        assert sum(rendered) < 3 * len("".join(PAGES))

    play(Tui(tmp_path, (*script, answer())), scene)


def test_the_view_stays_where_the_user_put_it(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "q")
        await pilot.press("enter")
        transcript = tui.main.query_one(Transcript)
        await tui.until(lambda: "return 19" in transcript.text)
        await pilot.pause()
        assert "return 19" in tui.screen_text()
        await pilot.press("pageup", "pageup")
        await pilot.pause()
        top, shown = transcript.scroll_y, tui.screen_text()
        gate.set()
        await tui.wait_until_idle(pilot)
        assert "return 39" in transcript.text
        assert transcript.scroll_y == top
        assert "return 39" not in tui.screen_text()
        first_line = next(line for line in shown.splitlines() if "Part" in line)
        assert first_line.split("│")[0].strip() in tui.screen_text()
        await pilot.press("ctrl+end")
        await pilot.pause()
        assert "return 39" in tui.screen_text()

    play(Tui(tmp_path, (*PAGES[:20], gate, *PAGES[20:], answer())), scene)


def test_a_queued_prompt_leaves_the_view_where_it_is(tmp_path: Path) -> None:
    gate = threading.Event()

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "q")
        await pilot.press("enter")
        transcript = tui.main.query_one(Transcript)
        await tui.until(lambda: "return 39" in transcript.text)
        await pilot.press("pageup", "pageup")
        await tui.type(pilot, "next")
        await pilot.press("enter")
        await pilot.pause()
        top = transcript.scroll_y
        gate.set()
        await tui.until(lambda: "Second answer" in transcript.text)
        await tui.wait_until_idle(pilot)
        assert transcript.scroll_y == top
        await tui.ask(pilot, "and one more")
        assert "Third answer" in tui.screen_text()

    scripts = (("".join(PAGES), gate, answer()), ("Second answer", answer()))
    play(Tui(tmp_path, *scripts, ("Third answer", answer())), scene)


def test_the_end_is_followed_while_the_terminal_changes(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        for size in ((80, 24), (120, 40), (200, 60), (60, 20)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            transcript = tui.main.query_one(Transcript)
            assert "return 39" in tui.screen_text()
            assert transcript.is_vertical_scroll_end

    play(Tui(tmp_path, (*PAGES, answer())), scene)


CODE = "Two:\n\n```python\nprint(1)\n```\n\nand\n\n```\nplain\ntext\n```\n"


def test_a_scrollbar_that_appears_shows_where_the_view_is(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        await tui.open_new(pilot)
        await tui.ask(pilot, "short")
        transcript = tui.main.query_one(Transcript)
        assert not transcript.show_vertical_scrollbar
        await press(tui, pilot, "ctrl+down")
        await tui.until(lambda: transcript.show_vertical_scrollbar)
        assert transcript.vertical_scrollbar.position == transcript.scroll_y > 0

    play(Tui(tmp_path, ("".join(PAGES), answer()), ("Yes.", answer())), scene, (60, 20))


def test_the_scrollbar_grows_with_the_answer_without_a_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, end = threading.Event(), threading.Event()
    layouts: list[object] = []

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        transcript = tui.main.query_one(Transcript)
        await tui.type(pilot, "q")
        await pilot.press("enter")
        await tui.until(lambda: "Part 4" in transcript.text)
        await tui.until(lambda: transcript.show_vertical_scrollbar)
        await pilot.pause()
        bar = transcript.vertical_scrollbar
        show = Screen._refresh_layout

        def counted(screen: Screen[None], *given: Any, **named: Any) -> None:
            if not named.get("scroll"):
                layouts.append(given)
            show(screen, *given, **named)

        monkeypatch.setattr(Screen, "_refresh_layout", counted)
        more.set()
        await tui.until(lambda: "Part 9" in transcript.text)
        await pilot.pause()
        assert not layouts
        assert bar.window_virtual_size == transcript.virtual_size.height == len(transcript.rows)
        assert bar.position == transcript.scroll_y == transcript.max_scroll_y
        end.set()
        await tui.wait_until_idle(pilot)
        assert bar.window_virtual_size == len(transcript.rows)

    script = ("".join(PAGES[:5]), more, "".join(PAGES[5:10]), end, answer())
    play(Tui(tmp_path, script), scene, (60, 20))


def test_code_is_copied_by_a_click_and_by_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        copied: list[str] = []
        monkeypatch.setattr(tui.app, "copy_to_clipboard", copied.append)
        await tui.ask(pilot, "q")
        lines = tui.screen_text().splitlines()
        row = next(at for at, line in enumerate(lines) if "python" in line)
        await pilot.click(offset=(lines[row].index("copy") + 1, row))
        await pilot.pause()
        assert copied == ["print(1)"]
        await press(tui, pilot, "ctrl+y", "ctrl+y")
        assert "copied 2 lines of code, block 2 of 2" in notice_text(tui)
        await press(tui, pilot, "ctrl+y", "ctrl+y")
        assert copied[1:] == [CODE, "plain\ntext\n", "print(1)\n", CODE]

    play(Tui(tmp_path, (CODE, answer())), scene)


def test_selected_text_is_that_of_the_rows(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "q")
        lines = tui.screen_text().splitlines()
        row = next(at for at, line in enumerate(lines) if "middle words" in line)
        column = lines[row].index("middle")
        await pilot.mouse_down(offset=(column, row))
        await pilot.hover(offset=(column + 5, row))
        await pilot.mouse_up(offset=(column + 5, row))
        await pilot.pause()
        assert tui.app.screen.get_selected_text() == "middle"

    play(Tui(tmp_path, ("first\n\nthe middle words\n\nlast", answer())), scene)


def test_headings_and_tables_can_be_told_apart() -> None:
    renderer = dark_renderer(60)
    (first,), (second,) = renderer.markdown("# One"), renderer.markdown("## One")
    assert row_text(first) == row_text(second)
    assert first[-1].style != second[-1].style
    table = [
        row_text(row) for row in renderer.markdown("| a | b |\n|:--|--:|\n| 1 | 2 |\n| long | 30 |")
    ]
    assert table[-2:] == [row for row in table[-2:] if row]
    assert table[-2].endswith(" 2")
    assert table[-1].endswith("30")
    assert table[-1].index("30") + 1 == table[-2].index("2")


def test_the_line_below_an_answer_has_the_figures_that_fit() -> None:
    summary = (
        "tiny · 41.2 tok/s · first token 56 ms · 169 of 2,048\nnote: a long line that is wrapped"
    )

    def rows(width: int, *, stopped: bool = False) -> list[str]:
        turn = Turn("q", "Yes.", stopped, summary=summary)
        return [row_text(row).strip() for row in TurnRows(turn).rows(dark_renderer(width))[2:-1]]

    assert rows(60) == summary.splitlines()
    assert rows(50)[0] == "tiny · 41.2 tok/s · first token 56 ms"
    assert rows(20)[0] == "tiny · 41.2 tok/s"
    assert " ".join(rows(20)[1:]) == "note: a long line that is wrapped"
    assert " ".join(rows(20, stopped=True)) == " ".join(summary.splitlines())


def test_all_figures_by_a_key(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "alt+i")
        assert "no figures" in notice_text(tui)
        await tui.ask(pilot, "q")
        await press(tui, pilot, "alt+i")
        assert "prompt:     46 tokens, 12 cached" in notice_text(tui)

    play(Tui(tmp_path, ("Yes.", answer())), scene)
