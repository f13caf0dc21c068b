"""Loads of `localgen bench`: rates, concurrency, prompts of files, traces."""

from __future__ import annotations

import json
import math
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
from bench_targets import VirtualTarget, measured
from scripted_client import model_info

from localgen.backends.errors import InvalidRequest
from localgen.bench.datasets import read_prompts, read_trace, trace_queries
from localgen.bench.goodput import Goodput, Probe
from localgen.bench.load import (
    Load,
    LoadGenerator,
    Query,
    arrival_times,
    at_times,
    rate_name,
    synthetic_queries,
)
from localgen.bench.load_plan import LoadPlan, load_plan
from localgen.bench.load_report import LoadResult
from localgen.bench.machine_state import MachineState
from localgen.bench.measured_request import MeasuredRequest, Prompt, Target
from localgen.bench.prompts import WordPrompts
from localgen.bench.saved_results import mean_figures, parse_requirement
from localgen.bench.service_level import ServiceLevel


class SlowTarget(Target):
    """Each answer takes some time; several may run at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._lock = seconds, threading.Lock()
        self.num_running = self.most_running = 0
        self.asked: list[str] = []

    def abort(self) -> None:
        """It has no connection."""

    def ask(
        self, prompt: Prompt, max_tokens: int, json_schema: str | None = None
    ) -> MeasuredRequest:
        sent_s = time.perf_counter()
        assert isinstance(prompt, str)
        with self._lock:
            self.asked.append(prompt)
            self.num_running += 1
            self.most_running = max(self.most_running, self.num_running)
        time.sleep(self._seconds)
        with self._lock:
            self.num_running -= 1
        ended_s = time.perf_counter()
        return MeasuredRequest(sent_s, ended_s, ((ended_s, max_tokens),), ended_s, 1, 0, max_tokens)


def queries() -> Iterator[Query]:
    return (Query(str(number), 4) for number in range(1_000_000))


def test_names_of_rates() -> None:
    assert [rate_name(rate) for rate in (0.0345, 2.5, 1234.5)] == ["0.0345/s", "2.5/s", "1,234/s"]


def test_times_of_a_rate() -> None:
    assert list(islice(arrival_times(4, is_poisson=False), 3)) == [0, 0.25, 0.5]
    times = list(islice(arrival_times(4, is_poisson=True, seed=3), 4000))
    gaps = [late - early for early, late in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05), "exponential"


def test_a_rate_does_not_wait_for_answers() -> None:
    target = SlowTarget(0.3)
    with closing(LoadGenerator(target)) as generator:
        load = generator.open_loop(
            "20/s", at_times(queries(), arrival_times(20, is_poisson=False)), 0.3
        )
    assert 6 <= len(load.requests) <= 7
    assert target.most_running > 3
    assert target.asked == [str(number) for number in range(len(load.requests))]


def test_a_load_ends_when_it_is_enough() -> None:
    with closing(LoadGenerator(SlowTarget(0.0))) as generator:
        timed = at_times(queries(), arrival_times(200, is_poisson=False))
        load = generator.open_loop("x", timed, 60, lambda done: len(done) >= 5)
    assert 5 <= len(load.requests) < 100


def test_concurrency_keeps_a_number_running() -> None:
    target = SlowTarget(0.02)
    with closing(LoadGenerator(target)) as generator:
        load = generator.closed_loop(3, queries(), 0.2)
        once = generator.closed_loop(2, queries(), 0.0)
    assert target.most_running == 3
    assert len(load.requests) > 6
    assert len(once.requests) == 2
    assert load.name == "3 at once"


class HangingTarget(SlowTarget):
    """Answers only when it is aborted, with an error."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self._aborted = threading.Event()

    def abort(self) -> None:
        self._aborted.set()

    def ask(
        self, prompt: Prompt, max_tokens: int, json_schema: str | None = None
    ) -> MeasuredRequest:
        sent_s = time.perf_counter()
        assert self._aborted.wait(60)
        return MeasuredRequest(sent_s, time.perf_counter(), error="aborted")


def test_answers_that_do_not_come_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localgen.bench.load._GRACE_S", 0.2)
    with closing(LoadGenerator(HangingTarget())) as generator:
        timed = at_times(queries(), arrival_times(20, is_poisson=False))
        hanging = generator.open_loop("x", timed, 0.2)
        assert generator.is_stopped
    with closing(LoadGenerator(HangingTarget())) as generator:
        others = generator.closed_loop(2, queries(), 0.2)
    errors = {one.error for one in (*hanging.requests, *others.requests)}
    assert errors == {"not answered 10 s after the time was over"}
    assert len(others.requests) == 2


def test_a_load_on_a_dead_server_ends() -> None:
    target = VirtualTarget(1000, 50)
    target.fail = lambda number: "refused"
    with closing(LoadGenerator(target)) as generator:
        closed = generator.closed_loop(4, queries(), 60)
        timed = at_times(queries(), arrival_times(1000, is_poisson=False))
        opened = generator.open_loop("x", timed, 60)
    assert 50 <= len(closed.requests) < 60
    assert 50 <= len(opened.requests) < 5_000


def test_a_request_counts_from_when_it_was_due() -> None:
    timed = [Query("a", 1, 0.0), Query("b", 1, 0.0), Query("c", 1, 0.1)]
    with closing(LoadGenerator(SlowTarget(0.01))) as generator:
        sent = [one.sent_s for one in generator.open_loop("x", timed, 1).requests]
    assert sent[0] == sent[1] == pytest.approx(sent[2] - 0.1)


def test_shared_prefixes_are_used_in_turn() -> None:
    made = list(islice(synthetic_queries(WordPrompts(1), 4, 9, ["one", "two"]), 4))
    assert [query.prompt.split()[0] for query in made] == ["one", "two", "one", "two"]
    assert len({query.prompt for query in made}) == 4
    assert {query.max_tokens for query in made} == {9}


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    talk = {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "why"}]}
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "output_tokens": 7}\n' + json.dumps(talk))
    wanted = [Query("a", 64), Query("b", 7), Query("why", 64)]
    assert read_prompts(path, 64) == wanted
    path.write_text(json.dumps([{"prompt": "a"}, {"prompt": "b", "output_tokens": 7}, talk]))
    assert read_prompts(path, 64) == wanted, "ShareGPT's files are one array"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it has no prompts"),
        ('{"prompt": ""}', "line 1: give"),
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2: give"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1: give"),
        ('{"conversations": [{"from": "gpt", "value": "x"}]}', "line 1: give"),
        ("[1]", "line 1: give"),
        ('{"prompt": "a"}\n{"prom', "line 2: it is not JSON"),
        ("[" * 100_000, "line 1: it is not JSON"),
    ],
    ids=range(8),
)
def test_invalid_files_of_prompts(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=says):
        read_prompts(path, 64)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        read_prompts(tmp_path / "latin", 64)
    with pytest.raises(InvalidRequest, match=r"--trace .*none: No such file"):
        read_trace(tmp_path / "none")


def trace_line(at_ms: float, tokens: int, *blocks: int) -> str:
    return json.dumps(
        {"timestamp": at_ms, "input_length": tokens, "output_length": 5, "hash_ids": blocks}
    )


def test_a_trace_is_sent_at_its_times_with_its_shared_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [trace_line(3000, 1100, 1, 2, 4), trace_line(1000, 1030, 1, 2, 3), trace_line(1500, 20)]
    path.write_text("\n".join(lines))
    made = list(trace_queries(read_trace(path), WordPrompts(5), 7))
    assert [query.at_s for query in made] == [0, 0.5, 2]
    words = [query.prompt.split() for query in made]
    assert [len(each) for each in words] == [1030, 20, 1100]
    assert words[0][:1024] == words[2][:1024]
    assert words[0][1024:] != words[2][1024:1030], "what is behind the whole blocks is new"
    others = list(trace_queries(read_trace(path), WordPrompts(5), 8))
    assert others[0].prompt != made[0].prompt, "no earlier run has filled the cache"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"timestamp": 1, "input_length": 0, "output_length": 1}',
        '{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": ["x"]}',
        '{"timestamp": "now", "input_length": 5, "output_length": 1}',
        "3",
    ],
)
def test_invalid_traces(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="--trace"):
        read_trace(path)


def test_a_plan_of_the_options(tmp_path: Path) -> None:
    assert load_plan() is None
    assert load_plan(is_search=True) == LoadPlan()
    assert LoadPlan().is_search
    assert load_plan(rate=2.5, is_poisson=True) == LoadPlan(rate=2.5, is_poisson=True)
    plan = load_plan(concurrency="1, 4", input_tokens=9, output_tokens=3, shared_prefix="64x2")
    assert plan == LoadPlan(
        concurrency=(1, 4), input_tokens=9, output_tokens=3, prefix_tokens=64, num_prefixes=2
    )
    assert plan is not None
    assert not plan.is_search
    path = tmp_path / "p"
    path.write_text('{"prompt": "a"}')
    plan = load_plan(rate=1, prompts=path, output_tokens=8)
    assert plan is not None
    assert plan.queries == (Query("a", 8),)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rate": 1, "concurrency": "2"}, "only one of --rate and --concurrency"),
        ({"is_poisson": True}, "--poisson is about the times of --rate"),
        ({"input_tokens": 5}, "--input-len is about a load"),
        ({"output_tokens": 5}, "--output-len is about a load"),
        ({"shared_prefix": "4x4"}, "--shared-prefix is about a load"),
        ({"prompts": Path("p")}, "--prompts is about a load"),
        ({"rate": 1, "prompts": Path("p"), "input_tokens": 5}, "leave it or --prompts out"),
        ({"trace": Path("t"), "shared_prefix": "4x4"}, "leave it or --trace out"),
        ({"trace": Path("t"), "prompts": Path("p")}, "leave --prompts out"),
        ({"trace": Path("t"), "output_tokens": 5}, "leave --output-len out"),
        ({"rate": 0}, "above 0"),
        ({"rate": math.nan}, "above 0"),
        ({"concurrency": "1,,2"}, "give numbers from 1"),
        ({"concurrency": "0"}, "give numbers from 1"),
        ({"concurrency": "1000000000000"}, "give numbers from 1"),
        ({"rate": 1, "shared_prefix": "4096"}, "give TOKENSxNUMBER"),
        ({"rate": 1, "shared_prefix": "0x3"}, "give TOKENSxNUMBER"),
    ],
    ids=range(17),
)
def test_options_without_effect_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        load_plan(**options)  # type: ignore[arg-type]


def result(*loads: Load, goodput: Goodput | None = None) -> LoadResult:
    machine = MachineState("EPYC", 2)
    return LoadResult(model_info(), loads, ServiceLevel(), machine, goodput)


def test_the_latencies_are_drawn_over_the_load() -> None:
    slow = Load("4/s", tuple(measured(2.0) for _ in range(4)), rate=4)
    failed = MeasuredRequest(0, 1, error="queue full")
    fast = Load("0.5/s", (measured(0.2), measured(0.2), failed), rate=0.5)
    lines = result(slow, fast).text().split("\n")
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        *("load", "requests", "failed", "req/s", "t/s"),
        *("TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95", "kept"),
    ]
    assert lines[2].startswith("| 0.5/s      |        3 |      1 |"), "in the order of the load"
    chart = lines[lines.index("95 % of the answered requests are within") :]
    labels = ("TTFT", "TTFT goal", "TPOT goal", "TPOT")
    drawn = [one for line in chart for one in labels if line.rstrip().endswith(f" {one}")]
    # 2 s at the end of the line, goals of 1 s and 125 ms, 10 ms
    assert drawn == list(labels)
    assert [line.strip() for line in chart if "requests" in line][1:] == ["requests/s"]
    assert "0.5/s: 1 failed, the first: queue full" in lines
    assert lines[-1] == ("4/s: 0% of the people get their first word within 1 s and 8 tok/s each.")


def test_the_goodput_is_said_with_its_interval() -> None:
    one = Load("1/s", (measured(0.1),))
    found = Goodput(0.95, [Probe(1.0, 300, 300), Probe(2.0, 60, 100)])
    assert result(one, goodput=found).text().split("\n")[-1] == (
        "Goodput: 1 requests/s (95 %: 1 to 2): of the people who ask at that rate, 95 % get "
        "their first word within 1 s and 8 tok/s each."
    )
    assert result(one, goodput=found).record()["goodput"] == {"rate": 1, "low": 1, "high": 2}
    nothing = result(one, goodput=Goodput(0.95, [Probe(1.0, 0, 10)])).text()
    assert "No rate that was tried gives 95 % of the people" in nothing
    few = result(one, goodput=Goodput(0.95, [Probe(1.0, 20, 20)])).text()
    assert "Goodput: 1 requests/s (too few requests for an interval: give it more --time)" in few
    above = Goodput(0.95, [Probe(1.0, 20, 20), Probe(2.0, 1, 20)])
    below = result(one, goodput=above).text()
    assert "Goodput: 1 requests/s (95 %: below 2; a lower bound takes more --time)" in below
    late = replace(result(one), num_left_out=12).text()
    assert "left out, as it comes after the time (--time): 12 requests of the trace" in late
    assert "There was no time to try a rate" in result(one, goodput=Goodput(0.95)).text()


def test_a_narrow_terminal_gets_fewer_columns() -> None:
    load = Load("1/s", (measured(0.1),))
    lines = result(load, load).text(80).split("\n")
    assert max(map(len, lines)) <= 80
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        *("load", "requests", "failed", "req/s", "TTFT p95", "TPOT p95", "kept"),
    ]


def test_json_has_the_names_of_vllm() -> None:
    record = json.loads(json.dumps(result(Load("2/s", (measured(0.1), measured(0.2)))).record()))
    (load,) = record["loads"]
    assert load["completed"] == 2
    assert load["mean_ttft_ms"] == pytest.approx(150)
    assert load["request_goodput"] * load["duration"] == pytest.approx(2)
    figures = mean_figures(record)
    names = ("ttft", "ttft p95", "tpot", "tpot p95", "kept")
    assert [figures[f"2/s {name}"] for name in names] == pytest.approx([150, 195, 10, 10, 100])
    assert parse_requirement("2/s kept >= 95").check(record)[0]
    assert not parse_requirement("2/s ttft p95 < 150").check(record)[0]


def test_prompts_have_the_tokens_that_were_asked_for() -> None:
    prompts = WordPrompts(1)
    assert len(prompts.make(100).split()) == 100
    counts = Counter(prompts.make(500).split()).values()
    assert max(counts) - min(counts) <= 1
    prompts.count("a b c d", 8)
    assert len(prompts.make(100).split()) == 50
    assert prompts.like(10, random.Random(1)) == prompts.like(10, random.Random(1))
    target = VirtualTarget(1000, 50)
    assert target.ask(prompts.make(8), 1).cached_tokens == 0
