"""Keys and mouse in `localgen top`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.binding import Binding
from textual.pilot import Pilot
from textual.widgets import SelectionList, Static
from textual.widgets._footer import FooterKey
from top_script import (
    ENDED,
    LIVE,
    ScriptedServerMonitor,
    column,
    model,
    notifications,
    reading,
    request,
    run,
    snapshot,
    table,
    until,
)

from localgen.backends.engine_stats import RequestPhases
from localgen.backends.errors import ServerUnavailable
from localgen.client.snapshot import ServerSnapshot
from localgen.tui.base_app import BaseApp, KeyHelp, TerminalTooSmall
from localgen.tui.feed import SampleReceived
from localgen.tui.gauges.gauge import Gauge
from localgen.tui.gauges.speed import SpeedGauge
from localgen.tui.themes import LIGHT, THEME_NAMES
from localgen.tui.top.app import TopApp
from localgen.tui.top.banner import Banner
from localgen.tui.top.column_choice import ColumnChoice
from localgen.tui.top.dashboard import PANELS, Dashboard
from localgen.tui.top.request_rows import REQUEST_COLUMNS, course
from localgen.tui.top.request_table import RequestTable
from localgen.tui.top.timeline import TimelineScreen
from localgen.tui.widgets.command_palette import CommandPalette
from localgen.tui.widgets.dialog import ConfirmDialog


def test_the_table_lists_what_waits_first_and_what_has_ended_last() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        states = ["queued", "prefill 58%", "decoding", "decoding"]
        ended = ["(stop)", "(length)", "(cancelled)", "(queue full)"]
        assert column(app, "state") == states + ended
        assert column(app, "answer")[2:4] == ["90", "17"]
        # 89 tokens in 2 s
        assert column(app, "rate")[2] == "44.5"

    run(script)


def test_s_sorts_by_the_next_column_and_r_turns_it_round() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        keys = [each.key for each in REQUEST_COLUMNS if each.min_terminal_columns <= 120]
        assert keys[:3] == ["model", "state", "prompt"]
        await pilot.press("s", "s", "s")  # prompt, cached, answer
        await pilot.pause()
        assert column(app, "answer") == ["90", "17", "0", "0", "120", "90", "60", "30"]
        for key in ("r", "S", "r"):
            await pilot.press(key)
            await pilot.pause()
        assert column(app, "answer") == ["0", "0", "17", "90", "30", "60", "90", "120"]
        for _ in keys:
            await pilot.press("s")
        await pilot.pause()
        assert column(app, "answer")[:2] == ["90", "17"], "all the way round"

    run(script)


def test_a_click_on_a_heading_sorts_by_it() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        found = table(app)
        # the heading of the third column: model, state, prompt, each with a blank at both sides
        widths = [column.get_render_width(found) for column in found.ordered_columns]
        await pilot.click(RequestTable, offset=(sum(widths[:4]) + 2, 0))
        await pilot.pause()
        assert column(app, "answer")[:2] == ["90", "17"]

    run(script)


def test_up_and_down_choose_a_request() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        seen = []
        for key in ("down", "down", "up"):
            await pilot.press(key)
            found = table(app).cursor_request
            seen.append(found and found.state_text)
        assert seen == ["prefill 58%", "decoding", "prefill 58%"]

    run(script)


def test_the_cursor_stays_on_its_request() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("down", "down")
        found = table(app).cursor_request
        assert found is not None
        assert found.id == LIVE[0].request_id
        app.post_message(
            SampleReceived(reading(last=snapshot(model(sequences=(request(9), *LIVE[:2])))))
        )
        await pilot.pause()
        after = table(app).cursor_request
        assert after is not None
        assert after.id == found.id

    run(script)


def test_enter_opens_a_timeline_that_lives_and_these_close_it() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("down", "down")
        for tokens, key in ((121, "escape"), (122, "enter"), (123, "q")):
            await pilot.press("enter")
            await pilot.pause()
            assert isinstance(app.screen, TimelineScreen)
            text = str(app.screen.query_one(Static).content)
            assert "first step" in text
            if tokens == 121:
                assert "90 tokens, 44.5 tok/s" in text
            newer = request(1, generated=tokens)
            app.post_message(SampleReceived(reading(last=snapshot(model(sequences=(newer,))))))
            await pilot.pause()
            assert f"{tokens} tokens" in str(app.screen.query_one(Static).content)
            await pilot.press(key)
            await pilot.pause()
            assert isinstance(app.screen, Dashboard), key
        assert app.is_running

    run(script)


def test_a_click_on_the_row_of_the_cursor_opens_its_timeline() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.click(RequestTable, offset=(3, 1))
        await pilot.pause()
        assert isinstance(app.screen, TimelineScreen)
        assert app.screen.row.state == "queued"

    run(script)


@pytest.mark.parametrize("keys", [("y",), ("tab", "enter"), ("right", "enter"), ("left", "enter")])
def test_c_cancels_after_a_question(keys: tuple[str, ...]) -> None:
    watch = ScriptedServerMonitor([snapshot()])

    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("down", "c")
        assert isinstance(app.screen, ConfirmDialog)
        assert watch.cancelled == []
        await pilot.press(*keys)
        await until(pilot, lambda: bool(watch.cancelled))
        assert watch.cancelled == [LIVE[2].request_id]

    run(script, watch)


def test_the_question_can_be_denied_and_enter_takes_nothing_away() -> None:
    watch = ScriptedServerMonitor([snapshot()])

    async def script(pilot: Pilot[None], app: TopApp) -> None:
        for keys in (("n",), ("escape",), ("enter",), ("right", "left", "enter")):
            await pilot.press("c")
            assert isinstance(app.screen, ConfirmDialog)
            await pilot.press(*keys)
            await pilot.pause()
            assert isinstance(app.screen, Dashboard), keys
            assert watch.cancelled == [], keys

    run(script, watch)


def test_a_mouse_can_confirm() -> None:
    watch = ScriptedServerMonitor([snapshot()])

    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("delete")
        await pilot.click("#yes")
        await until(pilot, lambda: bool(watch.cancelled))

    run(script, watch)


@pytest.mark.parametrize("key", ["c", "delete"])
def test_c_in_a_timeline_means_that_request(key: str) -> None:
    watch = ScriptedServerMonitor([snapshot()])

    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("down", "down", "down", "enter", key, "y")
        await until(pilot, lambda: watch.cancelled == [LIVE[1].request_id])

    run(script, watch)


def test_what_has_ended_is_not_cancelled() -> None:
    watch = ScriptedServerMonitor([snapshot()])

    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("end", "ctrl+end", "c")
        await pilot.pause()
        assert isinstance(app.screen, Dashboard)
        assert notifications(app) == ["It has ended already."]

    run(script, watch)


def test_a_refusal_to_cancel_is_said() -> None:
    watch = ScriptedServerMonitor([snapshot()])
    watch.cancel_says = ServerUnavailable("it is \x1b[31mgone")

    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("c", "y")
        await until(pilot, lambda: bool(notifications(app)))
        assert "it is" in notifications(app)[0]
        assert "\x1b" not in notifications(app)[0]

    run(script, watch)


def test_c_without_requests_says_so() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("c", "enter")
        await pilot.pause()
        assert isinstance(app.screen, Dashboard)
        assert notifications(app) == ["There is no request under the cursor."]

    run(script, ScriptedServerMonitor([snapshot(model(sequences=()), finished_requests=())]))


def test_e_hides_what_has_ended() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        assert table(app).row_count == len(LIVE) + len(ENDED)
        await pilot.press("e")
        await pilot.pause()
        assert table(app).row_count == len(LIVE)
        await pilot.press("e")
        await pilot.pause()
        assert table(app).row_count == len(LIVE) + len(ENDED)

    run(script)


def test_space_holds_what_is_shown() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("space")
        assert app.screen.query_one(Banner).status == "PAUSED"
        app.post_message(SampleReceived(reading(last=snapshot(model(sequences=())))))
        await pilot.pause()
        assert table(app).row_count == len(LIVE) + len(ENDED)
        await pilot.press("space")
        app.post_message(SampleReceived(reading(last=snapshot(model(sequences=())))))
        await pilot.pause()
        assert table(app).row_count == len(ENDED)
        assert app.screen.query_one(Banner).status == "LIVE"

    run(script)


def test_slash_filters_the_requests_while_typing() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("slash", *"session-1", "space", *"deco")
        await pilot.pause()
        assert column(app, "state") == ["decoding"]
        await pilot.press("enter", "c")  # keys are those of the requests again
        await pilot.pause()
        assert isinstance(app.screen, ConfirmDialog)
        await pilot.press("escape", "slash", *"x")
        await pilot.pause()
        empty = app.screen.query_one("#empty", Static)
        assert str(empty.content) == "no request matches session-1 decox"
        await pilot.press("escape")
        await pilot.pause()
        assert table(app).row_count == len(LIVE) + len(ENDED)
        assert app.focused is table(app)

    run(script)


def test_number_keys_hide_panels_and_the_requests_get_their_room() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        before = table(app).size.height
        for number, panel in enumerate(PANELS, 1):
            await pilot.press(str(number))
            await pilot.pause()
            assert not app.screen.query_one(f"#{panel}").display
        assert table(app).size.height > before + 10
        await pilot.press("2")
        await pilot.pause()
        assert app.screen.query_one("#latency").display
        assert app.screen.query_one("#gauges").display

    run(script)


def test_the_course_of_a_request_is_drawn_in_proportion() -> None:
    phases = RequestPhases(queue_ms=250.0, cached_ms=250.0, prefill_ms=250.0, decode_ms=250.0)
    assert course(phases) == "····░░░░▒▒▒▒████"
    assert course(RequestPhases(queue_ms=5.0)) == 16 * "·"
    assert course(RequestPhases()) == ""


@pytest.mark.parametrize("key", ["q", "ctrl+q", "ctrl+c"])
def test_keys_that_quit(key: str) -> None:
    watch = ScriptedServerMonitor([snapshot()])

    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press(key)
        await pilot.pause()
        assert app.return_code == 0
        assert not app.is_running or app._exit

    run(script, watch)
    assert watch.closed.is_set()


@pytest.mark.parametrize("key", ["question_mark", "f1"])
def test_help_names_every_key(key: str) -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        bindings = (*BaseApp.BINDINGS, *Dashboard.BINDINGS, *RequestTable.BINDINGS)
        described = {each.description for each in bindings if isinstance(each, Binding)}
        await pilot.press(key)
        assert isinstance(app.screen, KeyHelp)
        text = str(app.screen.query_one(Static).content)
        assert [says for says in described if says not in text] == []
        assert "Cancel" in described
        for close in ("escape", "q", "enter", "f1", "question_mark"):
            if not isinstance(app.screen, KeyHelp):
                await pilot.press(key)
            await pilot.press(close)
            await pilot.pause()
            assert isinstance(app.screen, Dashboard), close
        assert app.is_running

    run(script)


def test_the_palette_offers_every_command_and_theme() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("ctrl+p")
        palette = app.screen
        assert isinstance(palette, CommandPalette)
        offered = [command.name for command in palette._commands]
        assert {"Timeline", "Cancel", "Sort", "Ended", "Pause", "Quit", "Keys"} <= {*offered}
        assert {f"Theme: {name}" for name in THEME_NAMES} <= {*offered}
        await pilot.press(*"theme light")
        await pilot.pause()
        await pilot.press("enter")
        await until(pilot, lambda: app.theme == LIGHT)
        await pilot.press("ctrl+p")
        palette = app.screen
        assert isinstance(palette, CommandPalette)
        assert palette._commands[0].name == "Theme: light"
        await pilot.press("escape")

    run(script)


def test_a_terminal_that_gets_too_small_and_large_again() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.resize_terminal(59, 40)
        await until(pilot, lambda: isinstance(app.screen, TerminalTooSmall))
        assert "59×40 is too small" in str(app.screen.query_one(Static).content)
        await pilot.press("c", "question_mark")
        await pilot.resize_terminal(60, 19)
        await until(pilot, lambda: "60×19" in str(app.screen.query_one(Static).content))
        await pilot.resize_terminal(60, 20)
        await until(pilot, lambda: isinstance(app.screen, Dashboard))
        assert table(app).row_count == len(LIVE) + len(ENDED)

    run(script)


@pytest.mark.parametrize("size", [(60, 20), (99, 36), (100, 23), (160, 52), (250, 80)])
def test_nothing_is_cut_off_at_any_size(size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        found = table(app)
        assert found.max_scroll_x == 0
        assert found.region.bottom <= size[1] - 1
        assert found.content_size.height >= 5

    run(script, size=size)


def test_a_server_that_does_not_list_requests_says_so() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        told = ServerSnapshot(server_type="vLLM", models=(model(sequences=None),))
        app.post_message(SampleReceived(reading(last=told)))
        await pilot.pause()
        assert "does not list" in str(app.screen.query_one("#empty", Static).content)

    run(script)


def test_the_foot_of_the_screen_is_for_the_mouse() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        for says in ("Timeline", "Cancel", "Keys", "palette"):
            keys = [key for key in app.screen.query(FooterKey) if key.description == says]
            await pilot.mouse_down(keys[0])
            await until(pilot, lambda: not isinstance(app.screen, Dashboard))
            await pilot.click(offset=(1, 1))  # beside it
            await until(pilot, lambda: isinstance(app.screen, Dashboard))
            await pilot.pause()

    run(script)


def test_columns_are_chosen() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("o")
        await until(pilot, lambda: isinstance(app.screen, ColumnChoice))
        await pilot.press("down", "space")  # the second: prompt
        await pilot.pause()
        labels = [str(option.prompt) for option in app.screen.query_one(SelectionList).options]
        assert "Prompt (hidden)" in labels
        assert sum("hidden" in label for label in labels) == 1
        await pilot.press("enter")
        await until(pilot, lambda: app.screen is app._dashboard)
        keys = [str(key.value) for key in table(app).columns]
        assert "prompt" not in keys
        assert {"model", "state", "answer"} <= {*keys}
        await pilot.press("o")
        await until(pilot, lambda: isinstance(app.screen, ColumnChoice))
        await pilot.press("down", "space", "escape")
        await until(pilot, lambda: app.screen is app._dashboard)
        assert [str(key.value) for key in table(app).columns] == keys

    run(script)


def test_plots_go_back_as_far_as_is_wanted() -> None:
    async def script(pilot: Pilot[None], app: TopApp) -> None:
        gauges = list(app._dashboard.query(Gauge))
        assert {gauge.time_span for gauge in gauges} == {"1 min"}
        for key, span in (("minus", "5 min"), ("minus", "15 min"), ("minus", "15 min")):
            await pilot.press(key)
            assert {gauge.time_span for gauge in gauges} == {span}
        assert "of 15 min" in str(app._dashboard.query_one(SpeedGauge).border_title)
        for span in ("5 min", "1 min", "1 min"):
            await pilot.press("plus")
            assert {gauge.time_span for gauge in gauges} == {span}

    run(script)


def test_the_figures_are_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("x")
        await pilot.pause()
        (path,) = tmp_path.glob("localgen-top-*.json")
        exported = json.loads(path.read_text(encoding="utf-8"))
        assert exported["throughput"]["running"] == app.sample.throughput.running
        assert str(path) in notifications(app)[0]

    run(script)
