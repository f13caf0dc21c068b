"""The TUI and its server: a remote one, a lost one, and its messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_client import answer
from textual.pilot import Pilot
from textual.widgets import OptionList
from top_script import reading, snapshot
from tui_chats import NoServerMonitor, Tui, play, press

from localgen.client.snapshot import ServerSnapshot
from localgen.tui.chat.model_picker import ModelPicker
from localgen.tui.chat.settings import SettingsPanel
from localgen.tui.feed import SampleReceived, ServerLost
from localgen.tui.gauges.panel import GaugePanel
from localgen.tui.widgets.notice import Notice


def test_remote_server_decides_its_context(tmp_path: Path) -> None:
    async def local(tui: Tui, pilot: Pilot[None]) -> None:
        await tui.ask(pilot, "here")
        tui.opened.apply_setting("ctx", "512")

    async def remote(tui: Tui, pilot: Pilot[None]) -> None:
        (here,) = (listed.id for listed in tui.manager.summaries if listed.num_turns)
        await tui.app.session_actions.open(here)
        assert tui.store.read(here).server_url == ""  # it was only looked at
        await tui.ask(pilot, "there")
        assert tui.clients[-1].record.asked[-1].ctx is None
        assert tui.clients[-1].record.asked[-1].model == "other"
        assert tui.store.read(here).server_url == "http://far/v1"
        await press(tui, pilot, "ctrl+t")
        panel = tui.main.query_one(SettingsPanel)
        assert not panel.query_one("#set-ctx").display
        assert panel.query_one("#set-temperature").display

    play(Tui(tmp_path), local)
    play(Tui(tmp_path, url="http://far/v1", model="other"), remote)


def test_a_model_of_another_server_may_be_called_tiny(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+o")
        await tui.until(lambda: isinstance(tui.app.screen, ModelPicker))
        await tui.until(lambda: tui.app.screen.query_one(OptionList).option_count)
        await pilot.press(*"tiny", "enter")
        await tui.until(lambda: tui.app.screen is tui.main)
        assert tui.opened.chat.requested_model == "tiny"

    async def unnamed(tui: Tui, pilot: Pilot[None]) -> None:
        assert "tiny" not in tui.screen_text()
        assert "the built-in model" not in tui.screen_text()
        assert "the server's model" in tui.screen_text()

    play(Tui(tmp_path, url="http://far/v1"), unnamed)
    play(Tui(tmp_path, url="http://far/v1"), scene)


@pytest.mark.parametrize(
    ("lost", "url", "status", "said"),
    [
        (ServerLost("it was killed", 2.0, 1), "", "LOST", "it was killed. Retrying in 2 s"),
        (ServerLost("the server has shut down", 2.0, 1, has_shut_down=True), "", "WAITING", ""),
        (
            ServerLost("no /metrics", 2.0, 1, has_no_stats=True),
            "http://far/v1",
            "NO FIGURES",
            "no /metrics",
        ),
    ],
)
def test_server_status_is_shown(
    tmp_path: Path, lost: ServerLost, url: str, status: str, said: str
) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        tui.app.post_message(SampleReceived(reading()))
        await tui.until(lambda: "● LIVE" in tui.screen_text())
        assert not tui.main.query_one(Notice).display
        tui.app.post_message(lost)
        await tui.until(lambda: f"● {status}" in tui.screen_text())
        await pilot.pause()
        notice = tui.main.query_one(Notice)
        assert notice.display is bool(said)
        assert said in tui.screen_text()
        assert tui.main.query_one(GaugePanel).styles.opacity < 1
        tui.app.post_message(SampleReceived(reading()))
        await tui.until(lambda: "● LIVE" in tui.screen_text())
        await pilot.pause()
        assert not notice.display
        assert tui.main.query_one(GaugePanel).styles.opacity == 1

    play(Tui(tmp_path, url=url), scene)


def test_a_server_elsewhere_that_was_never_seen(tmp_path: Path) -> None:
    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        # with the tests' delay no second attempt comes before the key press
        await tui.until(lambda: "no server. Retrying in 1e+03 s, F12: now" in tui.screen_text())
        seen = threading.Event()

        def see(_: NoServerMonitor) -> Iterator[ServerSnapshot]:
            seen.set()
            yield snapshot()

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(NoServerMonitor, "snapshots", see)
            await pilot.press("f12")
            await tui.until(seen.is_set)

    play(Tui(tmp_path, url="http://far/v1"), scene)


def test_client_messages_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    async def scene(tui: Tui, pilot: Pilot[None]) -> None:
        client = tui.clients[0]

        def connect() -> None:
            client.say("the running server is 9.8.7, this is 0.1.0: restarting it")

        monkeypatch.setattr(client, "connect", connect)
        tui.prompt.insert("q")
        await pilot.press("enter")
        said = "the running server is 9.8.7, this is 0.1.0: restarting it"
        await tui.until(lambda: f"{said} · waiting" in tui.screen_text())
        assert not tui.app._notifications, "it would cover the answer"
        gate.set()
        await tui.wait_until_idle(pilot)

    play(Tui(tmp_path, (gate, "a", answer())), scene, (200, 60))
