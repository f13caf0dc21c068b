"""`localgen doctor`: findings, and the remedy of each."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localgen.cli.main import run_command_line
from localgen.doctor import findings
from localgen.machine import llama_build
from localgen.machine.busy_processes import busy_programs, is_localgen_command
from localgen.machine.llama_build import BrokenBuild, LlamaBuild, parse_features
from localgen.machine.system_info import SystemInfo, cpu_quota


def machine(**changes: object) -> SystemInfo:
    known: dict[str, object] = {
        "system": "Linux",
        "cpu": "A CPU",
        "cpu_flags": frozenset({"avx2", "avx512f"}),
        "physical_cores": 8,
        "logical_cores": 16,
        "cpu_quota": None,
        "ram_bytes": 16 << 30,
        "ram_available_bytes": 8 << 30,
        "nvidia": (),
        "nvidia_error": None,
        "metal": False,
        "displays": (),
    }
    return SystemInfo(**(known | changes))  # type: ignore[arg-type]


def build(**changes: object) -> LlamaBuild:
    known: dict[str, object] = {
        "version": "0.3.36",
        "folder": "/lib",
        "features": ("AVX2", "AVX512"),
        "devices": ("CPU: A CPU",),
        "gpu": False,
        "mmap": True,
        "threads": 8,
    }
    return LlamaBuild(**(known | changes))  # type: ignore[arg-type]


def test_healthy_machine_has_no_findings() -> None:
    assert findings.collect_findings(machine(), build()) == []
    assert findings.collect_findings(machine(nvidia=("H100",)), build(gpu=True)) == []


@pytest.mark.parametrize(
    ("there", "llama", "message", "remedy"),
    [
        (machine(), build(features=("AVX2",)), "without AVX512", "GGML_NATIVE=ON"),
        (machine(nvidia=("H100",)), build(), "without GGML_CUDA", "GGML_CUDA=ON"),
        (machine(displays=("NVIDIA",)), build(), "without GGML_CUDA", "GGML_CUDA=ON"),
        (machine(metal=True), build(), "Apple GPU", "GGML_METAL=ON"),
        (machine(displays=("AMD",)), build(), "AMD GPU", "GGML_VULKAN=ON"),
        (machine(nvidia_error="nvidia-smi: broken"), build(), "nvidia-smi: broken", "driver"),
        (machine(cpu_quota=1.5), build(), "allows 1.5 CPUs", "LOCALGEN_THREADS=1"),
        (machine(ram_available_bytes=1 << 29), build(), "537 MB of 17.2 GB", "smaller model"),
        (machine(), BrokenBuild("no file"), "unusable: no file", "-m pip install"),
    ],
)
def test_each_finding_has_a_remedy(
    there: SystemInfo, llama: LlamaBuild | BrokenBuild, message: str, remedy: str
) -> None:
    (found,) = findings.collect_findings(there, llama)
    assert message in found.message
    assert remedy in found.remedy
    assert found.error is isinstance(llama, BrokenBuild)


def test_amx_that_setup_left_out_needs_another_compiler() -> None:
    there = machine(cpu_flags=frozenset({"avx2", "avx512f", "amx_int8"}))
    (found,) = findings.collect_findings(there, build())
    assert "without AMX_INT8, which this CPU has" in found.message
    assert f" {sys.executable} -m pip install" in found.remedy, "a wheel has no Makefile"
    assert "install clang 16 or later" in found.remedy
    assert not findings.collect_findings(there, build(features=("AVX2", "AVX512", "AMX_INT8")))


def test_a_remedy_names_this_interpreter() -> None:
    (found,) = findings.collect_findings(machine(), BrokenBuild("no file"))
    assert f" {sys.executable} -m pip install" in found.remedy
    assert found.remedy.endswith("--no-binary llama-cpp-python llama-cpp-python")


def test_features_of_a_system_info_line() -> None:
    info = "CUDA : ARCHS = 800 | CPU : SSE3 = 1 | AVX512 = 0 | AVX2 = 1 | "
    assert parse_features(info) == ["ARCHS", "SSE3", "AVX2"]


@pytest.mark.parametrize(
    ("text", "cpus"), [("max 100000", None), ("150000 100000", 1.5), ("", None), ("1 0", None)]
)
def test_cpu_quota(text: str, cpus: float | None) -> None:
    assert cpu_quota(text) == cpus


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "another CPU"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("raise ImportError('libfoo is missing')", "libfoo is missing"),
        ("import sys; sys.exit(3)", "no message"),
    ],
)
def test_broken_build_is_reported_in_one_sentence(
    program: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_build, "python_command", lambda _: [sys.executable, "-c", program])
    found = llama_build.probe_llamacpp()
    assert isinstance(found, BrokenBuild)
    assert reason in found.reason


def test_busy_programs_are_found(tmp_path: Path) -> None:
    program = tmp_path / "compute"
    program.symlink_to("/bin/sh")
    with subprocess.Popen([program, "-c", "while :; do :; done"]) as busy:
        found = {program.name: program.cores for program in busy_programs(1.0)}
        busy.kill()
    assert 0 < found["compute"] < 1.5
    assert "compute" not in [program.name for program in busy_programs(0.1)]


@pytest.mark.parametrize(
    ("command", "is_ours"),
    [
        (["/venv/bin/python", "/venv/bin/localgen", "chat"], True),
        (["/usr/local/bin/localgen", "serve"], True),
        (["python3", "-P", "-m", "localgen.server"], True),
        (["vim", "notes.md", "localgen"], False),
        (["python3", "-m", "localgenerator"], False),
        ([], False),
    ],
)
def test_own_processes_are_recognized(command: list[str], is_ours: bool) -> None:
    assert is_localgen_command(command) is is_ours


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.mark.usefixtures("own_folders")
def test_doctor_on_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command_line(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in (
        "cpu",
        "memory",
        "llama-cpp-python",
        "cpu use",
        "threads",
        "not running",
        str(tmp_path),
    ):
        assert word in text
    assert run_command_line(["doctor", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["llama"]["threads"] >= 1
    assert record["machine"]["ram_bytes"] > 0
    assert not (tmp_path / "run" / "server.sock").exists()


@pytest.mark.usefixtures("own_folders")
def test_doctor_with_a_broken_build(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        llama_build, "python_command", lambda _: [sys.executable, "-c", "raise ImportError('torn')"]
    )
    assert run_command_line(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "ERROR: llama.cpp is unusable: it cannot be imported: ImportError: torn" in text


@pytest.mark.usefixtures("own_folders")
def test_doctor_with_an_unsafe_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    assert run_command_line(["doctor"]) == 1
    assert "ERROR: other users may write to" in capsys.readouterr().out


@pytest.mark.usefixtures("own_folders")
@pytest.mark.parametrize(
    ("number", "complaint"),
    [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "Read-only file system")],
)
def test_doctor_where_nothing_can_be_written(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    number: int,
    complaint: str,
) -> None:
    def refuse(_file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    assert run_command_line(["doctor"]) == 1
    out = capsys.readouterr().out
    assert f"ERROR: cannot write to the folder {tmp_path / 'state'}: {complaint}\n" in out
    assert "no problems found" not in out
    assert list((tmp_path / "state").iterdir()) == []


@pytest.mark.usefixtures("own_folders")
def test_doctor_without_the_xdg_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LOCALGEN_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert run_command_line(["doctor"]) == 1
    assert f"ERROR: XDG_RUNTIME_DIR={tmp_path / 'none'} does not" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
