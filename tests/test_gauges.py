"""Figures, bars, plots, and readings made of snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import top_script
from hypothesis import given
from hypothesis import strategies as st
from textual.content import Content

from localgen.backends.machine_stats import MachineUse, ReadCost
from localgen.backends.types import SpeculationStats
from localgen.client.snapshot import Latency, Snapshot, Totals
from localgen.tui.gauges.bandwidth import BandwidthGauge
from localgen.tui.gauges.latency import LatencyGauge
from localgen.tui.gauges.memory import MemoryGauge
from localgen.tui.gauges.plots import EMPTY, FILLS, bar, plot, spread, stacked
from localgen.tui.gauges.sample_builder import Record
from localgen.tui.gauges.samples import BandwidthUse, Drafts, Latencies, Memory, Rates, memory_of
from localgen.tui.gauges.speculation import DraftsGauge
from localgen.tui.gauges.speed import SpeedGauge
from localgen.tui.widgets import numbers

HEIGHTS = " ▁▂▃▄▅▆▇█"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (numbers.rate(None), "—"),
        (numbers.rate(0.4321), "0.43"),
        (numbers.rate(45.63), "45.6"),
        (numbers.rate(1234.4), "1,234"),
        (numbers.number(0), "0"),
        (numbers.number(99.96), "100"),
        (numbers.number(9.996), "10.0"),
        (numbers.count(1_234_567), "1.23M"),
        (numbers.count(2_500_000_000), "2.50G"),
        (numbers.count(12_345), "12,345"),
        (numbers.duration(0.42), "0.42 ms"),
        (numbers.duration(999.6), "1.00 s"),
        (numbers.duration(1234), "1.23 s"),
        (numbers.duration(125_000), "2m 05s"),
        (numbers.duration(None), "—"),
        (numbers.clock(59.4), "59s"),
        (numbers.clock(3720), "1h 02m"),
        (numbers.clock(4 * 86_400 + 3600), "4d 01h"),
        (numbers.size(999), "999 B"),
        (numbers.size(999_600), "1.00 MB"),
        (numbers.size(12_345_678_901), "12.3 GB"),
        (numbers.part_of(9e9, 16e9), "9.00 of 16.0 GB"),
        (numbers.part_of(9e8, 16e9), "900 MB of 16.0 GB"),
        (numbers.part_of(None, 16e9), "— of 16.0 GB"),
        (numbers.percent(0.042), "4.2%"),
        (numbers.percent(0.425), "42%"),
        (numbers.percent(1.2), "120%"),
        (numbers.percent(0), "0%"),
        (numbers.percent(None), "—"),
    ],
)
def test_figures(text: str, wanted: str) -> None:
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
    pieces = stacked(parts, sum(parts), width)
    assert sum(map(len, pieces)) == width
    assert pieces[-1].strip(EMPTY) == ""
    for at, (part, piece, fill) in enumerate(zip(parts, pieces, FILLS, strict=False)):
        assert piece == fill * len(piece)
        # whatever is there is seen, unless those before it have taken all the room
        assert part == 0 or piece or sum(map(len, pieces[:at])) == width


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1e9)), max_size=240),
    st.integers(1, 130),
    st.integers(1, 12),
)
def test_a_plot_fills_its_place(values: list[float | None], width: int, rows: int) -> None:
    lines = plot(values, width, rows, samples=120)
    assert [len(line) for line in lines] == [width] * rows
    assert set("".join(lines)) <= set(HEIGHTS)


def test_a_plot_begins_at_zero_and_ends_at_its_highest() -> None:
    lines = plot([0.0, 4.0, 8.0, None], 4, 2, samples=4)
    assert lines == ["  █ ", "▁██ "]


def test_a_plot_grows_at_the_right_and_keeps_its_columns() -> None:
    assert plot([1.0, 2.0], 4, 1, samples=4)[0] == "  ▄█"
    # six samples in three columns: means of two
    assert plot([2.0, 2.0, 4.0, 4.0, 8.0, 8.0], 3, 1, samples=6) == ["▂▄█"]


@pytest.mark.parametrize(("width", "text"), [(12, "left   right"), (9, "left")])
def test_spread(width: int, text: str) -> None:
    assert spread(Content("left"), Content("right"), width).plain == text


def grown(*totals: Totals, every_s: float = 1.0) -> Rates:
    record = Record()
    for at, each in enumerate(totals):
        found = record.read(at * every_s, top_script.snapshot(top_script.model(totals=each)))
    return found.rates


def test_rates_are_what_the_counters_grow_by_lately() -> None:
    rates = grown(*(Totals(generated_tokens=n, prompt_tokens=10) for n in (0, 500, 540, 580)))
    assert rates.decode_per_s == pytest.approx(40)
    assert rates.prefill_per_s == 0


def test_one_look_tells_no_rate() -> None:
    assert grown(Totals(generated_tokens=50)).decode_per_s is None


def test_an_engine_that_starts_anew_is_no_negative_speed() -> None:
    rates = grown(*(Totals(generated_tokens=n) for n in (900, 1000, 3)))
    assert rates.decode_per_s is None
    assert min(value for value in rates.decode if value is not None) >= 0


def test_the_batch_is_what_the_steps_of_the_last_seconds_had() -> None:
    steps = [Totals(steps=10 * n, step_sequences=35 * n) for n in range(4)]
    assert grown(*steps).batch == pytest.approx(3.5)
    assert grown(Totals(steps=5, step_sequences=5), Totals(steps=5, step_sequences=5)).batch is None


def test_what_no_model_tells_is_not_known() -> None:
    found = Record().read(0, Snapshot(kind="vLLM"))
    assert found.rates.running is None
    assert found.latencies == Latencies()
    assert found.bandwidth.share is None


def test_models_add_up_and_the_busiest_has_the_latency() -> None:
    record = Record()
    for second in range(3):
        busy = top_script.model(
            "a", running=2, totals=Totals(generated_tokens=30 * second), ttft=Latency(last_ms=7)
        )
        idle = top_script.model("b", running=0, waiting=0, totals=Totals(generated_tokens=9e9))
        found = record.read(second, top_script.snapshot(idle, busy))
    assert found.rates.decode_per_s == pytest.approx(30)
    assert (found.rates.running, found.rates.waiting) == (2, 1)
    assert (found.latencies.model, found.latencies.ttft.last_ms) == ("a", 7)


def test_the_latencies_of_one_model_are_no_history_of_another() -> None:
    record = Record()
    for second in range(6):
        busy, slow = ("a", "b") if second < 3 else ("b", "a")
        found = record.read(
            second,
            top_script.snapshot(
                top_script.model(busy, running=2, ttft=Latency(last_ms=ord(busy))),
                top_script.model(slow, running=0, ttft=Latency(last_ms=ord(slow))),
            ),
        )
    assert found.latencies.model == "b"
    assert set(found.latencies.ttft_ms) == {ord("b")}
    assert len(found.latencies.ttft_ms) == 6


def bandwidth(*costs: ReadCost) -> BandwidthUse:
    record = Record()
    for second in range(3):
        totals = Totals(steps=10 * second, context_tokens=10_000 * second)
        models = [
            top_script.model(str(at), totals=totals, read=cost) for at, cost in enumerate(costs)
        ]
        found = record.read(second, top_script.snapshot(*models))
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
    assert found.read_per_s == pytest.approx(1.1e9)
    assert found.share == pytest.approx(1.1 / 4)


def test_models_in_one_memory_share_it_and_the_fullest_memory_counts() -> None:
    assert bandwidth(cost(), cost()).share == pytest.approx(2.2 / 4)
    other = bandwidth(cost(), cost("GPU 0", 2e9))
    assert other.medium == "GPU 0"
    assert other.share == pytest.approx(1.1 / 2)


def test_an_unknown_limit_is_no_share() -> None:
    found = bandwidth(cost(limit=None))
    assert found.share is None
    assert found.read_per_s == pytest.approx(1.1e9)


def test_plots_get_a_sample_every_half_second() -> None:
    record = Record()
    for quarter in range(41):
        found = record.read(quarter / 4, top_script.snapshot())
    assert len(found.rates.decode) == 21


def lines(gauge: object, reading: object, width: int = 36, height: int = 10) -> list[str]:
    drawn = gauge.lines(reading, width, height)  # type: ignore[attr-defined]
    return [line.plain for line in drawn]


@pytest.mark.parametrize(
    ("gauge", "part", "scale"),
    [
        (SpeedGauge(), Rates(decode=(None, 30.0, 61.5), prefill=(None, 2_000_000.0)), "61.5"),
        (SpeedGauge(), Rates(decode=(3.0,), prefill=(0.0, 2_000_000.0)), "2.00M"),
        (LatencyGauge(), Latencies(ttft_ms=(300.0, 1234.0), itl_ms=(20.0,)), "1.23 s"),
        (LatencyGauge(), Latencies(ttft_ms=(1.0,), itl_ms=(20.0, 41.4)), "41.4 ms"),
        (BandwidthGauge(), BandwidthUse(shares=(0.1, 0.425)), "42%"),
    ],
)
def test_each_plot_says_what_its_top_and_its_foot_are(
    gauge: object, part: object, scale: str
) -> None:
    drawn = lines(gauge, part, 130, 12)  # a column for each sample
    top = next(at for at, line in enumerate(drawn) if line.strip().startswith(scale))
    assert "█" in drawn[top]
    foot = next(line for line in drawn[top + 1 :] if line.strip().startswith("0 "))
    assert foot.index("0") == drawn[top].index(scale) + len(scale) - 1


def test_a_plot_of_nothing_has_no_scale() -> None:
    drawn = lines(SpeedGauge(), Rates(decode=(None, None), prefill=(0.0,)), 60, 9)
    assert drawn[1:4] == [" " * 60] * 3
    assert drawn[5].strip() == ""
    assert drawn[7].split() == ["0", "▁"]


def test_the_frames_say_of_what_model_and_of_what_process() -> None:
    found = top_script.reading()
    assert LatencyGauge().frame(found.latencies) == ("llama-8b", "")
    assert MemoryGauge().frame(found.memory) == ("", "server 80.0 MB")
    assert MemoryGauge().frame(Memory()) == ("", "")


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
    memory = Memory(models=(memory_of(top_script.model()),), machine=machine)
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
        (SpeedGauge(), found.rates),
        (LatencyGauge(), found.latencies),
        (BandwidthGauge(), found.bandwidth),
        (MemoryGauge(), found.memory),
        (DraftsGauge(), found.drafts),
    ]
    for gauge, part in parts:
        for width, height in ((26, 3), (36, 4), (36, 9), (70, 14)):
            if isinstance(gauge, DraftsGauge) and width < 36:
                continue  # where there is so little room it is left out
            drawn = lines(gauge, part, width, height)
            assert len(drawn) <= max(height, 5), gauge
            assert max(map(len, drawn[:3])) <= width, (gauge, drawn)


def test_unknown_figures_are_dashes_in_every_gauge() -> None:
    assert lines(SpeedGauge(), Rates())[0].split() == ["decode", "—", "tok/s"]
    assert lines(LatencyGauge(), Latencies())[1].split() == ["TTFT", "—", "—", "—"]
    assert lines(BandwidthGauge(), BandwidthUse())[0].split() == ["read", "—", "limit", "unknown"]
    assert lines(DraftsGauge(), Drafts())[0] == "drafts —"
    assert lines(MemoryGauge(), Memory()) == [""]


def test_the_memory_of_a_model_in_words_and_bars() -> None:
    found = Memory(models=(memory_of(top_script.model()),), machine=top_script.MACHINE)
    drawn = lines(MemoryGauge(), found, 60)
    assert drawn[0].split()[0] == "llama-8b"
    assert "weights 4.70 GB" in drawn[0]
    assert drawn[1].count("█") < drawn[1].count("░") < len(drawn[1])
    assert "used 2.93 GB" in drawn[2]
    assert "23.0 of 64.0 GB" in drawn[3]
    assert "93.0 of 150 GB" in drawn[4]
    assert drawn[5].startswith("busy 97%  512/700 W  61 °C  1,980 MHz")


def test_a_gpu_that_says_little() -> None:
    machine = MachineUse(gpus=(top_script.GPU.__class__(
        index=1, name="MIG", total_bytes=10, used_bytes=5
    ),))  # fmt: skip
    drawn = lines(MemoryGauge(), Memory(models=(), machine=machine), 60)
    assert drawn[0] == "no model is loaded"
    assert "busy —  —/— W  — °C" in drawn[3]


def test_many_models_give_way_to_the_machine() -> None:
    models = tuple(memory_of(top_script.model(f"m{number}")) for number in range(9))
    drawn = lines(MemoryGauge(), Memory(models=models, machine=top_script.MACHINE), 36, 6)
    assert len(drawn) == 6
    assert drawn[4] == "… 5 more"
    assert drawn[5].startswith("RAM")


def test_a_loading_model_says_how_far_it_is() -> None:
    loading = memory_of(top_script.model(state="loading", progress=0.43))
    drawn = lines(MemoryGauge(), Memory(models=(loading,)))
    assert drawn[0] == "llama-8b loading 43%"
    assert bar(0.43, 36) in drawn[1]


def test_a_share_of_the_cache_is_shown_where_that_is_all() -> None:
    told = top_script.model(kv_tokens=None, kv_used=None, kv_cached=None, kv_free=None)
    drawn = lines(MemoryGauge(), Memory(models=(memory_of(told),)))
    assert drawn[1].endswith("37%")


def test_what_another_server_writes_is_inert_in_every_gauge() -> None:
    evil = "\x1b[2J\x9b1m\u202e"
    told = top_script.model(
        evil,
        read=replace(cost(), medium=evil, how=evil),
        speculation=SpeculationStats(drafters=(evil,), share=0.5),
        totals=Totals(steps=1),
    )
    found = Record().read(0, top_script.snapshot(told))
    drawn = [
        *lines(BandwidthGauge(), found.bandwidth),
        *lines(DraftsGauge(), found.drafts),
        *lines(MemoryGauge(), found.memory),
        found.latencies.model,
    ]
    assert sum("␛[2J" in line for line in drawn) == 4
    assert not set("\x1b\x9b\u202e") & set("".join(drawn))


def test_names_of_other_servers_are_inert() -> None:
    found = memory_of(top_script.model("\x1b[31mred\u202e"))
    assert "\x1b" not in found.name
    assert "\u202e" not in found.name
