"""benchmarks.cpu runs without llama.cpp's tools; its model, rates and ratios are as published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import attention, busy, cpu, fastest_type, random_gguf, steps
from benchmarks.llamacpp_tools import NAMES, Tools
from benchmarks.measure import RATE, ModelLine, Report
from benchmarks.random_gguf import Q6_K, SHAPES, GgufTensor
from benchmarks.speed import LOCALGEN, SERVER
from benchmarks.streams import (
    BenchClient,
    LocalgenBenchClient,
    StreamFailed,
    decode_rate,
    last_first_token_ms,
    longest_gap_ms,
)
from localgen.bench.measured_request import MeasuredRequest, Prompt
from localgen.bench.suite import output_rate
from localgen.config import BUILT_IN_MODEL
from localgen.hub.packaged import BUILT_IN_PATH, SMOLLM2


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_large_model_is_that_of_llama_3_2_1b() -> None:
    tensors = list(random_gguf.tensors(SHAPES["1b"]))
    assert sum(np.prod(t.shape) for t in tensors) == 1_235_814_400
    # as llama-bench reports it for the published Q4_K_M file
    assert sum(random_gguf.num_bytes(t) for t in tensors) / 2**20 == pytest.approx(762.81, abs=0.01)
    finer = [t.name for t in tensors if t.type is Q6_K and "ffn_down" in t.name]
    assert len(finer) == 8
    assert GgufTensor("token_embd.weight", (128_256, 2048), Q6_K) in tensors


def _stream(*arrivals: tuple[float, int], sent_s: float = 0.0) -> MeasuredRequest:
    last_s, tokens = arrivals[-1]
    return MeasuredRequest(sent_s, last_s, arrivals, arrivals[0][0], completion_tokens=tokens)


def test_decode_rate_counts_only_while_all_generate() -> None:
    early = _stream((1.0, 1), (2.0, 2), (3.0, 4), (4.0, 8))
    late = _stream((2.0, 1), (3.0, 3), (4.0, 5), (9.0, 6))
    # between 2 s and 4 s: 6 tokens of the first stream, 4 of the second
    assert decode_rate([early, late]) == pytest.approx(5.0)
    assert decode_rate([early]) == pytest.approx(7 / 3)
    assert output_rate([early, late]) == pytest.approx(14 / 9)
    assert last_first_token_ms([early, late]) == pytest.approx(2000)
    assert longest_gap_ms([early, late]) == pytest.approx(5000)
    with pytest.raises(StreamFailed, match="never generated together"):
        decode_rate([early, _stream((5.0, 1), (6.0, 2))])


def test_ratios_are_taken_round_by_round() -> None:
    report = Report(ModelLine("m", 2**20, 10**9), 3, False, threads=2, load_options={})
    ours = report.add("tg", "ours", RATE, [10.0, 20.0, 90.0])
    theirs = report.add("tg", "theirs", RATE, [10.0, 40.0, 100.0])
    report.ratio(ours, theirs, 0.97, at_least=True)
    report.ratio(ours, theirs, 0.97, at_least=False)
    report.most(report.add("wait", "ours", "ms", [1.0, 5.0, 9.0]), 5.0)
    assert [c.met for c in report.checks] == [False, True, True]
    assert (report.checks[0].value, report.checks[0].low, report.checks[0].high) == (0.9, 0.5, 1.0)
    assert "| m     | 1.00 MiB | 1.00 B |" in report.text()


def test_a_quick_run_without_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    tests = ["alone", "prefix", "turn", "overhead", "help"]
    assert cpu.main(["--quick", "--no-tools", "--output", str(output), "--only", *tests]) == 0
    assert "| model" in capsys.readouterr().out
    text = output.read_text()
    assert str(tmp_path) not in text
    result = json.loads(text)
    assert result["quick"]
    assert {"date", "machine", "versions", "commands", "threads"} <= result.keys()
    sides = {series["side"] for series in result["series"]}
    assert {"localgen", "bare loop", "client", "engine in this process"} <= sides
    assert all(value > 0 for s in result["series"] for value in s["values"] if s["unit"] == RATE)
    # the whole first turn came from the cache
    computed = [c for c in result["checks"] if "prompt computed" in c["name"]]
    assert [c["met"] for c in computed] == [True, True], computed


@pytest.mark.parametrize("installed", [True, False])
def test_drafts_are_a_row_of_the_model_with_real_texts(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the built-in model stands for smollm2, which the tests do not have
    monkeypatch.setattr(cpu, "SMOLLM2", BUILT_IN_MODEL if installed else SMOLLM2)
    output = tmp_path / "result.json"
    options = ["--quick", "--no-tools", "--threads", "1", "--output", str(output)]
    assert cpu.main([*options, "--only", "drafts"]) == 0
    result = json.loads(output.read_text())
    rates = [series for series in result["series"] if series["unit"] == RATE]
    assert {series["test"] for series in rates if series["side"] == "drafts"} == (
        {"code edit", "summary", "chat", "prose"} if installed else set()
    )
    assert all(series["model"]["params"] < 10**7 for series in rates)
    assert result["model"] not in [series["model"] for series in rates]
    assert ("localgen pull smollm2" in str(result["not_compared"])) != installed


class _FixedClient:
    """Answers at a fixed speed, in tokens/s."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def ask(self, prompt: Prompt, max_tokens: int) -> MeasuredRequest:
        return _stream((1.0, 1), (1.0 + (max_tokens - 1) / self._rate, max_tokens))


class _FixedReader:
    """Prefills 100 new tokens in half a second."""

    def ask(self, prompt: Prompt, max_tokens: int) -> MeasuredRequest:
        return MeasuredRequest(1.0, 1.5, ((1.5, 1),), 1.5, prompt_tokens=120, cached_tokens=20)


def test_a_comparison_beside_busy_processes(tmp_path: Path) -> None:
    for name in NAMES:
        script = """#!/bin/sh
echo "{\\"avg_ts\\": ${GOMP_SPINCOUNT:-500}}"
"""
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    report = Report(ModelLine("m", 1, 1), 2, True, 1, {})
    servers: dict[str, list[BenchClient]] = {
        LOCALGEN: [_FixedClient(900.0)],
        f"{LOCALGEN} -t 1": [_FixedClient(1200.0)],
        f"{LOCALGEN} -t 2": [_FixedClient(800.0)],
        SERVER: [_FixedClient(100.0)],
    }
    (workload,) = busy.workloads(Tools(tmp_path), Path("m.gguf"), 8, [1], 0)
    busy.compare(report, servers, workload, 1)
    rates = {series.side: series.median for series in report.series}
    assert [rates[LOCALGEN], rates[SERVER]] == pytest.approx([900.0, 100.0])
    assert rates["llama-bench -t 1"] == 500.0
    assert rates["llama-bench -t 1 GOMP_SPINCOUNT=1000"] == 1000.0
    default, own, best = report.checks
    assert [default.value, own.value, best.value] == pytest.approx([1.8, 0.75, 0.9])
    assert [default.met, own.met, best.met] == [False, False, True]


def test_streams_and_prompts_beside_busy_processes(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_text('#!/bin/sh\necho \'{"speed_tg": 1000, "speed_pp": 500}\'\n')
        (tmp_path / name).chmod(0o755)
    report = Report(ModelLine("m", 1, 1), 1, True, 1, {})
    servers: dict[str, list[BenchClient]] = {LOCALGEN: [_FixedClient(300.0)] * 4}
    four, prompt = busy.workloads(Tools(tmp_path), Path("m.gguf"), 8, [4], 16)
    assert (four.name, prompt.name) == ("tg8 × 4", "pp16")
    busy.compare(report, servers, four, 0)
    rates = {series.side: series.median for series in report.series}
    assert rates[LOCALGEN] == pytest.approx(4 * 300.0)
    assert rates["llama-batched-bench -kvu -t 1"] == 1000.0
    assert prompt.theirs(1, {}) == 500.0
    assert prompt.ours([_FixedReader()]) == pytest.approx(200.0)


class _EvenClient(LocalgenBenchClient):
    """Answers with a token every 10 ms, independent of the load of the machine."""

    def ask(self, prompt: Prompt, max_tokens: int) -> MeasuredRequest:
        arrivals = tuple((number / 100, number) for number in range(1, max_tokens + 1))
        return replace(super().ask(prompt, max_tokens), arrivals=arrivals)


def test_the_fastest_type_against_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastest_type, "LocalgenBenchClient", _EvenClient)
    for name in NAMES:
        script = """#!/bin/sh
case "$*" in *slow*) rate=2;; *) rate=3;; esac
echo '{"avg_ts": '$rate', "speed_tg": '$rate'}'
"""
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    models = {name: tmp_path / f"{name}.gguf" for name in ("slow", "fast")}
    for path in models.values():
        path.symlink_to(BUILT_IN_PATH)
    report = Report(ModelLine("m", 1, 1), 1, True, 1, {})
    fastest_type.compare(report, Tools(tmp_path), models, 1, 8)
    fastest_type.compare(report, Tools(tmp_path), models, 2, 16)
    rates = [(series.side, series.median) for series in report.series]
    assert [rate for _, rate in rates[::2]] == pytest.approx([100.0, 100.0, 200.0, 200.0])
    assert rates[1::2] == [
        ("llama-bench, slow", 2.0),
        ("llama-bench, fast", 3.0),
        ("llama-batched-bench, slow", 2.0),
        ("llama-batched-bench, fast", 3.0),
    ]
    ours = [series for series in report.series if series.side == "localgen, fast"]
    assert [check.value for check in report.checks] == [one.median / 2.0 for one in ours]


def test_attention_writes_every_time_of_both_layouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "attention.json"
    assert attention.main(["--quick", "--output", str(output)]) == 0
    assert "| sequences × tokens each | shared" in capsys.readouterr().out
    result = json.loads(output.read_text())
    assert result["commands"] == ["python -m benchmarks.attention --quick --output attention.json"]
    found = {(one["test"], one["side"]): one["values"] for one in result["series"]}
    decode, copy = "decode step, 2 × 100 tokens", "copy of a sequence, 2 × 100 tokens"
    assert {key: len(values) for key, values in found.items()} == {
        (decode, "shared"): attention.REPEATS,
        (decode, "split"): attention.REPEATS,
        (copy, "split"): 1,
        ("step after 100 tokens", "1 rows"): attention.REPEATS,
        ("step after 100 tokens", "2 rows"): attention.REPEATS,
    }
    assert all(value > 0 for values in found.values() for value in values)


def test_steps_writes_the_median_of_every_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # q4_0 takes 10 ms for each token in the first round and 12 in the second, q8_0 twice that
    token_ms = iter([10.0, 20.0, 12.0, 24.0])

    def fixed_ms(model: object, length: int, counts: Sequence[int]) -> list[list[float]]:
        each_ms = next(token_ms)
        return [[count * each_ms, count * each_ms, 1000.0] for count in counts]

    monkeypatch.setattr(steps, "step_ms", fixed_ms)
    monkeypatch.setattr(steps, "cached", lambda name: BUILT_IN_PATH)
    output = tmp_path / "steps.json"
    arguments = ["--types", "q4_0,q8_0", "--rounds", "2", "--output", str(output)]
    assert steps.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "| q8_0               | 22 ms | 44 ms |" in printed
    assert "| q8_0                  | 1.00 | 2.00 |" in printed
    result = json.loads(output.read_text())
    found = {(one["test"], one["side"]): one["values"] for one in result["series"]}
    assert len(found) == 2 * len(steps.SIZES)
    assert found["step of 1 tokens", "q4_0"] == [10.0, 12.0]
    assert found["step of 16 tokens", "q8_0"] == [320.0, 384.0]


def test_steps_of_a_model_that_cannot_be_quantized(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(name: str) -> Path:
        raise RuntimeError(f"llama.cpp cannot quantize it to {name}")

    monkeypatch.setattr(steps, "cached", refuses)
    assert steps.main(["--types", "q4_0"]) == 1
    assert "error: llama.cpp cannot quantize it to q4_0" in capsys.readouterr().err
