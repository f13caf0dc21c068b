"""benchmarks.gpu runs on the CPU at a small size, and its checks fail if a kernel is wrong."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import localgen.backends.cuda.kernels as kernel_modules
from benchmarks import gpu
from benchmarks.answers import Answer, AnswerFailed, decode_tok_s, serving_metrics
from benchmarks.gpu_parts import case, decoder_checks, peer, peers, shapes
from benchmarks.gpu_parts.bench import GpuBench
from benchmarks.gpu_parts.clock import Budget
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.first_token import _capture_s
from benchmarks.gpu_parts.kernel_checks import kernels
from benchmarks.gpu_parts.report import CorrectnessCheck
from localgen.backends.cuda.kernels import activation, norm
from localgen.backends.cuda.kernels.gemm import dense
from localgen.backends.types import Finished, Timings

CPU = Device.found(gpu=False)


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
    assert set(result["part_s"]) == set(gpu.PARTS)
    assert {row["part"] for row in result["rows"]} == set(gpu.PARTS) - {"checks"}
    for part in set(gpu.PARTS) - {"checks"}:
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


def _no_decoders(device: Device, seed: int) -> Iterator[CorrectnessCheck]:
    yield from ()


def _checked(tmp_path: Path) -> tuple[int, list[str]]:
    """Run the checks alone; returns the exit status and the names of failed checks."""
    output = tmp_path / "checks.json"
    status = gpu.main(["--quick", "--seed", "1", "--only", "checks", "--output", str(output)])
    checks = json.loads(output.read_text())["checks"]
    return status, [check["name"] for check in checks if not check["passed"]]


def test_a_wrong_kernel_fails_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "decoders", _no_decoders)
    assert _checked(tmp_path) == (0, [])
    right = norm.rms_norm

    def wrong(*given: Any, **more: Any) -> tuple[Tensor, Tensor]:
        normed, summed = right(*given, **more)
        return normed * 1.02, summed

    monkeypatch.setattr(norm, "rms_norm", wrong)
    status, failed = _checked(tmp_path)
    assert status == 1
    assert failed
    assert {name.split(",")[0] for name in failed} == {"rms_norm"}


def test_what_a_kernel_does_not_write_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = activation.gated_activation

    def partial(x: Tensor, kind: Any) -> Tensor:
        out = torch.empty(len(x), x.shape[1] // 2, dtype=x.dtype)
        found = right(x, kind)
        out[:, :-1] = found[:, :-1]
        return out

    monkeypatch.setattr(activation, "gated_activation", partial)
    errors = [
        c.error for c in kernels(CPU, case.QUICK, 1) if c.name.startswith("gated_activation,")
    ]
    assert errors
    assert all(math.isinf(error) for error in errors)


def test_a_kernel_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: Tensor, kind: Any) -> Tensor:
        raise RuntimeError("an illegal memory access\nand more of it")

    monkeypatch.setattr(activation, "gated_activation", broken)
    failed = [check for check in kernels(CPU, case.QUICK, 1) if not check.passed]
    assert {check.name.split(",")[0] for check in failed} == {"gated_activation"}
    assert failed[0].line().endswith(": RuntimeError: an illegal memory access")


def test_a_wrong_kernel_shows_in_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_checks, "CHECKED", shapes.CHECKED[:1])
    assert [c.line() for c in decoder_checks.decoders(CPU, 1) if not c.passed] == []
    right = dense.gated_matmul

    def wrong(x: Tensor, weight: Tensor, kind: Any) -> Tensor:
        """Gate and up swapped, but not in the float64 reference."""
        other = weight if x.dtype is torch.float64 else torch.cat(weight.chunk(2)[::-1])
        return right(x, other, kind)

    monkeypatch.setattr("localgen.backends.cuda.model.linear.gated_matmul", wrong)
    failed = [check.name for check in decoder_checks.decoders(CPU, 1) if not check.passed]
    assert "llama: logits of a prompt, in parts, and decoding" in failed
    assert "llama: greedy, graphs, run-ahead" in failed


def test_every_kernel_with_a_reference_is_checked() -> None:
    checked = {check.name.split(",")[0] for check in kernels(CPU, case.QUICK, 1)}
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


def test_parts_that_fail_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(bench: GpuBench, budget: Budget) -> None:
        raise RuntimeError("no more")

    parts = {"checks": (broken, 10.0), "ceilings": gpu.PARTS["ceilings"]}
    monkeypatch.setattr(gpu, "PARTS", parts)
    output = tmp_path / "r.json"
    arguments = ["--quick", "--only", "checks,ceilings", "--output", str(output)]
    assert gpu.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "- part checks: RuntimeError: no more" in printed
    assert "| ceilings | copy of" in printed


def test_unknown_parts_and_a_missing_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--quick", "--only", "singel"])
    assert "no part 'singel', only checks, peers" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err


def test_it_runs_where_only_torch_and_its_companions_are() -> None:
    others = ("msgspec", "fastapi", "httpx", "llama_cpp", "textual", "gguf", "transformers")
    program = f"import sys, benchmarks.gpu; print([n for n in {others} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=peers.ROOT, capture_output=True, text=True, check=True
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
    assert _capture_s(Answer(0.0, arrivals)) == pytest.approx(expected_s)
