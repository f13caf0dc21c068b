"""benchmarks.gpu runs on the CPU at a small size, and its checks fail if a kernel is wrong."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import pkgutil
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import localgen.backends.cuda.kernels as kernel_modules
from benchmarks import gpu
from benchmarks.answers import Answer, AnswerFailed, decode_tok_s, serving_metrics
from benchmarks.gpu_parts import case, contexts, first_token, peer, peers, run, shapes, startup
from benchmarks.gpu_parts.bench import GpuBench
from benchmarks.gpu_parts.clock import Budget
from benchmarks.gpu_parts.decoder_checks import decoders
from benchmarks.gpu_parts.device import Device, largest_difference
from benchmarks.gpu_parts.kernel_checks import GROUPS, kernels
from benchmarks.gpu_parts.loaded import Loaded
from benchmarks.gpu_parts.parts import PARTS
from benchmarks.gpu_parts.plan import QUICK
from benchmarks.gpu_parts.processes import ROOT, ProcessEnd, Processes
from benchmarks.gpu_parts.report import Figures, GpuReport
from benchmarks.gpu_parts.run import UnitProcess
from localgen.backends.cuda.kernels import activation, norm
from localgen.backends.cuda.kernels.gemm import dense
from localgen.backends.types import Finished, Timings

CPU = Device.found(gpu=False)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units run in this process, one at a time: imports take most of the time of a quick one."""

    def here(unit: UnitProcess, processes: Processes) -> ProcessEnd:
        gpu.measure_part(gpu._options(unit.arguments))
        return ProcessEnd("", ())

    monkeypatch.setattr(run, "run_process", here)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


class PeerHere:
    """A peer in this process. Each would import torch and transformers, which are loaded here."""

    def __init__(self, name: str, folder: Path, *, quick: bool) -> None:
        self.name, self.logits = name, folder / "logits.pt"
        logits, self.round = peer._PEERS[name](QUICK, CPU)
        torch.save(logits, self.logits)

    def answer(self, timeout_s: float) -> dict[str, float]:
        return {}

    def __enter__(self) -> PeerHere:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer and the first start of a model are processes, the others run in this one."""
    in_own_process = peers.Peer
    monkeypatch.setattr(
        peers,
        "Peer",
        lambda name, *rest, **more: (in_own_process if name == peer.STATIC else PeerHere)(
            name, *rest, **more
        ),
    )
    start = startup._start

    def start_here(bench: GpuBench, folder: Path, *, fresh: bool) -> Figures:
        if fresh:
            return start(bench, folder, fresh=True)
        printed = io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stdout(printed):
            arguments = ["first_token", str(folder / "model"), str(time.monotonic()), "--cpu"]
            patch.setattr(sys, "argv", arguments)
            first_token.main()
        return json.loads(printed.getvalue())  # type: ignore[no-any-return]

    monkeypatch.setattr(startup, "_start", start_here)


@pytest.mark.usefixtures("one_process", "few_processes")
def test_a_quick_run_has_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    assert gpu.main(["--quick", "--seed", "1", "--output", str(output)]) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    assert printed.strip() == output.with_suffix(".md").read_text().strip()
    text = output.read_text()
    assert str(tmp_path) not in text
    result = json.loads(text)
    assert {"date", "machine", "versions", "commands", "seed", "part_s"} <= result.keys()
    assert (result["cut"], result["skipped"]) == ([], [])
    assert result["clocks"].keys() == result["part_s"].keys()
    assert list(result["part_s"]) == [
        unit for name in PARTS for unit in PARTS[name].units(name, QUICK)
    ]
    checking = {"device", "modes", "checks"}
    assert {row["part"] for row in result["rows"]} == set(PARTS) - checking
    for part in set(PARTS) - checking:
        assert f"| {part} " in printed
    rates = [
        row["figures"].get("decode_tok_s", row["figures"].get("tok_s")) for row in result["rows"]
    ]
    assert all(value > 0 for values in rates if values for value in values)
    sides = {row["side"] for row in result["rows"] if row["part"] == "peers"}
    assert sides == {"localgen, tiny bf16", *peer.ALONE, *peer.BATCH}
    # the logits of each peer were compared before it was measured
    names = [check["name"] for check in result["checks"]]
    assert sum(name.startswith("logits of ") for name in names) == 3
    # what the first parts found reaches the others
    shares = [row["figures"].get("share_copy") for row in result["rows"] if row["part"] == "single"]
    assert any(shares)
    assert result["modes"] == {shape.name: "graphs, run-ahead" for shape in QUICK.checked_shapes}
    assert "Modes: tiny bf16: graphs, run-ahead" in printed
    profiled = [(table["side"], table["test"]) for table in result["kernel_times"]]
    assert len(profiled) == len(set(profiled)) == 3 * (len(QUICK.step_batches) + 1)
    assert all(kernel["total_us"] > 0 for t in result["kernel_times"] for kernel in t["kernels"])
    assert "tiny int4-g128, prompt of 64: " in printed


def test_long_contexts_are_computed_once() -> None:
    """A turn over a long text computes only its own tokens, and both caches serve one batch."""
    report = GpuReport(True, 1, {}, {}, [])
    bench = GpuBench(CPU, QUICK, report)
    contexts.contexts(bench, Budget("contexts", time.monotonic() + 600, []))
    rows = {(row.test, row.side): row.figures for row in report.rows}
    assert list(rows) == [
        ("256 beside 3 × 32 cached/8 out", "tiny bf16"),
        ("turn of 16 over 256 cached", "tiny bf16"),
        ("3 × 64 cached/8 out", "tiny bf16"),
        ("3 × 64 cached/8 out", "tiny bf16, int8 cache"),
    ]
    turns = rows["turn of 16 over 256 cached", "tiny bf16"]
    assert turns["computed_tokens"] == (16, 16)
    assert len(turns["ttft_p50_ms"]) == QUICK.long_turn.requests
    assert all("decode_tok_s" in figures for figures in rows.values() if figures is not turns)
    plain, int8 = (bench.model(shape) for shape in (QUICK.plain, QUICK.int8_cache))
    assert plain.weights is int8.weights
    # head size 32: int8 values and a float32 scale for each
    assert int8.kv_bytes(1) / plain.kv_bytes(1) == (32 + 4) / 64


def test_a_batch_that_the_memory_does_not_hold_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loaded, "max_kv_tokens", lambda loaded, device: 400)
    report = GpuReport(True, 1, {}, {}, [])
    contexts.contexts(GpuBench(CPU, QUICK, report), Budget("contexts", time.monotonic() + 600, []))
    assert [row.test for row in report.rows] == ["turn of 16 over 256 cached"]
    skipped = dict(report.skipped)
    reason = skipped["256 beside 3 × 32 cached/8 out: tiny bf16"]
    assert reason == "it needs a KV cache of 672 tokens, the memory holds 400"
    assert "3 × 64 cached/8 out: tiny bf16, int8 cache" in skipped


def test_a_step_reads_the_experts_that_its_tokens_use() -> None:
    mixture, dense = Loaded(QUICK.mixture, CPU), Loaded(QUICK.plain, CPU)
    assert dense.read_bytes(1) == dense.step_bytes
    expert_bytes = 2 * 8 * 3 * 128 * 64 * 2  # 2 layers of 8 experts with 3 matrices
    assert mixture.step_bytes - mixture.read_bytes(1) == expert_bytes * 3 / 4
    assert mixture.step_bytes - mixture.read_bytes(2) == expert_bytes * 9 / 16


@pytest.mark.usefixtures("one_process")
def test_a_wrong_kernel_fails_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "checks.json"
    arguments = ["--quick", "--seed", "1", "--only", "checks/norms", "--output", str(output)]
    assert gpu.main(arguments) == 0
    right = norm.rms_norm

    def wrong(*given: Any, **more: Any) -> tuple[Tensor, Tensor]:
        normed, summed = right(*given, **more)
        return normed * 1.02, summed

    monkeypatch.setattr(norm, "rms_norm", wrong)
    assert gpu.main(arguments) == 1
    failed = [check for check in json.loads(output.read_text())["checks"] if not check["passed"]]
    assert {check["name"].split(",")[0] for check in failed} == {"three kernels", "rms_norm"}
    assert failed[-1]["error"] == pytest.approx(0.02, rel=0.2)
    assert failed[-1]["detail"].startswith("output 0, most at [")
    assert failed[-1]["detail"] in output.with_suffix(".md").read_text()


def test_the_largest_difference_is_named() -> None:
    found, wanted = torch.zeros(2, 3), torch.zeros(2, 3)
    found[1, 2] = -4.0
    assert largest_difference(found, wanted) == "most at [1, 2]: -4, wanted 0"
    found[0, 1] = torch.nan
    assert largest_difference(found, wanted) == "most at [0, 1]: nan, wanted 0"
    assert largest_difference(found[0], wanted) == "shape (3,), wanted (2, 3)"


def test_what_a_kernel_does_not_write_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = activation.gated_activation

    def partial(x: Tensor, kind: Any) -> Tensor:
        out = torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype)
        found = right(x, kind)
        out[:, :-1] = found[:, :-1]
        return out

    monkeypatch.setattr(activation, "gated_activation", partial)
    errors = [check.error for check in kernels(CPU, case.QUICK, 1, "gates")]
    assert errors
    assert all(math.isinf(error) for error in errors)


@pytest.mark.parametrize("where", ["before", "", "after"])
def test_what_a_kernel_writes_beyond_its_output_is_seen(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    right = activation.gated_activation

    def beyond(x: Tensor, kind: Any) -> Tensor:
        out = torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype)
        out.copy_(right(x, kind))
        if where:
            at = out.storage_offset() + (-1 if where == "before" else out.numel())
            out.as_strided((1,), (1,), at).fill_(0)
        return out

    monkeypatch.setattr(activation, "gated_activation", beyond)
    for check in kernels(CPU, case.QUICK, 1, "gates"):
        size = r"\(\d+, \d+\) of torch.bfloat16"
        assert check.passed == (not where)
        assert re.fullmatch(
            f"2 bytes {where} an output {size} were overwritten" if where else "", check.problem
        )


def test_a_kernel_that_raises_fails_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(x: Tensor, kind: Any) -> Tensor:
        if kind == "silu":
            raise RuntimeError("an illegal memory access\nand more of it")
        return activation.gated_activation_reference(x, kind)

    monkeypatch.setattr(activation, "gated_activation", broken)
    checks = list(kernels(CPU, case.QUICK, 1, "gates"))
    failed = [check for check in checks if not check.passed]
    assert [check.name for check in failed] == [c.name for c in checks if "silu" in c.name]
    assert 0 < len(failed) < len(checks)
    assert failed[0].line().endswith(": RuntimeError: an illegal memory access")
    # the whole of it is in the file
    assert failed[0].detail.endswith("and more of it\n")
    assert "in broken" in failed[0].detail
    # each case was named before it ran
    assert capsys.readouterr().err.splitlines() == [f"> {check.name}" for check in checks]


def test_a_wrong_kernel_shows_in_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [c.line() for c in decoders(CPU, 1, shapes.CHECKED[0]) if not c.passed] == []
    right = dense.gated_matmul

    def wrong(x: Tensor, weight: Tensor, kind: Any, **more: Any) -> Tensor:
        """Gate and up swapped, but not in the float64 reference."""
        other = weight if x.dtype is torch.float64 else torch.cat(weight.chunk(2)[::-1])
        return right(x, other, kind, **more)

    monkeypatch.setattr("localgen.backends.cuda.model.linear.gated_matmul", wrong)
    failed = [check.name for check in decoders(CPU, 1, shapes.CHECKED[0]) if not check.passed]
    assert "llama: logits of a prompt, in parts, and decoding" in failed
    assert "llama: greedy, graphs, run-ahead" in failed


def test_every_kernel_with_a_reference_is_checked() -> None:
    checks = (check for group in GROUPS for check in kernels(CPU, case.QUICK, 1, group))
    checked = {check.name.split(",")[0] for check in checks}
    for found in pkgutil.walk_packages(kernel_modules.__path__, f"{kernel_modules.__name__}."):
        module = importlib.import_module(found.name)
        names = {name.removesuffix("_reference") for name in vars(module)}
        own = {
            name
            for name in names & set(vars(module))
            if f"{name}_reference" in vars(module)
            and vars(module)[name].__module__ == module.__name__
        }
        assert own <= checked, f"{found.name} has kernels that no case checks"


def test_unknown_parts(capsys: pytest.CaptureFixture[str]) -> None:
    for unknown in ("singel", "singel/8B bf16"):
        with pytest.raises(SystemExit):
            gpu.main(["--quick", "--only", unknown])
        assert "no part 'singel', only device, checks" in capsys.readouterr().err


def test_it_runs_where_only_torch_and_its_companions_are() -> None:
    others = ("msgspec", "fastapi", "httpx", "llama_cpp", "textual", "gguf", "transformers")
    program = f"import sys, benchmarks.gpu; print([n for n in {others} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def _answer(*arrivals: tuple[float, int], sent_s: float = 0.0) -> Answer:
    end = Finished(
        request_id="",
        reason="length",
        timings=Timings(),
        prompt_tokens=1,
        completion_tokens=arrivals[-1][1],
        ctx=100,
    )
    return Answer(sent_s, list(arrivals), end=end)


def test_rates_and_waits_of_answers() -> None:
    early = _answer((1.0, 1), (2.0, 2), (3.0, 4), (4.0, 8))
    late = _answer((2.0, 1), (3.0, 3), (4.0, 5), (9.0, 6), sent_s=1.0)
    assert decode_tok_s([early, late]) == pytest.approx(5.0)
    figures = serving_metrics([early, late])
    assert figures["tok_s"] == pytest.approx(14 / 9)
    assert (figures["ttft_p50_ms"], figures["itl_p50_ms"], figures["itl_p99_ms"]) == (1e3, 1e3, 5e3)
    with pytest.raises(AnswerFailed, match="never decoded together"):
        decode_tok_s([early, _answer((5.0, 1), (6.0, 2))])
    with pytest.raises(AnswerFailed, match="no end"):
        _ = Answer(0.0).finished


def test_the_shapes_are_those_of_llama() -> None:
    assert shapes.PLAIN_8B.spec.num_params == pytest.approx(8.03e9, rel=1e-3)
    assert shapes.PLAIN_1B.spec.num_params == pytest.approx(1.236e9, rel=1e-3)
    assert shapes.INT4_70B.spec.num_params == pytest.approx(70.55e9, rel=1e-3)
    # Qwen3-30B-A3B
    assert shapes.MIXTURE_30B.spec.num_params == pytest.approx(30.53e9, rel=1e-3)


@pytest.mark.parametrize(
    ("arrivals", "expected_s"),
    [
        ([(1.0, 1)], 0.0),
        ([(1.0, 1), (1.1, 16)], 0.0),
        ([(0.0, 1), (1.0, 5), (1.2, 9)], 0.8),  # 4 tokens in 1 s, then 4 in 0.2 s
        ([(0.0, 1), (0.2, 5), (0.4, 9)], 0.0),
    ],
)
def test_capture_time_is_counted_by_tokens(
    arrivals: list[tuple[float, int]], expected_s: float
) -> None:
    assert first_token._capture_s(Answer(0.0, arrivals)) == pytest.approx(expected_s)
