"""The tests of `localgen bench`: what is run, in which order, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_targets import VirtualTarget
from scripted_client import model_info

from localgen.backends.errors import ServerUnavailable
from localgen.bench.energy import Counter, Counters, joules_between, read_counters
from localgen.bench.machine_state import MachineState
from localgen.bench.prompts import WordPrompts
from localgen.bench.report import BenchResult
from localgen.bench.saved_results import mean_figures
from localgen.bench.service_level import ServiceLevel
from localgen.bench.suite import Suite, SuiteRunner, plain_tests, prefix_tests


def energy_at(target: VirtualTarget) -> Counters:
    """Ten watts, counted up to 500 J."""
    return {"package-0": Counter(10 * target.clock.now_s % 500, 500.0)}


def run(target: VirtualTarget, seconds: float) -> Suite:
    runner = SuiteRunner(
        target, WordPrompts(1), clock=target.clock, read_energy=lambda: energy_at(target)
    )
    runner.warm_up()
    return runner.run([*plain_tests(), *prefix_tests()], target.clock.now_s + seconds)


def result(suite: Suite, machine: MachineState | None = None) -> BenchResult:
    info = model_info(description="llama 1B Q4_K - Medium", size_bytes=762 << 20)
    return BenchResult(info, suite, ServiceLevel(), machine or MachineState("EPYC", 2))


def test_figures_are_those_of_the_server() -> None:
    suite = run(VirtualTarget(1000, 50), 600)
    assert suite.left_out == []
    found = mean_figures(result(suite).record())
    for name in ("pp512", "pp512 @ d4096"):
        assert found[name] == pytest.approx(1000, rel=0.01)
    for name in ("tg128", "tg128 @ d4096", "tg128 code edit"):
        assert found[name] == pytest.approx(50, rel=0.01)
    assert found["pp512 ttft"] == pytest.approx(512, rel=0.02)
    assert found["pp512 again ttft"] < 10


def test_each_test_has_the_same_number_of_rounds_at_most_by_one_cycle() -> None:
    suite = run(VirtualTarget(1000, 50), 600)
    rounds = {test.name: len(test.rounds) for test in suite.tests}
    assert rounds["16 sessions"] == 5
    assert rounds["pp512"] == rounds["tg128"] == 10, "they are worth twice the time"


def test_what_does_not_fit_is_left_out_and_named() -> None:
    target = VirtualTarget(100, 20)
    suite = run(target, 40)
    assert target.clock.now_s < 60, "the warm-up is not counted here"
    assert any(line.startswith("pp512 @ d4096: it would take about") for line in suite.left_out)
    assert suite.find("pp512") is not None
    assert suite.find("pp512 @ d4096") is None


@pytest.mark.parametrize(
    ("context", "reason"),
    [(2048, "the context has 2,048 tokens"), (None, "the server does not report its context")],
)
def test_depth_needs_a_context(context: int | None, reason: str) -> None:
    suite = run(VirtualTarget(1000, 50, context), 600)
    assert suite.left_out == [f"{test} @ d4096: {reason}" for test in ("pp512", "tg128")]


def test_prompts_are_new_to_the_server() -> None:
    target = VirtualTarget(1000, 50)
    suite = run(target, 600)
    plain = suite.find("pp512")
    assert plain is not None
    assert max(request.cached_tokens for request in plain.requests) < 5
    deep = suite.find("pp512 @ d4096")
    assert deep is not None
    assert min(request.cached_tokens for request in deep.requests) > 3_500


def test_a_server_that_fails() -> None:
    target = VirtualTarget(1000, 50)
    target.fail = lambda number: "the queue is full" if number > 4 else ""
    with pytest.raises(ServerUnavailable, match="the server failed: the queue is full"):
        run(target, 600)


def test_sessions_that_fail_are_counted() -> None:
    target = VirtualTarget(1000, 50)
    suite = run(target, 600)
    four = suite.find("4 sessions")
    assert four is not None
    target.fail = lambda number: "full" if number % 2 else ""
    four.rounds = [tuple(target.ask(str(at), 8) for at in range(4))]
    text = result(suite).text()
    assert "4 sessions: 2 requests failed: full" in text


def test_the_table_is_that_of_llama_bench() -> None:
    lines = result(run(VirtualTarget(1000, 50), 600)).text().split("\n")
    assert lines[0] == (
        "| model                          |       size |     params | backend    | threads |"
        "            test |                  t/s |"
    )
    assert lines[1] == (
        "| ------------------------------ | ---------: | ---------: | ---------- | ------: |"
        " --------------: | -------------------: |"
    )
    assert lines[2].startswith(
        "| llama 1B Q4_K - Medium         | 762.00 MiB |     6.00 M | CPU        |"
    )
    assert lines[2].endswith("|       2 |           pp512 |       1000.00 ± 0.00 |")


def test_a_narrow_terminal_gets_the_model_once() -> None:
    lines = result(run(VirtualTarget(1000, 50), 600)).text(80).split("\n")
    assert max(map(len, lines)) <= 80
    assert lines[0] == "llama 1B Q4_K - Medium · 762.00 MiB · 6.00 M · CPU · 2 threads"
    assert lines[2].split() == ["|", "test", "|", "t/s", "|"]


def test_the_last_line_is_a_sentence() -> None:
    last = result(run(VirtualTarget(2000, 50), 600)).text().split("\n")[-1]
    assert last.startswith("One person: 50.0 tok/s. ")
    assert "their first word within 1 s and 8 tok/s each" in last


def test_other_programs_are_named() -> None:
    suite = run(VirtualTarget(1000, 50), 30)
    busy = MachineState("EPYC", 2, "powersave", 61.0, (("cc1plus", 1.0),))
    text = result(suite, busy).text()
    assert "EPYC, 2 cores · governor powersave · 61 °C" in text
    assert "other programs compute: cc1plus (1.0 cores)" in text


def test_json_has_the_names_of_llama_bench_and_vllm(tmp_path: Path) -> None:
    record = json.loads(json.dumps(result(run(VirtualTarget(1000, 50), 600)).record()))
    assert {"n_prompt", "n_gen", "n_depth", "avg_ts", "stddev_ts", "samples_ts"} <= {
        *record["tests"][0]
    }
    assert {
        *("request_throughput", "output_throughput", "total_token_throughput", "mean_ttft_ms"),
        *("median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "p99_tpot_ms", "p99_itl_ms"),
        *("p99_e2el_ms", "max_concurrency", "num_prompts", "completed", "duration"),
    } <= {*record["sessions"][0]}


def test_energy_of_a_token() -> None:
    found = result(run(VirtualTarget(1000, 50), 60))
    generation = found.suite.find("tg128")
    assert generation is not None
    assert generation.joules_per_token == pytest.approx(10 / 50, rel=0.01)
    assert "joules per token: pp512 0.01, tg128 0.199, 1 session 0.234" in found.text()
    assert found.record()["tests"][0]["joules_per_token"] == pytest.approx(0.01, rel=0.05)


def test_counters_of_the_processor_packages(tmp_path: Path) -> None:
    for zone, name, energy in (
        ("intel-rapl:0", "package-0", "5000000"),
        ("intel-rapl:1", "package-1", "7000000"),
        ("intel-rapl:0:0", "core", "9000000"),
        ("intel-rapl:2", "psys", "not a number"),
    ):
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(name + "\n")
        (tmp_path / zone / "energy_uj").write_text(energy + "\n")
        (tmp_path / zone / "max_energy_range_uj").write_text("100000000\n")
    found = read_counters(tmp_path)
    assert found == {"package-0": Counter(5, 100), "package-1": Counter(7, 100)}
    later = {"package-0": Counter(6, 100), "package-1": Counter(2, 100)}
    assert joules_between(found, later) == pytest.approx(1 + 95)
    assert joules_between({}, later) is None
    assert read_counters(tmp_path / "none") == {}
