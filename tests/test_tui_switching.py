"""Typing while another session is being opened, and reading while one is answered."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from textual.pilot import Pilot
from tui_chats import Tui, notice_text, play

from localgen.backends.errors import ServerUnavailable
from localgen.chat.conversation import Conversation, Turn
from localgen.chat.session_store import SessionRecord
from localgen.tui.chat.active_session import ActiveSession
from localgen.tui.chat.search import SearchScreen
from localgen.tui.chat.session_manager import SearchHit
from localgen.tui.chat.transcript import Transcript


def test_typed_text_goes_to_the_next_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "first")
        before, first = tui.opened, tui.manager.open_empty
        await tui.type(pilot, "half")
        gate = threading.Event()

        def slow() -> ActiveSession:
            gate.wait(60)
            return first()

        monkeypatch.setattr(tui.manager, "open_empty", slow)
        await pilot.press("ctrl+n")
        await pilot.pause()
        await pilot.press(*"second", "enter")
        assert before.unsent_prompt == "half"
        assert tui.asked == ["first"]
        gate.set()
        await tui.until(lambda: len(tui.asked) == 2)
        await tui.wait_until_idle(pilot)
        assert tui.opened is not before
        assert [turn.prompt for turn in tui.opened.chat.conversation.turns] == ["second"]
        assert [turn.prompt for turn in before.chat.conversation.turns] == ["first"]
        await pilot.press("ctrl+down")
        await tui.until(lambda: tui.opened is before)
        await pilot.pause()
        assert tui.prompt.text == "half"

    play(Tui(tmp_path), scene)


def test_typed_text_stays_if_no_session_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        gate = threading.Event()

        def none() -> ActiveSession:
            gate.wait(60)
            raise ServerUnavailable("it is locked")

        monkeypatch.setattr(tui.manager, "open_empty", none)
        await tui.type(pilot, "half ")
        await pilot.press("ctrl+n")
        await pilot.pause()
        await pilot.press(*"more")
        gate.set()
        await tui.until(lambda: "it is locked" in notice_text(tui))
        await tui.wait_until_idle(pilot)
        assert tui.prompt.text == "half more"
        assert tui.opened.unsent_prompt == "half more"

    play(Tui(tmp_path), scene)


def test_two_quick_steps_move_two_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first session is still being opened and arrives last: it must not be shown."""

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        for number in range(3):
            tui.store.create(
                SessionRecord(0, name=f"session {number}", conversation=Conversation(None, ()))
            )
        await tui.app.session_actions.run_in_thread(tui.manager.reload_summaries)
        ids = [listed.id for listed in tui.manager.summaries]
        at = ids.index(tui.opened.id)
        passed, wanted = ids[(at + 1) % len(ids)], ids[(at + 2) % len(ids)]
        gate, get = threading.Event(), tui.manager.get
        got = []

        def slow(session: int) -> ActiveSession:
            if session == passed:
                gate.wait(60)
            got.append(session)
            return get(session)

        monkeypatch.setattr(tui.manager, "get", slow)
        await pilot.press("ctrl+down", "ctrl+down")
        await tui.until(lambda: tui.opened.id == wanted)
        gate.set()
        await tui.until(lambda: len(got) == 2)
        await tui.wait_until_idle(pilot)
        assert got == [wanted, passed]
        assert tui.opened.id == wanted

    play(Tui(tmp_path), scene)


@pytest.mark.parametrize("way", ["hit", "ctrl+home"])
def test_scroll_position_is_kept_while_an_answer_is_written(tmp_path: Path, way: str) -> None:
    gates = [threading.Event(), threading.Event(), threading.Event()]

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        said = tuple(Turn(f"prompt {number}", "words\n\n" * 3) for number in range(60))
        made = tui.store.create(
            SessionRecord(0, name="long", conversation=Conversation(None, said))
        )
        await tui.app.session_actions.open(made.id)
        await tui.type(pilot, "new")
        await pilot.press("enter")
        await tui.until(lambda: tui.opened.answer_stream and tui.opened.answer_stream.num_tokens)
        tui.app.tick()
        transcript = tui.main.query_one(Transcript)
        if way == "hit":
            await pilot.press("ctrl+f")
            await tui.until(lambda: isinstance(tui.app.screen, SearchScreen))
            tui.app.screen.dismiss(SearchHit(made.id, "long", 3, ""))
            await tui.until(lambda: "prompt 3" in tui.screen_text())
        else:
            await pilot.press("ctrl+home")
            await tui.until(lambda: "prompt 36" in tui.screen_text())
        await pilot.pause()
        read = tui.screen_text().split("╭─ Speed")[0]
        y = transcript.scroll_y
        gates[0].set()
        await tui.until(
            lambda: tui.opened.answer_stream and tui.opened.answer_stream.num_tokens >= 3
        )
        for _ in range(3):
            tui.app.tick()
            await pilot.pause()
        assert transcript.scroll_y == y
        assert tui.screen_text().split("╭─ Speed")[0] == read
        await pilot.press("ctrl+end")
        tui.app.tick()
        await pilot.pause()
        assert "some more" in tui.screen_text()
        gates[1].set()
        await tui.wait_until_idle(pilot)
        assert "the end" in tui.screen_text()

    play(Tui(tmp_path, ("begun ", gates[0], "some more ", gates[1], "the end")), scene)
