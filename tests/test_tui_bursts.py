"""Keys of one burst act in order, and typed text stays with its session."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import pytest
from scripted_client import answer
from textual import events
from textual.pilot import Pilot
from tui_chats import Tui, play

from localgen.backends.errors import InvalidRequest
from localgen.tui.chat.active_session import ActiveSession


def burst(tui: Tui, *keys: str) -> None:
    """Queue keys as one write to the terminal would."""
    for key in keys:
        tui.app.post_message(events.Key(key, key if len(key) == 1 else None))


def test_a_prompt_typed_after_a_new_session_is_for_that_session(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        first = tui.opened
        burst(tui, "A", "enter", "ctrl+n", "B", "enter")
        await tui.until(lambda: sorted(tui.asked) == ["A", "B"])
        await tui.wait_until_idle(pilot)
        assert [turn.prompt for turn in first.chat.conversation.turns] == ["A"]
        assert tui.opened is not first
        assert [turn.prompt for turn in tui.opened.chat.conversation.turns] == ["B"]
        assert tui.prompt_text == first.unsent_prompt == ""

    play(Tui(tmp_path, ("a", answer()), ("b", answer())), scene)


def test_text_typed_while_a_prompt_is_sent_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), ActiveSession.ask

    def slow(active: ActiveSession, prompt: str) -> None:
        gate.wait()
        real(active, prompt)

    monkeypatch.setattr(ActiveSession, "ask", slow)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        try:
            burst(tui, "A", "enter", "n", "e", "x", "t")
            await tui.until(lambda: tui.prompt_text == "next")
        finally:
            gate.set()
        await tui.until(lambda: tui.asked == ["A"])
        await tui.wait_until_idle(pilot)
        assert tui.prompt_text == "next"

    play(Tui(tmp_path, ("a", answer())), scene)


def test_a_refused_prompt_returns_before_what_was_typed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def refuse(active: ActiveSession, prompt: str) -> None:
        gate.wait()
        raise InvalidRequest("busy")

    monkeypatch.setattr(ActiveSession, "ask", refuse)

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        first = tui.opened
        try:
            burst(tui, "A", "enter", "B")
            await tui.until(lambda: tui.prompt_text == "B")
        finally:
            gate.set()
        await tui.until(lambda: tui.prompt_text == "A\nB")
        await pilot.pause()
        assert first.unsent_prompt == "A\nB"

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize(
    ("keys", "text"), [(("ctrl+a", "X"), "Xab cd"), (("ctrl+left", "X"), "ab Xcd")]
)
def test_editing_keys_of_a_burst_act_in_order(
    tmp_path: Path, keys: tuple[str, ...], text: str
) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.type(pilot, "ab cd")
        burst(tui, *keys)
        await tui.until(lambda: "X" in tui.prompt_text)
        assert tui.prompt_text == text

    play(Tui(tmp_path), scene)


def edited(keys: list[str]) -> str:
    """The line after the keys, as a line editor has it."""
    line, at = "", 0
    for key in keys:
        match key:
            case "ctrl+a":
                at = 0
            case "ctrl+e":
                at = len(line)
            case "left":
                at = max(0, at - 1)
            case "right":
                at = min(len(line), at + 1)
            case "backspace":
                line, at = line[: max(0, at - 1)] + line[at:], max(0, at - 1)
            case _:
                line, at = line[:at] + key + line[at:], at + 1
    return line


@pytest.mark.parametrize("seed", range(6))
def test_random_bursts_lose_no_text(tmp_path: Path, seed: int) -> None:
    """Prompts of random edits, each for a new session, in bursts of random length."""
    rng = random.Random(seed)
    choice = [*"abc", "ctrl+a", "ctrl+e", "left", "right", "backspace"]
    lines = [["P", *rng.choices(choice, k=8), "ctrl+e", str(n)] for n in range(4)]
    keys = [key for line in lines for key in (*line, "enter", "ctrl+n")]

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        rest = keys
        while rest:
            size = rng.randrange(1, 30)
            burst(tui, *rest[:size])
            rest = rest[size:]
            await asyncio.sleep(0)
        wanted = sorted(map(edited, lines))
        await tui.until(lambda: sorted(tui.asked) == wanted)
        await tui.wait_until_idle(pilot)
        assert len({each.id for each in tui.manager.summaries if each.num_turns}) == len(lines)
        assert tui.prompt_text == ""

    play(Tui(tmp_path, *[("a", answer())] * len(lines)), scene)
