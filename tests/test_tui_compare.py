"""One prompt to several models or settings, by keys."""

from __future__ import annotations

import threading
from pathlib import Path

from scripted_client import answer
from textual import actions
from textual.pilot import Pilot
from textual.widgets import TextArea
from tui_chats import Tui, notice_text, play, press

from localgen.client import TextDelta
from localgen.tui.chat.compare import CompareColumn, CompareDialog, CompareScreen


def test_comparing_by_keys(tmp_path: Path) -> None:
    gates = [threading.Event(), threading.Event()]

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+b")
        setup = tui.app.screen
        assert isinstance(setup, CompareDialog)
        setup.query_one(TextArea).text = "tiny\ntiny nonsense=1"
        await press(tui, pilot, "ctrl+s")
        assert "line 2: no parameter" in tui.screen_text()
        setup.query_one(TextArea).text = "tiny\n\nothr temperature=0"
        await press(tui, pilot, "ctrl+s")
        await tui.until(lambda: "line 3: Model 'othr' not found." in tui.screen_text())
        assert "Installed: tiny" in " ".join(tui.screen_text().split())
        setup.query_one(TextArea).text = "tiny\nother temperature=0"
        await pilot.press("ctrl+s")
        await tui.until(lambda: isinstance(tui.app.screen, CompareScreen))
        await pilot.pause()
        await pilot.press(*"same?", "enter")
        await tui.until(
            lambda: all(c.active.answer_stream for c in tui.app.screen.query(CompareColumn))
        )
        for gate in gates:
            gate.set()
        await tui.wait_until_idle(pilot)
        tui.app.tick()
        assert tui.screen_text().count("TTFT 56 ms · 41.2 tok/s") == 2
        await pilot.press(*"more", "enter")
        await tui.until(
            lambda: all(c.active.is_answering for c in tui.app.screen.query(CompareColumn))
        )
        await pilot.press("ctrl+c")
        await tui.wait_until_idle(pilot)
        columns = list(tui.app.screen.query(CompareColumn))
        assert [len(c.active.chat.conversation.turns) for c in columns] == [2, 2]
        assert all(c.active.chat.conversation.turns[-1].stopped for c in columns)
        await pilot.press("escape")
        await tui.until(lambda: tui.main.is_active)
        assert len(tui.manager.summaries) == 3

    never = threading.Event()
    scripts = [("a", gates[0], answer()), ("b", gates[1], answer()), ("c", never), ("d", never)]
    play(Tui(tmp_path, *scripts), scene)


LONG = "\n\n".join(f"paragraph {number}" for number in range(60))


async def compare_two(tui: Tui, pilot: Pilot[None]) -> list[CompareColumn]:
    """Open the comparison with an answer in both columns."""
    await press(tui, pilot, "ctrl+b", "ctrl+s")
    await tui.until(lambda: isinstance(tui.app.screen, CompareScreen))
    await pilot.pause()
    await pilot.press(*"q", "enter")
    columns = list(tui.app.screen.query(CompareColumn))
    await tui.until(lambda: all(each.active.last_stream for each in columns))
    await tui.wait_until_idle(pilot)
    return columns


def test_long_answers_are_scrolled_together_from_the_prompt(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        columns = await compare_two(tui, pilot)

        def places() -> list[float]:
            return [each.transcript.scroll_y for each in columns]

        end = places()
        assert min(end) > 20
        await press(tui, pilot, "pageup")
        assert all(now < then for now, then in zip(places(), end, strict=True))
        await press(tui, pilot, "pagedown")
        assert places() == end
        await press(tui, pilot, "ctrl+home")
        assert places() == [0, 0]
        assert tui.screen_text().count("paragraph 0") == 2
        await press(tui, pilot, "ctrl+end")
        assert places() == end
        columns[0].transcript.focus()
        await press(tui, pilot, "ctrl+home", "pagedown")
        await pilot.pause(0.5)
        assert places()[0] > places()[1] == 0
        assert tui.prompt_text == ""

    play(Tui(tmp_path, (LONG, answer()), (LONG, answer())), scene)


def test_thoughts_of_all_columns_open_at_once(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await compare_two(tui, pilot)
        assert "deep" not in tui.screen_text()
        await press(tui, pilot, "f5")
        assert tui.screen_text().count("deep") == 2

    script = (TextDelta("", 1, "deep"), "a", answer())
    play(Tui(tmp_path, script, script), scene)


def test_ctrl_r_asks_all_again(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        columns = await compare_two(tui, pilot)
        await press(tui, pilot, "ctrl+r")
        await tui.wait_until_idle(pilot)
        assert tui.asked == ["q"] * 4
        answers = [c.active.chat.conversation.turns[-1].answer for c in columns]
        assert sorted(answers) == ["c", "d"]

    play(Tui(tmp_path, *((text, answer()) for text in "abcd")), scene)


def test_the_help_lists_only_keys_that_do_something_here(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+b", "ctrl+s")
        await tui.until(lambda: isinstance(tui.app.screen, CompareScreen))
        await pilot.pause()
        foot = tui.screen_text().split("\n")[-1]
        assert "Stop all" in foot
        assert "Back" in foot
        assert "New" not in foot
        assert "Search" not in foot
        for active in tui.app.screen.active_bindings.values():
            namespace, name, _ = actions.parse(active.binding.action)
            holder = {"screen": tui.app.screen, "app": tui.app}.get(namespace, active.node)
            does = getattr(holder, f"action_{name}", None) or getattr(
                holder, f"_action_{name}", None
            )
            assert does is not None, active.binding

    play(Tui(tmp_path), scene)


def test_main_screen_keys_do_nothing_on_the_comparison(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await compare_two(tui, pilot)
        main, sessions = tui.opened.id, len(tui.manager.summaries)
        keys = ("ctrl+n", "f4", "f3", "ctrl+t", "ctrl+o", "ctrl+f", "ctrl+down", "ctrl+y")
        await press(tui, pilot, *keys)
        assert isinstance(tui.app.screen, CompareScreen)
        assert (tui.opened.id, len(tui.manager.summaries)) == (main, sessions)
        assert tui.app.clipboard == ""
        tui.app.show_message("to the user")
        await tui.until(lambda: len(tui.app._notifications))
        assert [each.message for each in tui.app._notifications] == ["to the user"]
        assert notice_text(tui) == ""  # behind it nobody would see it

    play(Tui(tmp_path), scene)


def test_columns_that_do_not_fit_are_reached(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await press(tui, pilot, "ctrl+b")
        tui.app.screen.query_one(TextArea).text = "tiny\ntiny seed=1\ntiny seed=2"
        await pilot.press("ctrl+s")
        await tui.until(lambda: isinstance(tui.app.screen, CompareScreen))
        await pilot.pause()
        assert "seed=2" in tui.screen_text()
        assert "out of sight" not in tui.screen_text()
        await pilot.resize_terminal(60, 20)
        await tui.until(lambda: "Shift+Tab goes to columns out of sight" in tui.screen_text())
        assert "seed=2" not in tui.screen_text()
        await pilot.press("shift+tab")
        await tui.until(lambda: "seed=2" in tui.screen_text())

    play(Tui(tmp_path), scene, (80, 24))
