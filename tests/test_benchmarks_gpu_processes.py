"""Parts of benchmarks.gpu that are killed, hang or fail cost only themselves, and are named."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import psutil
import pytest
import torch
from drafting import Guesser, Steps, decoding, speculation_of
from triton.compiler import CompiledKernel

from benchmarks import gpu
from benchmarks.gpu_parts import kernel_checks, peer, peers, run, shapes, workloads
from benchmarks.gpu_parts.bench import GpuBench
from benchmarks.gpu_parts.clock import Budget, Clock
from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.drafts import NUM_DRAFTS, FixedDrafts
from benchmarks.gpu_parts.loaded_kernels import loaded_kernels
from benchmarks.gpu_parts.modes import DEPENDENT_MODE, MODES, best_mode, wrong_operations
from benchmarks.gpu_parts.parts import CALLS, PARTS, Part, most_seconds
from benchmarks.gpu_parts.plan import FULL, QUICK, GpuPlan, full_plan
from benchmarks.gpu_parts.processes import ProcessEnd, Processes
from benchmarks.gpu_parts.report import (
    CorrectnessCheck,
    GpuReport,
    KernelTable,
    KernelTime,
)
from benchmarks.gpu_parts.run import UnitProcess
from benchmarks.gpu_parts.steps import Activity
from localgen.backends.cuda.kernels import dispatch
from localgen.backends.cuda.kernels.dispatch import Kernel, Operation
from localgen.backends.cuda.kernels.launch import record_launches

GIB = 1 << 30
_OPERATIONS: tuple[Operation, ...] = ("dense", "int4", "fp8", "experts", "norm", "rope")
# far more than a test takes: a process that lives so long was not killed
LONG_S = 600


def python(program: str) -> list[str]:
    return [sys.executable, "-u", "-c", program]


def is_running(pid: int) -> bool:
    """True unless the process has ended; nobody may have collected its status."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("program", "limit_s", "problem"),
    [
        ("print('> one')", LONG_S, ""),
        ("raise RuntimeError('no more')", LONG_S, "exit status 1: RuntimeError: no more"),
        ("import os; print('> one'); os.kill(os.getpid(), 11)", LONG_S, "killed by SIGSEGV"),
        (f"import time; time.sleep({LONG_S})", 1.0, "stopped: it took more than 1 s"),
    ],
)
def test_how_a_process_ended(program: str, limit_s: float, problem: str) -> None:
    ended = Processes().run("unit", python(program), limit_s, grace_s=0.0)
    assert ended.problem == problem
    assert ended.last_case == ("one" if "one" in program else "")


def test_output_is_shown_at_once_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('> one'); print('> two', file=sys.stderr); print('beyond')"
    ended = Processes().run("unit", python(program), LONG_S)
    assert ended.lines == ("> one", "> two", "beyond")
    assert ended.last_case == "two"
    assert capsys.readouterr().err.splitlines() == [f"[unit] {line}" for line in ended.lines]


STARTS_ANOTHER = (
    "import subprocess, sys; "
    f"print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep({LONG_S})']).pid)"
)


def has_ended(pid: int) -> bool:
    """Wait for a process that was sent SIGKILL: it is gone a moment later."""
    deadline_s = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return not is_running(pid)


def test_processes_that_a_process_started_end_with_it() -> None:
    ended = Processes().run("unit", python(STARTS_ANOTHER), LONG_S)
    assert has_ended(int(ended.lines[0]))


def test_closing_ends_what_runs(capfd: pytest.CaptureFixture[str]) -> None:
    processes = Processes()
    found: list[ProcessEnd] = []
    program = f"{STARTS_ANOTHER}; import time; time.sleep({LONG_S})"
    thread = threading.Thread(
        target=lambda: found.append(processes.run("unit", python(program), LONG_S))
    )
    thread.start()
    while "[unit]" not in capfd.readouterr().err:
        time.sleep(0.05)
    processes.close()
    thread.join(60)
    assert [ended.problem for ended in found] == ["killed by SIGKILL"]
    assert has_ended(int(found[0].lines[0]))
    with pytest.raises(RuntimeError):
        processes.run("unit", python(program), LONG_S)


# a unit that adds a row and a check, and then ends as `end` says
UNIT = """
import os, signal, sys, time
from pathlib import Path
from benchmarks.gpu_parts.report import CorrectnessCheck, GpuReport

unit, output = sys.argv[1:3]
if unit == "prefix":  # nothing at all
    sys.exit()
report = GpuReport(True, 1, {"cpu": "some", "gpu": None}, {}, [], path=Path(output))
print(f"> first of {unit}")
report.add("part", unit, "side", [{"tok_s": 1.0}])
report.check(CorrectnessCheck(f"{unit}: same", 0.0, 1.0))
print(f"> second of {unit}")
if unit == "curve":
    os.kill(os.getpid(), signal.SIGKILL)
elif unit == "load":
    time.sleep(600)
elif unit == "chats":
    raise RuntimeError("an illegal memory access")
report.add("part", unit, "other side", [{"tok_s": 2.0}])
"""
HANGING_S = 10.0
NAMES = ("curve", "load", "prefix", "chats", "drafts")


def played(unit: UnitProcess, processes: Processes, prefix: Sequence[str] = ()) -> ProcessEnd:
    command = [*prefix, *python(UNIT), unit.unit, str(unit.output)]
    limit_s = HANGING_S if unit.unit == "load" else LONG_S
    return processes.run(unit.unit, command, limit_s, grace_s=0.0)


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts have one side, and their processes do no more than UNIT."""
    monkeypatch.setattr(run, "run_process", played)
    for name in NAMES:
        monkeypatch.setitem(PARTS, name, Part(PARTS[name].run, 30.0))


@pytest.mark.usefixtures("short_parts")
def test_parts_that_end_early_cost_only_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "result.json"
    arguments = ["--quick", "--only", ",".join(NAMES), "--output", str(output)]
    assert gpu.main(arguments) == 1
    result = json.loads(output.read_text())
    # what a process had found before it ended stays, and the parts after it run
    assert [(row["test"], row["side"]) for row in result["rows"]] == [
        *(("device", "side"), ("device", "other side")),
        *(("curve", "side"), ("load", "side"), ("chats", "side")),
        *(("drafts", "side"), ("drafts", "other side")),
    ]
    failed = {check["name"]: check for check in result["checks"] if not check["passed"]}
    reasons = {
        "part curve": "killed by SIGKILL, during: second of curve",
        "part load": "stopped: it took more than 10 s, during: second of load",
        "part prefix": "it wrote no results",
        "part chats": "exit status 1: RuntimeError: an illegal memory access, "
        "during: second of chats",
    }
    assert {name: check["problem"] for name, check in failed.items()} == reasons
    assert "Traceback (most recent call last)" in failed["part chats"]["detail"]
    printed = capsys.readouterr().out
    for name, reason in reasons.items():
        assert f"- {name}: {reason}" in printed
    assert list(result["part_s"]) == ["device", *NAMES]


@pytest.mark.usefixtures("short_parts")
def test_the_first_unit_of_checks_that_fails_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With launches that wait, and under compute-sanitizer where it is installed."""
    monkeypatch.setattr(run, "CHECKING", ("curve", "chats", "drafts"))
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text('#!/bin/sh\necho "checked with $1 $2"\nshift 2\nexec "$@"\n')
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    output = tmp_path / "result.json"
    assert gpu.main(["--quick", "--only", "drafts,chats,curve", "--output", str(output)]) == 1
    result = json.loads(output.read_text())
    assert list(result["diagnoses"]) == ["curve, launches that wait", "curve, memcheck"]
    assert "second of curve" in result["diagnoses"]["curve, launches that wait"]
    assert "checked with --tool memcheck" in result["diagnoses"]["curve, memcheck"]


@pytest.mark.usefixtures("short_parts")
def test_a_run_that_is_ended_ends_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[ProcessEnd] = []

    def interrupted(unit: UnitProcess, processes: Processes, *_: object) -> ProcessEnd:
        if unit.unit == "load":
            threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        command = [*python(UNIT), unit.unit, str(unit.output)]
        ends.append(processes.run(unit.unit, command, LONG_S))
        return ends[-1]

    monkeypatch.setattr(run, "run_process", interrupted)
    output = tmp_path / "result.json"
    with pytest.raises(SystemExit):
        gpu.main(["--quick", "--only", "drafts,load,chats", "--output", str(output)])
    assert [ended.problem for ended in ends] == ["", "killed by SIGKILL"]
    assert [row["test"] for row in json.loads(output.read_text())["rows"]] == ["device"] * 2


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize(("minutes", "most_s"), [("1.0", 60 / 5), ("60", 30.0)])
def test_parts_share_the_minutes_of_a_run(
    minutes: str, most_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five parts of 30 s each."""
    seconds: dict[str, float] = {}

    def noted(unit: UnitProcess, processes: Processes, *_: object) -> ProcessEnd:
        seconds[unit.unit] = unit.seconds
        return ProcessEnd("", ())

    monkeypatch.setattr(run, "run_process", noted)
    arguments = ["--only", ",".join(NAMES), "--output", str(tmp_path / "result.json")]
    gpu.main(["--quick", "--minutes", minutes, *arguments])
    assert [seconds[name] for name in NAMES] == pytest.approx([most_s] * len(NAMES), rel=0.05)


@pytest.mark.usefixtures("short_parts")
def test_a_run_without_time_names_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "left_s", property(lambda clock: -1.0))
    output = tmp_path / "result.json"
    gpu.main(["--quick", "--only", "drafts,load", "--output", str(output)])
    result = json.loads(output.read_text())
    assert result["cut"] == [f"{name}: all of it" for name in ("device", "load", "drafts")]
    assert result["rows"] == []


def test_real_processes_of_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    assert gpu.main(["--quick", "--only", "ceilings", "--output", str(output)]) == 0
    captured = capsys.readouterr()
    assert "| ceilings | copy of" in captured.out
    assert "[device] > three kernels" in captured.err
    assert list(json.loads(output.read_text())["part_s"]) == ["device", "ceilings"]


def test_a_process_ends_itself_at_its_limit(tmp_path: Path) -> None:
    """And shows where it was, although it hangs."""
    unit = UnitProcess("device", True, 1, 60.0, 1.0, tmp_path / "none", tmp_path / "output.json")
    code = (
        "import sys, time\n"
        "from benchmarks import gpu\n"
        "gpu.measure_part = lambda options: time.sleep(600)\n"
        "gpu.main(sys.argv[1:])"
    )
    limited = [sys.executable, "-c", code, *unit.arguments]
    ended = Processes().run("device", limited, LONG_S)
    assert ended.problem.startswith("exit status 1: ")
    assert "Timeout (0:00:01)!" in ended.lines
    assert any(line.endswith(" in main") for line in ended.lines)


@pytest.mark.skipif(Device.found(gpu=True).is_gpu, reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert gpu.main([]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_peer_ends_if_the_comparison_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[peers.Peer] = []

    def broken(bench: GpuBench, other: peers.Peer, budget: Budget) -> None:
        started.append(other)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(peers, "_compare", broken)
    report = GpuReport(True, 1, {}, {}, [])
    bench = GpuBench(Device.found(gpu=False), QUICK, report)
    with pytest.raises(RuntimeError):
        peers.compare(bench, Budget("peers", time.monotonic(), []), peer.STATIC)
    assert started[0]._process.returncode is not None


@pytest.mark.parametrize("gib", [8, 16, 24, 40, 48, 80, 141, 180])
def test_models_fit_the_memory(gib: int) -> None:
    plan = full_plan(gib * GIB)
    smallest = min(shape.weight_bytes for shape in plan.formats)
    largest = max(shape.weight_bytes for shape in (*plan.formats, plan.small))
    # one model with room for keys and values, or two copies of it beside a peer's
    assert largest <= 0.4 * gib * GIB
    assert plan.large.weight_bytes <= 0.7 * gib * GIB
    assert 2 * plan.copy_bytes <= 0.3 * gib * GIB
    assert smallest > 0.5e9
    assert (plan.plain is shapes.PLAIN_8B) == (gib >= 40)
    assert (plan.large is shapes.INT4_70B) == (gib >= 80)
    assert plan.mixture.weight_bytes <= 0.8 * gib * GIB
    assert (plan.mixture is shapes.MIXTURE_30B) == (gib >= 80)
    if gib < 80:
        layers = plan.mixture.spec.num_layers
        assert plan.mixture.name == f"30B-A3B bf16, {layers} of 48 layers"
        more = shapes.with_layers(shapes.MIXTURE_30B, layers + 1)
        assert more.weight_bytes > 0.8 * gib * GIB


def test_the_weight_bytes_are_those_of_llama() -> None:
    assert shapes.PLAIN_8B.weight_bytes == 2 * shapes.PLAIN_8B.spec.num_params
    assert shapes.PLAIN_3B.spec.num_params == pytest.approx(3.21e9, rel=1e-2)
    assert shapes.INT4_8B.weight_bytes == pytest.approx(5.6e9, rel=0.02)


@pytest.mark.parametrize("plan", [FULL, full_plan(24 * GIB)])
def test_three_calls_cover_all_parts_in_time(plan: GpuPlan) -> None:
    assert {name for names in CALLS.values() for name in names} == set(PARTS)
    for names in CALLS.values():
        assert most_seconds(names, plan) <= plan.call_s
        assert sorted(names, key=list(PARTS).index) == list(names)


def checks(failed: str = "") -> list[CorrectnessCheck]:
    names = [mode.check for mode in MODES] + ["logits with graphs, against eager steps"]
    return [
        CorrectnessCheck(
            f"{model}: {name}", 0.0, 1.0, "wrong" if name in failed.split("; ") else ""
        )
        for model in ("llama", "llama int4", "llama int8 cache", "mixture")
        for name in names
    ]


@pytest.mark.parametrize(
    ("failed", "name"),
    [
        ("", "graphs, run-ahead"),
        ("greedy, graphs, run-ahead", "graphs"),
        ("logits with graphs, against eager steps", "eager, run-ahead"),
        ("greedy, graphs, run-ahead; greedy, graphs; greedy, eager, run-ahead", "eager"),
        ("; ".join(mode.check for mode in MODES), "eager (failed its checks)"),
    ],
)
def test_the_best_mode_that_passed_is_used(failed: str, name: str) -> None:
    assert best_mode("llama", checks(failed)).name == name


def test_modes_without_checks() -> None:
    assert best_mode("llama fp8", checks()).name == "graphs, run-ahead (not checked)"
    lost = CorrectnessCheck("part modes/llama fp8", 0.0, 0.0, "killed by SIGSEGV")
    assert best_mode("llama fp8", [*checks(), lost]).name == "eager (failed its checks)"
    # a mode that was not reached has not passed
    reached = [CorrectnessCheck("llama: greedy, eager", 0.0, 1.0)]
    assert best_mode("llama", reached).name == "eager"


def test_the_mode_of_the_checks_is_that_of_the_runner() -> None:
    before = GpuReport(True, 1, {}, {}, [], checks=checks("greedy, graphs, run-ahead"))
    report = GpuReport(True, 1, {}, {}, [])
    bench = GpuBench(Device.found(gpu=False), QUICK, report, before)
    with bench.session(shapes.PLAIN_TINY, 256) as session:
        assert not session.runner.limits.runs_ahead
    with bench.session(shapes.FP8_TINY, 256) as session:
        assert session.runner.limits.runs_ahead
    assert report.modes == {
        "tiny bf16": "graphs",
        "tiny fp8": "graphs, run-ahead (not checked)",
    }


def test_models_run_in_the_mode_of_their_kind() -> None:
    """A mixture in that of the checked mixture, an int8 cache in that of the checked int8 cache."""
    wrong = {"mixture: greedy, graphs, run-ahead", "llama int8 cache: greedy, eager"}
    wrong |= {f"llama int8 cache: {mode.check}" for mode in MODES if mode.graphs}
    made = [
        CorrectnessCheck(check.name, 0.0, 1.0, "wrong" if check.name in wrong else "")
        for check in checks()
    ]
    report = GpuReport(True, 1, {}, {}, [])
    before = GpuReport(True, 1, {}, {}, [], checks=made)
    bench = GpuBench(Device.found(gpu=False), QUICK, report, before)
    for shape in (QUICK.plain, QUICK.int8_cache, QUICK.mixture):
        bench.runner(shape, 256).close()
    assert report.modes == {
        "tiny bf16": "graphs, run-ahead",
        "tiny bf16, int8 cache": "eager, run-ahead",
        "tiny mixture bf16": "graphs",
    }


def test_wrong_operations_are_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong int4 kernel, or one that ends its process, takes no other format along."""
    monkeypatch.setattr(dispatch, "_switched_off", set())
    wrong = [
        CorrectnessCheck("int4_matmul, 33 × 4096 → 4160, groups of 32", 0.5, 0.01),
        CorrectnessCheck("matmul, 33 × 4096 → 4160", 0.001, 0.01),
        CorrectnessCheck("part checks/mixtures", 0.0, 0.0, "killed by SIGSEGV"),
        CorrectnessCheck("rms_norm, 1 × 4096", 0.5, 0.01),
    ]
    report = GpuReport(True, 1, {}, {}, [])
    before = GpuReport(True, 1, {}, {}, [], checks=[*checks(), *wrong])
    bench = GpuBench(Device.found(gpu=False), QUICK, report, before)
    x = torch.empty(1, 256, dtype=torch.bfloat16, device="meta")
    with record_launches(90, 132):
        chosen = {name: dispatch.choose_kernel(name, x) for name in _OPERATIONS}
    assert chosen == {
        "dense": Kernel.GEMV,
        "int4": Kernel.REFERENCE,
        "fp8": Kernel.FP8_GEMM,
        "experts": Kernel.REFERENCE,
        "norm": Kernel.REFERENCE,
        "rope": Kernel.ROPE_AND_STORE_KV,
    }
    bench.runner(shapes.PLAIN_TINY, 256)
    without = "without int4 kernels, without experts kernels, without norm kernels"
    assert report.modes == {"tiny bf16": f"graphs, run-ahead, {without}"}
    one = CorrectnessCheck("project_and_store_kv, 1 × 896 → 14 + 2 × 2 heads", 0.5, 0.01)
    assert wrong_operations([one]) == ["dense"]


def test_every_group_of_kernel_checks_has_operations_to_switch_off() -> None:
    lost = {
        group: wrong_operations([CorrectnessCheck(f"part checks/{group}", 0.0, 0.0, "killed")])
        for group in kernel_checks.GROUPS
    }
    assert all(lost.values())
    assert {name for names in lost.values() for name in names} == set(get_args(Operation))


@pytest.mark.parametrize(
    ("passed", "supported", "measured"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_dependent_launch_is_measured_where_it_passed_its_check(
    passed: bool, supported: bool, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "benchmarks.gpu_parts.bench.supports_dependent_launch", lambda weight: supported
    )
    own = CorrectnessCheck(f"llama: {DEPENDENT_MODE.check}", 0.0, 1.0, "" if passed else "wrong")
    before = GpuReport(True, 1, {}, {}, [], checks=[*checks(), own])
    report = GpuReport(True, 1, {}, {}, [])
    bench = GpuBench(Device.found(gpu=False), QUICK, report, before)
    workloads.single(bench, Budget("single", time.monotonic() + LONG_S, []), "tiny bf16")
    sides = {row.side for row in report.rows if row.part == "single"}
    assert ("tiny bf16, dependent launch" in sides) == measured
    # users do not have it
    assert report.modes == {"tiny bf16": "graphs, run-ahead"}
    assert best_mode("llama", before.checks).mode == MODES[0]


def test_a_fixed_number_of_drafts_is_drafted_in_each_step() -> None:
    """Also where the policy would not: here each draft costs as much as a step."""
    for count in NUM_DRAFTS:
        speculation = FixedDrafts(speculation_of(Guesser(0.5)), count)
        steps = Steps(speculation, lambda tokens: 10.0 * tokens)
        steps.run([decoding()], 40)
        assert steps.lengths[0] == 0, "a plain step is measured first"
        assert set(steps.lengths[-30:]) == {count}


def test_the_kernels_that_ran_are_listed_with_their_registers() -> None:
    def kernel(name: str, module: object) -> CompiledKernel:
        made = object.__new__(CompiledKernel)
        made.name, made.hash, made.module = name, "0123456789abcdef", module
        made.n_regs, made.n_spills, made._module_pid = 128, 16, None
        made.metadata = SimpleNamespace(shared=1024, num_warps=4)
        return made

    kept = [kernel("_loaded", object()), kernel("_compiled_only", None)]
    found = loaded_kernels()
    assert found["_loaded 01234567"] == {
        "registers": 128,
        "spilled_bytes": 16,
        "shared_bytes": 1024,
        "warps": 4,
    }
    assert not any(name.startswith("_compiled_only") for name in found)
    del kept


def test_time_by_kernel() -> None:
    spans = (("a", 0.0, 2.0), ("b", 3.0, 8.0), ("a", 30.0, 34.0), ("a", 34.0, 37.0))
    found = Activity(spans, launches=4)
    assert found.kernel_times(2) == (KernelTime("a", 1.5, 4.5, 3.0), KernelTime("b", 0.5, 2.5, 5.0))
    assert found.busy_and_waits_s == pytest.approx((14e-6, 22e-6))
    text = KernelTable("8B bf16", "decoding × 64", found.kernel_times(2)).text()
    assert text.startswith("8B bf16, decoding × 64: 7 us in 2 kernels\n")
    assert [line.split("|")[1].strip() for line in text.splitlines()[4:]] == ["a", "b"]


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = GpuReport(True, 1, {"cpu": "some"}, {"torch": "2"}, ["a"], ["cut"])
    report.add("single", "test", "side", [{"tok_s": 1.0}, {"tok_s": 2.0}])
    report.check(CorrectnessCheck("one", 0.5, 0.1, detail="most at [0]"))
    report.skipped.append(("peer", "why"))
    report.modes["8B"] = "eager"
    report.add_kernel_times(KernelTable("8B", "test", (KernelTime("a", 1.0, 2.0, 3.0),)))
    report.part_s["single"] = 1.5
    report.write(tmp_path / "a.json")
    assert GpuReport.read(tmp_path / "a.json") == report
