"""`localgen bench --matrix`: combinations of load options, saved one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_targets import measured
from command_line import own_folders
from scripted_client import model_info

from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.backends.model_info import LoadOptions
from localgen.bench.machine_state import MachineState
from localgen.bench.matrix import Combination, matrix_table, run_matrix
from localgen.bench.report import BenchResult
from localgen.bench.service_level import ServiceLevel
from localgen.bench.suite import SpeedTest, Suite
from localgen.chat.parameters import ModelOptions
from localgen.cli.bench_matrix import parse_matrix
from localgen.cli.main import run_command_line

__all__ = ["own_folders"]


def test_all_combinations_on_top_of_the_other_options() -> None:
    options = ModelOptions(load=LoadOptions(ctx=4096, threads=8))
    found = parse_matrix(["threads=1,2 ctk=f16", "mmap=on,off"], options)
    assert [each.name for each in found] == [
        *("threads=1 ctk=f16 mmap=on", "threads=1 ctk=f16 mmap=off"),
        *("threads=2 ctk=f16 mmap=on", "threads=2 ctk=f16 mmap=off"),
    ]
    assert found[1].load == LoadOptions(ctx=4096, threads=1, cache_type_k="f16", mmap=False)
    (one,) = parse_matrix(["c=512"], options)
    assert one.load == LoadOptions(ctx=512, threads=8)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("threads", "give each option once"),
        ("threads=", "give each option once"),
        ("threads=1 threads=2", "give each option once"),
        ("threads=,", "give options such as"),
        ("thread=1", "it is no load option"),
        ("temp=1", "it is no load option"),
        ("threads=two", "give a whole number"),
        ("c=-5", "must be at least 1"),
        ("mmap=yes", "give on or off"),
        ("backend=mlx", "give auto, llamacpp, cuda"),
        ("", "give options such as"),
        ("threads=" + ",".join(map(str, range(1, 300))), "at most 256"),
    ],
)
def test_invalid_matrices(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse_matrix([text], ModelOptions())


def result(load: LoadOptions) -> BenchResult:
    test = SpeedTest("tg128", 1, 11)
    test.rounds.append((measured(0.1, 1 / (10 * (load.threads or 1))),))
    info = model_info()
    return BenchResult(info, Suite([test]), ServiceLevel(), MachineState("EPYC", 2))


def combinations() -> list[Combination]:
    return parse_matrix(["threads=1,2,3"], ModelOptions())


def test_what_was_measured_is_kept_and_resumed(tmp_path: Path) -> None:
    path, measured_now = tmp_path / "m.json", list[int]()

    def measure(load: LoadOptions) -> BenchResult:
        if load.threads == 2 and not measured_now[1:]:
            raise OutOfMemory("full")
        measured_now.append(load.threads or 0)
        return result(load)

    said: list[str] = []
    with pytest.raises(OutOfMemory):
        run_matrix("tiny", combinations(), measure, path, resume=False, notify=said.append)
    assert [each["options"] for each in json.loads(path.read_text())["matrix"]] == [
        {"threads": "1"}
    ]
    measured_now.append(-1)
    done = run_matrix("tiny", combinations(), measure, path, resume=True, notify=said.append)
    assert measured_now == [1, -1, 2, 3]
    assert said == [f"{at} of 3: threads={at}" for at in (1, 2, 2, 3)]
    assert json.loads(path.read_text()) == done
    lines = matrix_table(done).split("\n")
    assert [line.split("|")[1].strip() for line in lines[2:]] == [
        *("threads=1", "threads=2", "threads=3"),
    ]
    assert [line.split("|")[2].strip() for line in lines[2:]] == ["10.00", "20.00", "30.00"]
    with pytest.raises(InvalidRequest, match="is about tiny"):
        run_matrix("big", combinations(), measure, path, resume=True, notify=said.append)


@pytest.mark.parametrize("text", ["[]", '{"requested": "tiny", "matrix": [{}]}', "no json"])
def test_another_file_is_not_overwritten_by_a_resumption(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="is no result of a --matrix"):
        run_matrix("tiny", combinations(), result, path, resume=True, notify=print)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--resume"], "--resume continues a --matrix"),
        (["--matrix", "threads=1", "--resume"], "its --save FILE as well"),
        (["--matrix", "threads=1", "--rate", "1"], "--matrix is about load options"),
        (["--matrix", "threads=1", "--require", "tg128>1"], "--matrix is about load options"),
        (
            ["--matrix", "threads=1", "--url", "http://127.0.0.1:1"],
            "--matrix is about load options",
        ),
    ],
)
def test_options_that_do_not_go_together(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["bench", "tiny", *options]) == 3
    assert says in capsys.readouterr().err.replace("\n", " ")
