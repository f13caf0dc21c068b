"""Formatted numbers, bars, plots, and samples made from snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import top_script
from hypothesis import given
from hypothesis import strategies as st
from textual.content import Content

from localgen.backends.engine_stats import KVTierStats, SpeculationStats
from localgen.backends.machine_stats import MachineStats, ReadCost
from localgen.client.snapshot import LatencyStats, ModelCounters, ModelSnapshot, ServerSnapshot
from localgen.tui.gauges.bandwidth import BandwidthGauge
from localgen.tui.gauges.latency import LatencyGauge
from localgen.tui.gauges.memory import MemoryGauge
from localgen.tui.gauges.plots import BAR_EMPTY, BAR_FILLS, bar, plot, stacked_bar
from localgen.tui.gauges.sample_builder import SampleBuilder
from localgen.tui.gauges.samples import (
    BandwidthSample,
    LatencySample,
    MemorySample,
    SpeculationSample,
    ThroughputSample,
    model_memory,
)
from localgen.tui.gauges.speculation import SpeculationGauge
from localgen.tui.gauges.speed import SpeedGauge
from localgen.tui.widgets.alignment import align_ends
from localgen.tui.widgets.numbers import (
    format_bytes,
    format_bytes_of,
    format_duration_ms,
    format_duration_s,
    format_integer,
    format_number,
    format_percent,
    format_rate,
)

HEIGHTS = " ▁▂▃▄▅▆▇█"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (format_rate(None), "—"),
        (format_rate(0.4321), "0.43"),
        (format_rate(45.63), "45.6"),
        (format_rate(1234.4), "1,234"),
        (format_number(0), "0"),
        (format_number(99.96), "100"),
        (format_number(9.996), "10.0"),
        (format_integer(1_234_567), "1.23M"),
        (format_integer(2_500_000_000), "2.50G"),
        (format_integer(12_345), "12,345"),
        (format_duration_ms(0.42), "0.42 ms"),
        (format_duration_ms(999.6), "1.00 s"),
        (format_duration_ms(1234), "1.23 s"),
        (format_duration_ms(125_000), "2m 05s"),
        (format_duration_ms(None), "—"),
        (format_duration_s(59.4), "59s"),
        (format_duration_s(3720), "1h 02m"),
        (format_duration_s(4 * 86_400 + 3600), "4d 01h"),
        (format_bytes(999), "999 B"),
        (format_bytes(999_600), "1.00 MB"),
        (format_bytes(12_345_678_901), "12.3 GB"),
        (format_bytes_of(9e9, 16e9), "9.00 of 16.0 GB"),
        (format_bytes_of(9e8, 16e9), "900 MB of 16.0 GB"),
        (format_bytes_of(None, 16e9), "— of 16.0 GB"),
        (format_percent(0.042), "4.2%"),
        (format_percent(0.425), "42%"),
        (format_percent(1.2), "120%"),
        (format_percent(0), "0%"),
        (format_percent(None), "—"),
    ],
)
def test_numbers_are_formatted(text: str, wanted: str) -> None:
    assert text == wanted


@given(st.floats(0, 1), st.integers(1, 60))
def test_a_bar_is_as_long_as_asked_and_as_full(share: float, width: int) -> None:
    drawn = bar(share, width)
    assert len(drawn) == width
    assert abs(drawn.count("█") - share * width) <= 1


def test_a_bar_of_nothing_known_looks_like_neither_full_nor_empty() -> None:
    assert set(bar(None, 9)) == {"·"}
    assert "·" not in bar(0.0, 9) + bar(1.0, 9)


@given(
    st.lists(st.floats(0, 1e12), min_size=1, max_size=3).filter(sum),
    st.integers(4, 60),
)
def test_parts_of_a_stacked_bar(parts: list[float], width: int) -> None:
    pieces = stacked_bar(parts, sum(parts), width)
    assert sum(map(len, pieces)) == width
    assert pieces[-1].strip(BAR_EMPTY) == ""
    for at, (part, piece, fill) in enumerate(zip(parts, pieces, BAR_FILLS, strict=False)):
        assert piece == fill * len(piece)
        # every part shows, unless the parts before it take all the room
        assert part == 0 or piece or sum(map(len, pieces[:at])) == width


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1e9)), max_size=240),
    st.integers(1, 130),
    st.integers(1, 12),
)
def test_a_plot_fills_its_place(values: list[float | None], width: int, rows: int) -> None:
    lines = plot(values, width, rows, min_points=120)
    assert [len(line) for line in lines] == [width] * rows
    assert set("".join(lines)) <= set(HEIGHTS)


def test_a_plot_begins_at_zero_and_ends_at_its_highest() -> None:
    lines = plot([0.0, 4.0, 8.0, None], 4, 2, min_points=4)
    assert lines == ["  █ ", "▁██ "]


def test_a_plot_grows_at_the_right_and_keeps_its_columns() -> None:
    assert plot([1.0, 2.0], 4, 1, min_points=4)[0] == "  ▄█"
    # six samples in three columns: means of two
    assert plot([2.0, 2.0, 4.0, 4.0, 8.0, 8.0], 3, 1, min_points=6) == ["▂▄█"]


def test_dots_are_drawn_at_their_height_with_gaps() -> None:
    drawn = plot([1.0, None, 16.0, 8.0], 4, 2, min_points=4, dots=True)
    assert drawn == ["  • ", "•  •"]


@pytest.mark.parametrize(("width", "text"), [(12, "left   right"), (9, "left")])
def test_align_ends_fills_the_width(width: int, text: str) -> None:
    assert align_ends(Content("left"), Content("right"), width).plain == text


def grown(*totals: ModelCounters, every_s: float = 1.0) -> ThroughputSample:
    record = SampleBuilder()
    for at, each in enumerate(totals):
        found = record.add_snapshot(
            at * every_s, top_script.snapshot(top_script.model(counters=each, running=0))
        )
    return found.throughput


def test_rates_are_what_the_counters_grow_by_lately() -> None:
    rates = grown(
        *(ModelCounters(generated_tokens=n, prompt_tokens=10) for n in (0, 500, 540, 580))
    )
    assert rates.decode_per_s == pytest.approx(40)
    assert rates.prefill_per_s == 0


def test_the_speed_is_that_of_the_steps_not_of_the_pauses() -> None:
    """88 tokens in 1.5 s of steps, within two seconds of which the last is idle."""
    counters = [
        ModelCounters(generated_tokens=tokens, busy_s=busy_s)
        for tokens, busy_s in ((0, 0.0), (60, 1.0), (90, 1.5), (90, 1.5), (90, 1.5))
    ]
    assert [grown(*counters[:end]).decode_per_s for end in range(2, 6)] == [60, 60, 60, 0]


def test_a_step_of_several_seconds_is_no_pause() -> None:
    record, shown = SampleBuilder(), []
    for second in range(12):
        steps = second // 4  # of 512 tokens in 4 s
        counters = ModelCounters(prompt_tokens=512 * steps, busy_s=4.0 * steps)
        model = top_script.model(counters=counters, running=1)
        found = record.add_snapshot(second, top_script.snapshot(model))
        shown.append(found.throughput.prefill_per_s)
    assert shown[4:] == [128.0] * 8
    ended = top_script.model(counters=counters, running=0)
    for second in (12, 13):
        found = record.add_snapshot(second, top_script.snapshot(ended))
    assert found.throughput.prefill_per_s == 0


def test_one_snapshot_gives_no_rate() -> None:
    assert grown(ModelCounters(generated_tokens=50)).decode_per_s is None


def test_an_engine_that_starts_anew_is_no_negative_speed() -> None:
    rates = grown(*(ModelCounters(generated_tokens=n) for n in (900, 1000, 3)))
    assert rates.decode_per_s is None
    assert min(value for value in rates.decode_series if value is not None) >= 0


def test_the_batch_is_what_the_steps_of_the_last_seconds_had() -> None:
    steps = [ModelCounters(steps=10 * n, step_sequences=35 * n) for n in range(4)]
    assert grown(*steps).batch_size == pytest.approx(3.5)
    assert (
        grown(
            ModelCounters(steps=5, step_sequences=5), ModelCounters(steps=5, step_sequences=5)
        ).batch_size
        is None
    )


def test_values_that_no_model_reports_are_unknown() -> None:
    found = SampleBuilder().add_snapshot(0, ServerSnapshot(server_type="vLLM"))
    assert found.throughput.running is None
    assert found.latency == LatencySample()
    assert found.bandwidth.utilization is None


def test_models_add_up_and_the_busiest_has_the_latency() -> None:
    record = SampleBuilder()
    for second in range(3):
        busy = top_script.model(
            "a",
            running=2,
            counters=ModelCounters(generated_tokens=30 * second),
            ttft=LatencyStats(last_ms=7),
        )
        idle = top_script.model(
            "b", running=0, waiting=0, counters=ModelCounters(generated_tokens=9e9)
        )
        found = record.add_snapshot(second, top_script.snapshot(idle, busy))
    assert found.throughput.decode_per_s == pytest.approx(30)
    assert (found.throughput.running, found.throughput.waiting) == (2, 1)
    assert (found.latency.model, found.latency.ttft.last_ms) == ("a", 7)


def test_the_latencies_of_one_model_are_no_history_of_another() -> None:
    record = SampleBuilder()
    for second in range(6):
        busy, slow = ("a", "b") if second < 3 else ("b", "a")
        found = record.add_snapshot(
            second,
            top_script.snapshot(
                top_script.model(busy, running=2, ttft=LatencyStats(last_ms=ord(busy) + second)),
                top_script.model(slow, running=0, ttft=LatencyStats(last_ms=ord(slow) + second)),
            ),
        )
    assert found.latency.model == "b"
    # the first may have been measured long before
    assert found.latency.ttft_series_ms == (None, *(ord("b") + n for n in range(1, 6)))


def test_a_time_without_a_new_value_is_a_gap() -> None:
    record = SampleBuilder()
    for second, last in enumerate((None, 34.0, 34.0, 34.0, 12.0, 12.0)):
        measured = top_script.model(ttft=LatencyStats(last_ms=last), itl=LatencyStats(last_ms=last))
        found = record.add_snapshot(second, top_script.snapshot(measured))
    assert found.latency.ttft_series_ms == (None, 34.0, None, None, 12.0, None)
    assert found.latency.itl_series_ms == found.latency.ttft_series_ms
    assert found.latency.ttft.last_ms == 12.0


def bandwidth(*costs: ReadCost) -> BandwidthSample:
    record = SampleBuilder()
    for second in range(3):
        totals = ModelCounters(steps=10 * second, context_tokens=10_000 * second)
        models = [
            top_script.model(str(at), counters=totals, read_cost=cost)
            for at, cost in enumerate(costs)
        ]
        found = record.add_snapshot(second, top_script.snapshot(*models))
    return found.bandwidth


def cost(medium: str = "RAM", limit: float | None = 4e9) -> ReadCost:
    return ReadCost(
        weights_bytes=100_000_000,
        kv_token_bytes=1e4,
        medium=medium,
        bytes_per_s=limit,
        how="measured before",
    )


def test_the_share_of_the_bandwidth_is_weights_and_cache_of_each_step() -> None:
    # 10 steps a second of 100 MB, and 10,000 tokens of 10 kB
    found = bandwidth(cost())
    assert found.read_bytes_per_s == pytest.approx(1.1e9)
    assert found.utilization == pytest.approx(1.1 / 4)


def test_models_in_one_memory_share_it_and_the_fullest_memory_counts() -> None:
    assert bandwidth(cost(), cost()).utilization == pytest.approx(2.2 / 4)
    other = bandwidth(cost(), cost("GPU 0", 2e9))
    assert other.medium == "GPU 0"
    assert other.utilization == pytest.approx(1.1 / 2)


def test_an_unknown_limit_is_no_share() -> None:
    found = bandwidth(cost(limit=None))
    assert found.utilization is None
    assert found.read_bytes_per_s == pytest.approx(1.1e9)


def test_plots_get_a_sample_every_half_second() -> None:
    record = SampleBuilder()
    for quarter in range(41):
        found = record.add_snapshot(quarter / 4, top_script.snapshot())
    assert len(found.throughput.decode_series) == 21


def lines(gauge: object, reading: object, width: int = 36, height: int = 10) -> list[str]:
    drawn = gauge.lines(reading, width, height)  # type: ignore[attr-defined]
    return [line.plain for line in drawn]


@pytest.mark.parametrize(
    ("gauge", "part", "scale"),
    [
        (
            SpeedGauge(),
            ThroughputSample(decode_series=(None, 30.0, 61.5), prefill_series=(None, 2_000_000.0)),
            "61.5",
        ),
        (
            SpeedGauge(),
            ThroughputSample(decode_series=(3.0,), prefill_series=(0.0, 2_000_000.0)),
            "2.00M",
        ),
        (
            LatencyGauge(),
            LatencySample(ttft_series_ms=(300.0, 1234.0), itl_series_ms=(20.0,)),
            "1.23 s",
        ),
        (
            LatencyGauge(),
            LatencySample(ttft_series_ms=(1.0,), itl_series_ms=(20.0, 41.4)),
            "41.4 ms",
        ),
        (BandwidthGauge(), BandwidthSample(utilization_series=(0.1, 0.425)), "42%"),
    ],
)
def test_each_plot_says_what_its_top_and_its_foot_are(
    gauge: object, part: object, scale: str
) -> None:
    drawn = lines(gauge, part, 130, 12)  # a column for each sample
    top = next(at for at, line in enumerate(drawn) if line.strip().startswith(scale))
    assert {"█", "•"} & set(drawn[top])
    foot = next(line for line in drawn[top + 1 :] if line.strip().startswith("0 "))
    assert foot.index("0") == drawn[top].index(scale) + len(scale) - 1


def test_a_plot_of_nothing_has_no_scale() -> None:
    drawn = lines(
        SpeedGauge(), ThroughputSample(decode_series=(None, None), prefill_series=(0.0,)), 60, 9
    )
    assert drawn[1:4] == [" " * 60] * 3
    assert drawn[5].strip() == ""
    assert drawn[7].split() == ["0", "▁"]


def test_the_frames_say_of_what_model_and_of_what_process() -> None:
    found = top_script.reading()
    assert LatencyGauge().border_texts(found.latency) == ("of llama-8b", "")
    assert MemoryGauge().border_texts(found.memory) == ("", "server 80.0 MB")
    assert MemoryGauge().border_texts(MemorySample()) == ("", "")


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (18, ["RAM", *["GPU", "busy"] * 8]),
        (10, ["RAM", *["GPU"] * 8]),
        (6, ["RAM", *["GPU"] * 3, "5"]),
        (3, ["RAM", "8"]),
        (2, ["RAM"]),
    ],
)
def test_gpus_that_have_no_room_are_counted(rows: int, wanted: list[str]) -> None:
    gpus = tuple(replace(top_script.GPU, index=index) for index in range(8))
    machine = replace(top_script.MACHINE, gpus=gpus)
    memory = MemorySample(models=(model_memory(top_script.model()),), machine=machine)
    drawn = lines(MemoryGauge(), memory, 60, rows)
    assert len(drawn) <= rows
    found = drawn[next(at for at, line in enumerate(drawn) if line.startswith("RAM")) :]
    assert [line.split()[0] for line in found] == wanted
    if wanted[-1] == "5":
        assert found[-1].startswith("5 more GPUs ")
        assert found[-1].endswith(" 465 of 750 GB")


def test_gauges_fit_where_they_stand() -> None:
    found = top_script.reading()
    parts = [
        (SpeedGauge(), found.throughput),
        (LatencyGauge(), found.latency),
        (BandwidthGauge(), found.bandwidth),
        (MemoryGauge(), found.memory),
        (SpeculationGauge(), found.speculation),
    ]
    for gauge, part in parts:
        for width, height in ((26, 3), (36, 4), (36, 9), (70, 14)):
            if isinstance(gauge, SpeculationGauge) and width < 36:
                continue  # where there is so little room it is left out
            drawn = lines(gauge, part, width, height)
            assert len(drawn) <= max(height, 5), gauge
            assert max(map(len, drawn[:3])) <= width, (gauge, drawn)


def test_unknown_figures_are_dashes_in_every_gauge() -> None:
    assert lines(SpeedGauge(), ThroughputSample())[0].split() == ["decode", "—", "tok/s"]
    assert lines(LatencyGauge(), LatencySample())[1].split() == ["TTFT", "—", "—", "—"]
    assert lines(BandwidthGauge(), BandwidthSample())[0].split() == [
        "read",
        "—",
        "limit",
        "unknown",
    ]
    assert lines(SpeculationGauge(), SpeculationSample())[0] == "drafts —"
    assert lines(MemoryGauge(), MemorySample()) == [""]


def test_model_memory_is_shown_as_text_and_bars() -> None:
    found = MemorySample(models=(model_memory(top_script.model()),), machine=top_script.MACHINE)
    drawn = lines(MemoryGauge(), found, 60)
    assert drawn[0].split()[0] == "llama-8b"
    assert "weights 4.70 GB" in drawn[0]
    assert drawn[1].count("█") < drawn[1].count("░") < len(drawn[1])
    assert "used 2.93 GB" in drawn[2]
    assert "23.0 of 64.0 GB" in drawn[3]
    assert "93.0 of 150 GB" in drawn[4]
    assert drawn[5].startswith("busy 97%  512/700 W  61 °C  1,980 MHz")


def test_unknown_gpu_metrics_are_dashes() -> None:
    machine = MachineStats(gpus=(top_script.GPU.__class__(
        index=1, name="MIG", total_bytes=10, used_bytes=5
    ),))  # fmt: skip
    drawn = lines(MemoryGauge(), MemorySample(models=(), machine=machine), 60)
    assert drawn[0] == "no model is loaded"
    assert "busy —  —/— W  — °C" in drawn[3]


def kept(*models: ModelSnapshot) -> MemorySample:
    return SampleBuilder().add_snapshot(0, top_script.snapshot(*models)).memory


def tiers_only(*tiers: KVTierStats) -> MemorySample:
    return kept(top_script.model(kv_tiers=tiers))


def test_each_tier_has_its_size_tokens_and_saved_time() -> None:
    found = tiers_only(top_script.RAM_TIER, top_script.DISK_TIER)
    drawn = lines(MemoryGauge(), found, 36, 15)
    assert drawn[3] == "weights 4.70 GB  process 13.1 GB", "beside the name is no room"
    assert drawn[4].startswith("KV RAM █")
    assert drawn[4].endswith(" 512 MB of 1.00 GB")
    assert (drawn[5][:19], drawn[5][-8:]) == ("4,096 tokens reused", "5s saved")
    assert drawn[6].startswith("KV disk █")
    assert drawn[6].endswith(" 1.20 of 4.00 GB")
    assert (drawn[7][:20], drawn[7][-12:]) == ("12,288 tokens reused", "2m 00s saved")
    assert drawn[8].startswith("RAM")
    assert {len(line) for line in drawn[4:8]} == {36}
    assert MemoryGauge().border_texts(found)[0] == "· RAM and disk saved 2m 05s"


def test_the_frame_names_only_tiers_that_saved_time() -> None:
    idle = replace(top_script.RAM_TIER, hit_tokens_total=0, saved_s_total=0.0)
    found = tiers_only(idle, top_script.DISK_TIER)
    assert MemoryGauge().border_texts(found)[0] == "· disk saved 2m 00s"
    assert MemoryGauge().border_texts(tiers_only(idle))[0] == ""


def test_tiers_take_no_line_of_models_and_machine() -> None:
    """Without room for two lines each they have one, and none at the height of a small terminal."""
    plain = lines(MemoryGauge(), kept(top_script.model()), 36, 15)
    both = tiers_only(top_script.RAM_TIER, top_script.DISK_TIER)
    for height in range(2, 16):
        drawn = lines(MemoryGauge(), both, 36, height)
        assert len(drawn) <= height
        of_tiers = [line for line in drawn if line.startswith("KV RAM") or "disk" in line]
        rest = lines(MemoryGauge(), kept(top_script.model()), 36, height)
        assert len(of_tiers) == max(0, min(2, height - len(plain)))
        assert [line for line in drawn if line in plain] == rest


def test_a_tier_that_is_not_written_says_why_in_the_panel_and_in_its_frame() -> None:
    full = replace(top_script.DISK_TIER, error="No space left on device")
    found = tiers_only(top_script.RAM_TIER, full)
    drawn = lines(MemoryGauge(), found, 36, 15)
    assert drawn[7] == "not written: No space left on device"
    assert MemoryGauge().border_texts(found)[0] == "· disk: No space left on device"


def test_a_peer_has_no_size() -> None:
    peer = replace(top_script.RAM_TIER, tier="peer", num_bytes=0, limit_bytes=0)
    drawn = lines(MemoryGauge(), tiers_only(peer), 36, 15)
    assert drawn[4].split()[:2] == ["KV", "peer"]
    assert "GB" not in drawn[4]
    assert drawn[5].startswith("4,096 tokens reused")
    failing = tiers_only(replace(peer, error="Connection refused"))
    assert lines(MemoryGauge(), failing, 36, 15)[5] == "no blocks: Connection refused"
    assert MemoryGauge().border_texts(failing)[0] == "· peer: Connection refused"


def test_models_add_up_in_a_tier_and_share_the_disk() -> None:
    a = top_script.model("a", kv_tiers=(top_script.RAM_TIER, top_script.DISK_TIER))
    b = top_script.model("b", kv_tiers=(top_script.DISK_TIER,))
    c = top_script.model("c", kv_tiers=(top_script.RAM_TIER,))
    ram, disk = kept(a, b, c, top_script.model("d")).kv_tiers
    assert (ram.num_bytes, ram.limit_bytes) == (1_024_000_000, 2_000_000_000)
    assert (disk.num_bytes, disk.limit_bytes) == (2_400_000_000, 4_000_000_000)
    assert (disk.hit_tokens_total, disk.saved_s_total, disk.blocks) == (24_576, 240.0, 180)


def test_what_a_server_writes_of_its_tiers_is_inert() -> None:
    evil = replace(top_script.DISK_TIER, tier="\x1b[2J", error="\x9b1m\u202e")
    found = tiers_only(evil)
    drawn = [*lines(MemoryGauge(), found, 60, 15), *MemoryGauge().border_texts(found)]
    assert any(r"\x1b[2J" in line for line in drawn)
    assert not set("\x1b\x9b\u202e") & set("".join(drawn))


def test_many_models_give_way_to_the_machine() -> None:
    models = tuple(model_memory(top_script.model(f"m{number}")) for number in range(9))
    drawn = lines(MemoryGauge(), MemorySample(models=models, machine=top_script.MACHINE), 36, 6)
    assert len(drawn) == 6
    assert drawn[4] == "… 5 more"
    assert drawn[5].startswith("RAM")


def test_a_loading_model_says_how_far_it_is() -> None:
    loading = model_memory(top_script.model(state="loading", progress=0.43))
    drawn = lines(MemoryGauge(), MemorySample(models=(loading,)))
    assert drawn[0] == "llama-8b loading 43%"
    assert bar(0.43, 36) in drawn[1]


def test_cache_share_is_shown_without_token_counts() -> None:
    told = top_script.model(kv_tokens=None, kv_used=None, kv_cached=None, kv_free=None)
    drawn = lines(MemoryGauge(), MemorySample(models=(model_memory(told),)))
    assert drawn[1].endswith("37%")


def test_what_another_server_writes_is_inert_in_every_gauge() -> None:
    evil = "\x1b[2J\x9b1m\u202e"
    told = top_script.model(
        evil,
        read_cost=replace(cost(), medium=evil, how=evil),
        speculation=SpeculationStats(drafters=(evil,), share=0.5),
        counters=ModelCounters(steps=1),
    )
    found = SampleBuilder().add_snapshot(0, top_script.snapshot(told))
    drawn = [
        *lines(BandwidthGauge(), found.bandwidth),
        *lines(SpeculationGauge(), found.speculation),
        *lines(MemoryGauge(), found.memory),
        found.latency.model,
    ]
    assert sum(r"\x1b[2J" in line for line in drawn) == 4
    assert not set("\x1b\x9b\u202e") & set("".join(drawn))


def test_names_of_other_servers_are_inert() -> None:
    found = model_memory(top_script.model("\x1b[31mred\u202e"))
    assert "\x1b" not in found.name
    assert "\u202e" not in found.name
