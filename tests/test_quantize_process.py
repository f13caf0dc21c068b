"""Quantizing in a process of its own: preview, progress, stop, resume, end with its parent."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from hf_folders import TINY
from quantize_begun import GPTQ, begun
from tui_quantize import Quantizing

from localgen.backends.errors import (
    InvalidRequest,
    LoadFailed,
    LocalgenError,
    OutOfMemory,
)
from localgen.machine.python_process import python_environment
from localgen.quant import process
from localgen.quant.process import QuantizeProcess
from localgen.quant.request.events import (
    EstimateEvent,
    EvalEvent,
    FinishedEvent,
    ProgressEvent,
    QuantizeEvent,
    RecommendationEvent,
    StoppedEvent,
    UnfinishedEvent,
)
from localgen.quant.request.recipe import Recipe
from localgen.quant.request.request import EvalSet, QuantizeRequest
from localgen.quant.run import dry_run_quantization
from localgen.tui.quantize.runner import QuantizeRunner

Kind = TypeVar("Kind")
ENOUGH_S = 120.0
RTN = replace(GPTQ, recipe=Recipe(method="rtn"), eval_set=EvalSet(samples=2, seq_len=64))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    # first: the library is imported with the cache of the user, and keeps it after this test
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))


def followed(asked: QuantizeRequest, *, looks: bool = False) -> list[QuantizeEvent]:
    work = QuantizeProcess(asked, dry_run=looks)
    try:
        return list(work.events())
    finally:
        work.kill()


def previewed(asked: QuantizeRequest) -> list[QuantizeEvent]:
    """The events of a preview in this process: another one would import torch."""
    told: list[QuantizeEvent] = []
    dry_run_quantization(asked, told.append)
    return told


def the(kind: type[Kind], told: list[QuantizeEvent]) -> Kind:
    """The only event of a type."""
    (found,) = [event for event in told if isinstance(event, kind)]
    return found


def is_alive(pid: int) -> bool:
    """Whether a process runs; also where orphans are not reaped."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_run_ends_with_an_evaluation(tmp_path: Path) -> None:
    told = followed(RTN)
    needs, made = the(EstimateEvent, told), the(FinishedEvent, told)
    assert needs.memory_bytes is not None
    assert 0.5 < needs.memory_bytes / made.peak_bytes < 1.5
    assert (made.path, made.layers, made.resumed) == ("tiny-rtn-4bit", 6, 0)
    original, result = the(EvalEvent, told).rows
    assert (original.name, result.name) == ("tiny", "tiny-rtn-4bit")
    assert result.kl is not None
    assert result.kl > 0
    assert (tmp_path / "tiny-rtn-4bit/config.json").is_file()
    steps = [event.step for event in told if isinstance(event, ProgressEvent)]
    assert list(dict.fromkeys(steps)) == [
        "checking weights",
        "timing a layer",
        "quantizing",
        "measuring tiny",
        "measuring tiny-rtn-4bit",
    ]


def test_preview_writes_nothing(tmp_path: Path) -> None:
    told = followed(GPTQ, looks=True)
    assert the(EstimateEvent, told).description == "gptq, 4 bits in groups of 128"
    assert "--gptq" in [way.option for way in the(RecommendationEvent, told).estimates]
    assert not [
        event
        for event in told
        if isinstance(event, ProgressEvent | FinishedEvent | UnfinishedEvent)
    ]
    assert list(tmp_path.iterdir()) == []


def test_preview_of_a_calibrated_gguf_file() -> None:
    asked = replace(GPTQ, recipe=Recipe(method="awq", group_size=32), gguf="Q4_K_M", mode="fold")
    file, calibration = [event for event in previewed(asked) if isinstance(event, EstimateEvent)]
    assert (file.description, file.memory_bytes) == ("Q4_K_M", None)
    assert file.output == calibration.output == "tiny-awq-Q4_K_M.gguf"
    assert calibration.memory_bytes is not None
    assert calibration.output_bytes is None


def test_stopped_run_is_resumed(tmp_path: Path) -> None:
    work = begun()
    work.stop()
    stopped = the(StoppedEvent, list(work.events()))
    work.kill()
    assert 1 <= stopped.done < stopped.total == 6
    assert the(UnfinishedEvent, previewed(GPTQ)) == UnfinishedEvent(stopped.done, 6)
    other = replace(GPTQ, recipe=Recipe(method="gptq", bits=3), output=Path("tiny-gptq-4bit"))
    with pytest.raises(InvalidRequest, match="was started with another"):
        previewed(other)
    # an error of the process keeps its class
    with pytest.raises(InvalidRequest, match="has an unfinished run"):
        followed(GPTQ)
    made = the(FinishedEvent, followed(replace(GPTQ, resume=True)))
    assert made.resumed == stopped.done
    assert [path.name for path in tmp_path.glob("tiny*")] == ["tiny-gptq-4bit"]


def test_killed_process_is_reported_as_out_of_memory(tmp_path: Path) -> None:
    work = begun()
    assert work.memory_bytes() is not None
    os.kill(work.pid, signal.SIGKILL)
    with pytest.raises(OutOfMemory, match="was killed"):
        list(work.events())
    work.kill()
    assert work.memory_bytes() is None
    assert the(UnfinishedEvent, previewed(GPTQ)).done >= 1


def test_process_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, quantize_begun\n"
        "work = quantize_begun.begun()\n"
        "print(work.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = python_environment()
    tests = str(Path(__file__).parent)
    environment["PYTHONPATH"] = os.pathsep.join([tests, environment.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=tmp_path,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + ENOUGH_S
    while is_alive(pid):
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)
    assert the(UnfinishedEvent, previewed(GPTQ)).done >= 1


def test_errors_with_a_lone_surrogate_arrive(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["\ud800"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LocalgenError, match=r"\\ud800") as raised:
        followed(replace(RTN, model=str(folder)), looks=True)
    assert raised.value.code != "internal_error"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit('no room')", "ended with status 1: no room"),
        ("import os; os.abort()", "ended by signal 6: no error message"),
    ],
)
def test_process_that_dies_is_an_error(
    monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    command = [sys.executable, "-c", program]
    monkeypatch.setattr(process, "python_command", lambda *_: command)
    with pytest.raises(LoadFailed, match=said):
        followed(RTN)


def test_failed_process_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "python_command", lambda *_: ["/no/such/program"])
    with pytest.raises(LoadFailed, match="cannot start a process: No such file"):
        followed(RTN)


def test_screen_runs_the_real_process(tmp_path: Path) -> None:
    """The real process behind the real screen."""
    tui = Quantizing(tmp_path)
    tui.runner = tui.app.quantize_runner = QuantizeRunner(tmp_path)

    async def scene() -> None:
        try:
            async with tui.running() as pilot:
                await pilot.press("f10")
                await tui.until(lambda: len(tui.app.screen_stack) == 2)
                tui.screen._form_panel.set_values(method="rtn", is_measured=False)
                await pilot.pause()
                await tui.until(lambda: tui.is_estimated)
                assert tui.screen._estimate_panel.estimate.error == ""
                await pilot.pause()
                assert "best for this machine" in tui.screen_text()
                await tui.begin(pilot)
                await tui.ended(pilot)
                assert "✓ tiny-rtn-4bit" in tui.screen_text()
        finally:
            tui.close()

    asyncio.run(scene())
    assert (tmp_path / "tiny-rtn-4bit/config.json").is_file()
