"""Step times by GGUF type: the measurement with a small model, its cache, its failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from localgen.machine import measurements, step_times
from localgen.machine.python_process import python_environment

TIMES = {"Q4_0": (1e-11, 2e-11, 4e-11, 9e-11)}


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measurements, "measurements_path", lambda: tmp_path / "measured.json")
    monkeypatch.setattr("psutil.getloadavg", lambda: (0.0, 0.0, 0.0))


def test_every_type_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"_LAYERS": 2, "_HIDDEN": 512, "_FFN": 1024, "_HEADS": 8}.items():
        monkeypatch.setattr(step_times, name, value)
    monkeypatch.setattr(step_times, "_KV_SIZE", 512)
    assert step_times.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == step_times.MEASURED_TYPES
    for seconds in found.values():
        assert len(seconds) == 4
        assert all(0 < each < 1e-6 for each in seconds)


def test_step_times_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def measure() -> dict[str, tuple[float, float, float, float]]:
        runs.append(1)
        return TIMES

    monkeypatch.setattr(step_times, "_measure_in_process", measure)
    notices: list[str] = []
    found = [step_times.step_times(notices.append, remeasure=again) for again in (False, False)]
    assert found == [step_times.StepTimes(TIMES)] * 2
    assert len(runs) == len(notices) == 1
    step_times.step_times(notices.append, remeasure=True)
    assert len(runs) == 2


def test_a_failed_measurement_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "_measure_in_process", dict)
    notices: list[str] = []
    assert step_times.step_times(notices.append) is None
    assert "could not be measured" in notices[-1]


def test_not_measured_beside_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.getloadavg", lambda: (99.0, 0.0, 0.0))
    notices: list[str] = []
    assert step_times.step_times(notices.append) is None
    assert "other programs" in notices[0]


@pytest.mark.parametrize("command", [["false"], ["echo", "no JSON"], ["/no/such/program"]])
def test_failed_measurement_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(step_times, "python_command", lambda module: command)
    assert step_times.step_times(lambda line: None) is None
    assert not measurements.measurements_path().exists()


def test_a_killed_measurement_leaves_no_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed = ["sh", "-c", 'touch "$TMPDIR/model.gguf"; kill -ILL $$']
    monkeypatch.setattr(step_times, "python_command", lambda module: killed)
    assert step_times.step_times(lambda line: None) is None
    assert not list(tmp_path.iterdir())


def test_a_busy_machine_measures_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "_measure_in_process", lambda: TIMES)
    notices: list[str] = []
    known = step_times.step_times(notices.append)
    monkeypatch.setattr("psutil.getloadavg", lambda: (99.0, 0.0, 0.0))
    assert step_times.step_times(notices.append, remeasure=True) == known
    assert "other programs" in notices[-1]


def test_no_measurement_without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "find_spec", lambda name: None)
    assert step_times.step_times(lambda line: sys.exit("no notice is expected")) is None


def test_the_build_needs_no_package_for_the_events_of_a_quantization() -> None:
    hidden = "sys.modules.update(dict.fromkeys(('msgspec', 'psutil', 'platformdirs')))"
    program = f"import sys; {hidden}; import localgen.quant.request.events"
    subprocess.run(
        [sys.executable, "-c", program], env=python_environment(), check=True, capture_output=True
    )
