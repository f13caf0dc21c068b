"""The order of sessions and their forks."""

from __future__ import annotations

from pathlib import Path

from scripted_client import answer
from textual.pilot import Pilot
from tui_chats import Tui, play, press

from localgen.chat.session_store import SessionSummary
from localgen.chat.session_tree import in_tree_order


def session(number: int, changed_s: float, forked_from: int | None = None) -> SessionSummary:
    return SessionSummary(number, f"s{number}", None, 1, changed_s, False, forked_from)


def order(*sessions: SessionSummary) -> list[tuple[int, int]]:
    return [(each.id, each.depth) for each in in_tree_order(sessions)]


def test_forks_are_below_their_source_and_the_latest_family_is_first() -> None:
    found = order(
        session(1, 10.0),
        session(2, 50.0),
        session(3, 20.0, forked_from=1),
        session(4, 90.0, forked_from=1),
        session(5, 30.0, forked_from=3),
    )
    assert found == [(1, 0), (4, 1), (3, 1), (5, 2), (2, 0)]


def test_a_fork_of_a_deleted_session_is_a_root() -> None:
    assert order(session(3, 1.0, forked_from=2)) == [(3, 0)]


def test_damaged_sources_lose_no_session() -> None:
    found = order(session(1, 1.0, forked_from=2), session(2, 2.0, forked_from=1))
    assert sorted(each for each, _ in found) == [1, 2]
    assert order(session(1, 1.0, forked_from=1)) == [(1, 0)]


def test_a_long_chain_of_forks() -> None:
    chain = [session(n, float(n), forked_from=n - 1) for n in range(1, 5001)]
    assert order(*chain)[-1] == (5000, 4999)


def test_the_list_shows_the_tree_which_is_stored(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "first")
        first = tui.opened.id
        await press(tui, pilot, "f4")
        await tui.until(lambda: tui.opened.id != first)
        fork = tui.opened.id
        await tui.open_new(pilot)
        await tui.ask(pilot, "second")
        lines = [line[1:26] for line in tui.screen_text().split("\n")[2:5]]
        assert [line.rstrip().removesuffix("m").rstrip(" 0123456789") for line in lines] == [
            "▌second",
            " first",
            " └ first (2)",
        ]
        assert tui.store.read(fork).forked_from == first
        await press(tui, pilot, "ctrl+down", "ctrl+down")
        await tui.until(lambda: tui.opened.id == fork)
        await tui.ask(pilot, "more")
        assert tui.store.read(fork).forked_from == first

    scripts = [(f"{n}.", answer()) for n in range(3)]
    play(Tui(tmp_path, *scripts), scene)
