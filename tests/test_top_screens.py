"""Snapshots of every screen of `localgen top`, at two sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import top_script
from textual.pilot import Pilot
from textual.widgets import Input, OptionList
from top_script import reading, snapshot, top_app

from localgen.backends.engine_stats import KVTierStats
from localgen.client.snapshot import LatencyStats, ModelCounters, ModelSnapshot, ServerSnapshot
from localgen.tui.feed import SampleReceived, ServerLost
from localgen.tui.gauges.samples import ServerSample

SIZES = pytest.mark.parametrize(
    "size", [(80, 24), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}"
)
Compare = Callable[..., bool]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)


async def _seen(pilot: Pilot[Any], found: ServerSample) -> None:
    pilot.app.post_message(SampleReceived(found))
    await pilot.pause()
    await pilot.pause()


def show(*keys: str, found: ServerSample | None = None) -> Callable[[Pilot[Any]], Any]:
    """A minute of a busy server, then these keys."""

    async def run(pilot: Pilot[Any]) -> None:
        await _seen(pilot, found or reading())
        await pilot.press(*keys)
        await pilot.pause()

    return run


def tiers_reading(*tiers: KVTierStats) -> ServerSample:
    """The sample of a busy server that keeps prefixes in these tiers."""
    last = top_script.model(kv_tiers=tiers, counters=top_script.counters(60.5))
    return reading(last=snapshot(last))


def vllm() -> ServerSnapshot:
    """A server that reports few metrics."""
    other = ModelSnapshot(
        name="meta-llama/Llama-3.1-8B-Instruct",
        running=12,
        waiting=3,
        kv_tokens=65_536,
        kv_used=24_000,
        kv_usage=0.37,
        ttft=LatencyStats(last_ms=81.0, p50_ms=75.0, p99_ms=412.0),
        itl=LatencyStats(last_ms=11.2, p50_ms=10.8, p99_ms=19.0),
        counters=ModelCounters(generated_tokens=1000, prompt_tokens=9000),
    )
    return ServerSnapshot(server_type="vLLM", models=(other,))


@SIZES
def test_dashboard(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(top_app(), terminal_size=size, run_before=show())


@SIZES
def test_timeline(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(top_app(), terminal_size=size, run_before=show("down", "down", "enter"))


@SIZES
def test_confirm_cancel(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(top_app(), terminal_size=size, run_before=show("c"))


@SIZES
def test_help(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(top_app(), terminal_size=size, run_before=show("question_mark"))


@SIZES
def test_palette(snap_compare: Compare, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await show("ctrl+p")(pilot)
        while not pilot.app.screen.query_one(OptionList).option_count:
            await pilot.pause(0.01)
        pilot.app.screen.query_one(Input).cursor_blink = False
        await pilot.pause()

    assert snap_compare(top_app(), terminal_size=size, run_before=run)


@SIZES
def test_paused(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(top_app(), terminal_size=size, run_before=show("space"))


@SIZES
def test_other_server_version(snap_compare: Compare, size: tuple[int, int]) -> None:
    newer = snapshot(top_script.model(counters=top_script.counters(60.5)), version="9.8.7")
    assert snap_compare(top_app(), terminal_size=size, run_before=show(found=reading(last=newer)))


@SIZES
def test_many_gpus_and_models(snap_compare: Compare, size: tuple[int, int]) -> None:
    gpus = tuple(replace(top_script.GPU, index=index) for index in range(8))
    machine = replace(top_script.MACHINE, gpus=gpus)
    models = (top_script.model(), top_script.model("qwen3-4b", running=0, sequences=()))
    many = snapshot(*models, machine=machine)
    assert snap_compare(top_app(), terminal_size=size, run_before=show(found=reading(last=many)))


@pytest.mark.parametrize(
    "size", [(80, 24), (120, 40), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}"
)
def test_tiers(snap_compare: Compare, size: tuple[int, int]) -> None:
    found = tiers_reading(top_script.RAM_TIER, top_script.DISK_TIER)
    assert snap_compare(top_app(), terminal_size=size, run_before=show(found=found))


@SIZES
def test_disk_that_is_not_written(snap_compare: Compare, size: tuple[int, int]) -> None:
    full = replace(top_script.DISK_TIER, error="No space left on device")
    found = tiers_reading(top_script.RAM_TIER, full)
    assert snap_compare(top_app(), terminal_size=size, run_before=show(found=found))


@SIZES
def test_timeline_of_restored_tokens(snap_compare: Compare, size: tuple[int, int]) -> None:
    live = top_script.request(1, restored="4,096 tokens from disk in 0.2 s (54 s saved)")
    found = reading(last=snapshot(top_script.model(sequences=(live,))))
    assert snap_compare(top_app(), terminal_size=size, run_before=show("enter", found=found))


@SIZES
def test_vllm_server(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(top_app(), terminal_size=size, run_before=show(found=reading(last=vllm())))


@SIZES
def test_no_server(snap_compare: Compare, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        pilot.app.post_message(ServerLost("no server answers on /run/localgen/server.sock", 2.0, 3))
        await pilot.pause()

    assert snap_compare(top_app(), terminal_size=size, run_before=run)


@SIZES
def test_lost_server(snap_compare: Compare, size: tuple[int, int]) -> None:
    async def run(pilot: Pilot[Any]) -> None:
        await _seen(pilot, reading())
        pilot.app.post_message(ServerLost("the server went away in mid-answer", 0.5, 1))
        await pilot.pause()

    assert snap_compare(top_app(), terminal_size=size, run_before=run)


def test_smallest_size(snap_compare: Compare) -> None:
    assert snap_compare(top_app(), terminal_size=(60, 20), run_before=show())


def test_too_small(snap_compare: Compare) -> None:
    assert snap_compare(top_app(), terminal_size=(59, 20), run_before=show())


def test_no_models(snap_compare: Compare) -> None:
    empty = ServerSnapshot(
        server_type="localgen", version="0.1.0", machine=top_script.MACHINE, finished_requests=()
    )
    assert snap_compare(
        top_app(), terminal_size=(120, 40), run_before=show(found=reading(last=empty))
    )


@pytest.mark.parametrize("themes", [1, 2, 3, 4])
def test_themes(snap_compare: Compare, themes: int) -> None:
    assert snap_compare(top_app(), terminal_size=(80, 24), run_before=show(*["f2"] * themes))


def test_hostile_names(snap_compare: Compare) -> None:
    evil = top_script.model("\x1b]0;owned\x07[bold red]x[/]\u202e", sequences=(
        top_script.request(1, client="\x1b[2J[@click=app.quit]here[/]"),
    ))  # fmt: skip
    assert snap_compare(
        top_app(), terminal_size=(120, 40), run_before=show(found=reading(last=snapshot(evil)))
    )
