"""`localgen top` when a server is not found, or lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from textual.pilot import Pilot
from top_script import (
    ENDED,
    LIVE,
    ScriptedServerMonitor,
    model,
    notifications,
    run,
    snapshot,
    table,
    top_app,
    until,
)

from localgen.backends.errors import ServerUnavailable
from localgen.client.errors import ServerNotAnswering
from localgen.tui import feed
from localgen.tui.feed import SampleReceived
from localgen.tui.gauges.samples import ServerSample
from localgen.tui.top.app import TopApp
from localgen.tui.top.banner import Banner, server_facts
from localgen.tui.widgets.notice import Notice

# no automatic retry during a test
LONG_S = 1000.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_RETRY_S", LONG_S)


def said(app: TopApp) -> str:
    return str(app.screen.query_one(Notice).content)


def test_reconnects_after_a_loss() -> None:
    watch = ScriptedServerMonitor(
        [snapshot(), ServerUnavailable("the server went away")],
        [ServerUnavailable("no server answers")],
        [snapshot()],
    )

    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await until(pilot, lambda: app.screen.query_one(Banner).status == "LOST")
        assert "retrying in" in said(app).lower()
        assert app.screen.query_one(Notice).display
        assert table(app).row_count == len(LIVE) + len(ENDED), "what was seen last stays"
        await pilot.press("t")
        await until(pilot, lambda: "no server answers" in said(app))
        await pilot.press("t")
        await until(pilot, lambda: app.screen.query_one(Banner).status == "LIVE")
        assert not app.screen.query_one(Notice).display
        assert notifications(app) == ["The server is back."]

    run(script, watch, first_retry_s=LONG_S)


def test_back_while_it_is_held_is_held_and_no_longer_lost() -> None:
    watch = ScriptedServerMonitor(
        [snapshot(), ServerUnavailable("the server went away")], [snapshot()]
    )

    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await pilot.press("space")
        dashboard = app.screen
        await until(pilot, lambda: dashboard.query_one(Banner).status == "LOST")
        assert dashboard.has_class("-stale")
        await pilot.press("t")
        await until(pilot, lambda: dashboard.query_one(Banner).status == "PAUSED")
        assert not dashboard.has_class("-stale")
        assert not dashboard.query_one(Notice).display
        await pilot.press("space")
        assert dashboard.query_one(Banner).status == "LIVE"

    run(script, watch, first_retry_s=LONG_S)


def test_replicas_of_one_model_are_not_counted_as_models() -> None:
    replicas = [replace(model(), name=f"llama-8b@{each}", replica=each) for each in ("a", "b")]
    facts = server_facts(replace(snapshot(*replicas), num_replicas=3))
    assert facts[-2:] == ("3 replicas", "1 model")
    assert server_facts(snapshot(model()))[-1] == "1 model"


def test_no_server_is_waited_for_and_t_looks_at_once() -> None:
    failures = [[ServerUnavailable("no server answers")] for _ in range(4)]
    watch = ScriptedServerMonitor(*failures, [snapshot()])

    async def play() -> None:
        app = top_app(watch)
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: bool(said(app)))
            assert app.screen.query_one(Banner).status == "WAITING"
            assert "localgen serve starts one" in said(app)
            for _ in range(4):
                await pilot.press("t")
                await pilot.pause(0.02)
            await until(pilot, lambda: app.screen.query_one(Banner).status == "LIVE")
            assert notifications(app) == [], "it was not lost before"

    asyncio.run(play())


def test_a_silent_engine_is_named() -> None:
    silent = snapshot(model(silent_s=12.3), status="degraded")
    watch = ScriptedServerMonitor([silent, ServerUnavailable("gone")], [snapshot()])

    async def script(pilot: Pilot[None], app: TopApp) -> None:
        await until(pilot, lambda: app.screen.query_one(Banner).status == "LOST")
        assert "degraded" in app.screen.query_one(Banner).facts
        await pilot.press("t")
        await until(pilot, lambda: app.screen.query_one(Banner).status == "LIVE")
        assert not app.screen.query_one(Notice).display
        app.on_sample_received(SampleReceived(ServerSample(snapshot=silent)))
        await until(pilot, lambda: "no answer of the engine of llama-8b for 12 s" in said(app))
        assert app.screen.query_one(Notice).display

    run(script, watch, first_retry_s=LONG_S)


def test_no_advice_to_start_a_server_that_runs_but_does_not_answer() -> None:
    watch = ScriptedServerMonitor([ServerNotAnswering("the server (process 12) does not answer")])

    async def play() -> None:
        app = top_app(watch)
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: "process 12" in said(app))
            assert "starts one" not in said(app)

    asyncio.run(play())
