"""`localgen quantize`: valid input, invalid input, Ctrl+C, and resuming."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hf_folders import TINY
from models import TINY_GGUF
from rich.console import Console

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from localgen.cli import errors, quantize_report
from localgen.cli.main import run_command_line
from localgen.hub.quant_choice import AvailableMemory
from localgen.machine.python_process import python_command, python_environment
from localgen.machine.step_times import StepTimes
from localgen.quant import compare, originals
from localgen.quant.advice import best_method, estimate_methods
from localgen.quant.job import QuantizeJob
from localgen.quant.request.step_eta import StepEta

INVALID = errors.EXIT_STATUS_BY_CODE["invalid_request"]
NOT_FOUND = errors.EXIT_STATUS_BY_CODE["model_not_found"]
GPTQ = (
    *("quantize", "tiny", "--gptq", "--rounding-steps", "4"),
    *("--samples", "24", "--seq-len", "128", "--no-eval"),
)
QUICK = ("--samples", "4", "--seq-len", "64", "--eval-samples", "2")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A working folder, an empty cache, and no server for measuring speed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("localgen.quant.run.measure_tokens_per_s", lambda path: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """What an uninterrupted run made and reported.

    In a process of its own: this one's peak of memory includes all tests before.
    """
    folder = tmp_path_factory.mktemp("whole")
    command = python_command("localgen.cli.main", *GPTQ, "--json")
    environment = python_environment() | {"LOCALGEN_STATE_DIR": str(folder / "state")}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True)
    return folder / "tiny-gptq-4bit", json.loads(done.stdout)


def test_folder_is_quantized_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["quantize", "tiny", "--gptq", *QUICK]) == 0
    out, err = capsys.readouterr()
    head, first, second = out.splitlines()[:3]
    assert head.split() == ["MODEL", "SIZE", "BITS/WEIGHT", "KL", "PERPLEXITY"]
    assert first.split()[0] == "tiny"
    assert second.split()[0] == "tiny-gptq-4bit"
    assert "needs about" in err
    assert re.search(r"quantizing 6 layers takes about \d", err)
    assert re.search(r"6 layers in \d+ s \(estimated \d+ s\), peak", err)
    card = (tmp_path / "tiny-gptq-4bit/README.md").read_text()
    assert "4 sequences of 64 tokens, built-in text" in card
    assert "| tiny-gptq-4bit |" in card


def test_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["quantize", "tiny", "--rtn", "--bits", "3", "--json", *QUICK[2:]]) == 0
    record = json.loads(capsys.readouterr().out)
    original_row, row = record["models"]
    assert (original_row["kl"], row["name"]) == (None, "tiny-rtn-3bit")
    assert row["kl"] > 0
    assert row["size_bytes"] < original_row["size_bytes"]
    assert record["layers"] == 6
    assert record["layer_s"] == pytest.approx(record["seconds"] / 6)
    assert record["estimated_s"] > 0


def test_the_estimate_of_the_peak_memory(whole: tuple[Path, dict[str, float]]) -> None:
    _, record = whole
    assert 0.5 < record["estimated_bytes"] / record["peak_bytes"] < 1.5


def test_gguf_file_is_made_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["quantize", "tiny", "--gguf", "q8_0", "--no-eval"]) == 0
    assert (tmp_path / "tiny-Q8_0.gguf").is_file()
    assert "tiny-Q8_0.gguf" in capsys.readouterr().out
    assert (
        run_command_line(
            ["quantize", "--compare", "tiny", "./tiny-Q8_0.gguf", "--json", *QUICK[2:]]
        )
        == 0
    )
    _, row = json.loads(capsys.readouterr().out)["models"]
    assert 0 <= row["kl"] < 1e-2


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["tiny"], INVALID, "choose a method: --awq, --gptq"),
        (["tiny", "--awq", "--gptq"], INVALID, "--awq and --gptq exclude each other"),
        (["tiny", "--fp8", "--gguf", "Q4_K_M"], INVALID, "--awq and --gptq go with it"),
        (["tiny", "--gptq", "--gguf", "IQ4_XS"], INVALID, "cannot choose the codes of IQ4_XS"),
        (["tiny", "--rtn", "--bits", "5"], INVALID, "not 5"),
        (["tiny", "--fp8", "--bits", "4"], INVALID, "fp8 supports 8 bits, not 4"),
        (["tiny", "--fp8", "--group-size", "64"], INVALID, "--group-size goes with"),
        (["tiny", "--rtn", "--no-act-order"], INVALID, "go with --gptq"),
        (["tiny", "--rtn", "--rounding-steps", "9"], INVALID, "goes with --awq and --gptq"),
        (
            ["tiny", "--awq", "--gguf", "Q4_K_M", "--rounding-steps", "9"],
            INVALID,
            "--rounding-steps goes with --gguf only if --gptq is given too",
        ),
        (["tiny", "--rtn", "--samples", "3"], INVALID, "--samples is for calibration"),
        (["tiny", "--gguf", "Q8_0", "--seed", "3"], INVALID, "--seed is for calibration"),
        (["tiny", "--rtn", "--calib", "x.txt"], INVALID, "use no calibration text"),
        (["tiny", "--gguf", "Q4_K_M", "--bits", "4"], INVALID, "the file type sets the bits"),
        (["tiny", "--rtn", "--group-size", "100"], INVALID, "multiple of 8"),
        (
            ["tiny", "--rtn", "--group-size", "96"],
            INVALID,
            "groups of 96: use --group-size",
        ),
        (["tiny", "--rtn", "--group-size", "0"], INVALID, "-1 is a whole row; not 0"),
        (["tiny", "--gptq", "--group-size", "-5"], INVALID, "-1 is a whole row; not -5"),
        (["tiny", "--gptq", "--out", "x.gguf"], INVALID, "--gptq writes a folder; add --gguf TYPE"),
        (["tiny", "--rtn", "--eval-text", "no.txt"], NOT_FOUND, "cannot read the text no.txt"),
        (["tiny", "--gguf", "Q9_X"], INVALID, "Q9_X"),
        (["tiny", "--gguf", "IQ1_S"], INVALID, "add --calib builtin"),
        (["tiny", "--gguf", "Q8_0", "--out", "x.bin"], INVALID, "ends in .gguf"),
        (["tiny", "--gptq", "--calib", "no.txt"], NOT_FOUND, "cannot read the text no.txt"),
        (["tiny", "--gptq", "--seq-len", "9999"], INVALID, "change --seq-len"),
        (["tiny", "--rtn", "--device", "tpu"], INVALID, "must be cuda, cuda:N or cpu"),
        (["tiny", "--rtn", "--device", "cuda"], INVALID, "leave it out, or --device cpu"),
        (["tiny", "other", "--rtn"], INVALID, "give one model, not 2"),
        (["no-such-model", "--rtn"], NOT_FOUND, "Model 'no-such-model' not found"),
        ([str(TINY_GGUF), "--rtn"], NOT_FOUND, "is a GGUF file, which is already quantized"),
        (["--compare"], INVALID, "name the models"),
        (["--compare", "tiny", "--awq"], INVALID, "--compare and --awq exclude each other"),
        (["tiny", "--recommend", "--out", "x"], INVALID, "--recommend and --out exclude"),
        (["--compare", "tiny", "--no-act-order"], INVALID, "--compare and --act-order exclude"),
        (["--compare", "tiny", "--seed", "3"], INVALID, "--compare and --seed exclude"),
        (["tiny", "--recommend", "--seq-len", "8"], INVALID, "--recommend and --seq-len exclude"),
        (["--compare", "tiny", "--recommend"], INVALID, "--compare and --recommend exclude"),
        (
            ["tiny", "--rtn", "--no-eval", "--eval-text", "x.txt"],
            INVALID,
            "--no-eval and --eval-text exclude",
        ),
        (
            ["tiny", "--awq", "--gguf", "Q4_K_M", "--bits", "4"],
            INVALID,
            "the file type sets the bits",
        ),
        (["tiny", "--gguf", "Q4_K_M", "--group-size", "64"], INVALID, "--group-size goes with"),
        (["--compare", str(TINY_GGUF)], INVALID, "name it first"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command_line(["quantize", *arguments]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.splitlines()[-1].startswith("localgen: ")
    assert not [path for path in tmp_path.iterdir() if path.name not in ("state", "cache")]


def test_existing_output_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").mkdir()
    assert run_command_line(["quantize", "tiny", "--rtn", "--out", "taken"]) == INVALID
    assert "already exists" in capsys.readouterr().err
    (tmp_path / "taken.gguf").touch()
    assert (
        run_command_line(["quantize", "tiny", "--gguf", "Q8_0", "--out", "taken.gguf"]) == INVALID
    )


def test_missing_torch_names_the_package() -> None:
    program = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in absent:\n"
        "            raise ImportError(name)\n"
        "absent = ('torch', 'tokenizers')\n"
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *x: None if name in absent else find(name, *x)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from localgen.cli.main import run_command_line\n"
        "sys.exit(run_command_line(['quantize', 'tiny', '--rtn']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=python_environment(), capture_output=True, text=True
    )
    assert done.returncode == errors.EXIT_STATUS_BY_CODE["load_failed"]
    assert done.stderr == (
        "localgen: quantize needs torch and tokenizers, not installed here: "
        "pip install 'localgen[quant]'\n"
    )


def begun(folder: Path, *options: str, layers: int) -> subprocess.Popen[str]:
    """A quantize process that has finished `layers` of 6 layers."""
    command = python_command("localgen.cli.main", *GPTQ, *options)
    child = subprocess.Popen(
        command, cwd=folder, env=python_environment(), stderr=subprocess.PIPE, text=True
    )
    work = folder / "tiny-gptq-4bit.partial"
    until = time.monotonic() + 60
    while not (work / f"model-{1 + layers:05}-of-00007.safetensors").exists():
        assert time.monotonic() < until
        assert child.poll() is None
        time.sleep(0.005)
    return child


def test_run_interrupted_twice_is_resumed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    whole: tuple[Path, dict[str, float]],
) -> None:
    child = begun(tmp_path, layers=1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == errors.INTERRUPTED
    assert "Traceback" not in err
    assert "of 6 layers: run the same command with --resume to continue" in err
    assert run_command_line([*GPTQ]) == INVALID
    assert "--resume continues it" in capsys.readouterr().err
    child = begun(tmp_path, "--resume", layers=4)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate(timeout=60)
    assert run_command_line([*GPTQ, "--resume"]) == 0
    assert "nothing to resume" not in capsys.readouterr().err
    assert _files(tmp_path / "tiny-gptq-4bit") == _files(whole[0])


def test_a_run_stopped_before_its_first_layer_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(QuantizeJob, "_process_layer", stop)
        assert run_command_line([*GPTQ, "--no-eval"]) == errors.INTERRUPTED
    assert "stopped before the first layer was done" in capsys.readouterr().err
    quick = ["quantize", "tiny", "--rtn", "--out", "tiny-gptq-4bit", "--no-eval"]
    assert run_command_line([*quick, "--resume"]) == 0
    assert "there is nothing to resume" in capsys.readouterr().err


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_best_method_depends_on_free_memory() -> None:
    on_gpu = best_method(
        estimate_methods(
            TINY,
            AvailableMemory(
                ram_bytes=8 << 30, gpu_bytes=8 << 30, has_llamacpp_gpu=False, has_cuda_backend=True
            ),
        )
    )
    assert on_gpu is not None
    assert (on_gpu.option, on_gpu.place) == ("--fp8", "GPU")
    on_cpu = best_method(estimate_methods(TINY, AvailableMemory(ram_bytes=8 << 30)))
    assert on_cpu is not None
    assert (on_cpu.option, on_cpu.place) == ("--gguf Q8_0", "CPU")
    assert best_method(estimate_methods(TINY, AvailableMemory(ram_bytes=1 << 20))) is None


def test_advice_as_a_user_reads_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_report, "step_times", lambda notify: None)
    assert run_command_line(["quantize", "tiny", "--recommend"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["OPTION", "SIZE", "NEEDS", "RUNS", "ON", "TRADE"]
    assert err.startswith("recommended method --")
    times = StepTimes({"Q8_0": (3e-11, 9e-11, 3e-10, 9e-10), "Q4_0": (4e-11, 5e-11, 7e-11, 2e-10)})
    monkeypatch.setattr(quantize_report, "step_times", lambda notify: times)
    assert run_command_line(["quantize", "tiny", "--recommend"]) == 0
    out, _ = capsys.readouterr()
    assert "RUNS ON   ONE STREAM   3 DRAFTS   16 STREAMS   TRADE" in out
    assert out.rstrip().endswith("3 drafts: --awq --gguf Q4_0, 16 streams: --awq --gguf Q4_0.")
    assert run_command_line(["quantize", "tiny", "--recommend", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["fastest"]["16 streams"] == "--awq --gguf Q4_0"
    rates = {way["option"]: way["rates"] for way in record["ways"]}
    assert rates["--gguf Q6_K"] is None
    assert rates["--gguf Q8_0"]["one_stream"] > rates["--gguf Q8_0"]["many_streams"] / 2


def test_no_speed_without_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    class Machine:
        cuda_unavailable_reason = "no NVIDIA GPU was found"

    monkeypatch.setattr(compare, "detect_hardware", Machine)
    assert compare.measure_tokens_per_s(TINY) is None


def test_missing_packages_are_named() -> None:
    from localgen.backends.errors import LoadFailed

    with pytest.raises(LoadFailed, match="needs tokenizers, not installed"):
        originals.require_packages(lambda name: None if name == "tokenizers" else name)


def test_the_bar_moves_within_a_layer_and_the_time_left_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(quantize_report, "StepEta", lambda: StepEta(lambda: now_s))
    screen = io.StringIO()
    progress = quantize_report.StepProgress(Console(file=screen, force_terminal=True, width=80))
    progress.update("quantizing", 0, 4)
    now_s = 60.0
    progress.update("quantizing", 1, 4)
    progress.update("quantizing", 1, 4, current=0.4)
    progress.stop()
    assert "35 %" in screen.getvalue()
    assert "3 min 00 s left" in screen.getvalue()


def test_lines_without_a_terminal_are_of_whole_layers_unless_one_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantize_report, "_LINE_INTERVAL_S", 0.0)
    progress = quantize_report.StepProgress()
    progress.update("quantizing", 3, 4)
    progress.update("quantizing", 3, 4, current=0.2)
    monkeypatch.setattr(quantize_report, "_PART_INTERVAL_S", 0.0)
    progress.update("quantizing", 3, 4, current=0.9)
    progress.update("quantizing", 4, 4)
    assert capsys.readouterr().err == (
        "quantizing: 3 of 4 layers\n"
        "quantizing: 3 of 4 layers, 90 % of the next layer\n"
        "quantizing: 4 of 4 layers\n"
    )


def test_a_calibrated_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A type that is unusable without an importance matrix."""
    asked = ["quantize", "tiny", "--gguf", "IQ2_XS", "--calib", "builtin", *QUICK[:4], "--no-eval"]
    assert run_command_line(asked) == 0
    err = capsys.readouterr().err
    assert "calibrating: 6 of 6 layers" in err
    assert [path.name for path in tmp_path.iterdir() if "tiny" in path.name] == ["tiny-IQ2_XS.gguf"]


def test_the_benchmark_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import quantize

    monkeypatch.setattr(sys, "argv", ["quantize", "--quick", "--methods", "rtn,gptq"])
    quantize.main()
    *_, plain, row = capfd.readouterr().out.splitlines()
    assert plain.startswith("| rtn | 2 | ")
    assert row.startswith("| gptq | 2 | ")
