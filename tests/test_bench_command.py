"""The command `localgen bench`: real servers, saved results, wrong input."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import own_folders
from plain_openai import DONE, PlainServer, answer, chunk, error, plain_server

from localgen.bench.load import Load, LoadGenerator
from localgen.cli.main import run_command_line

__all__ = ["own_folders"]
Captured = pytest.CaptureFixture[str]


def folders_of_servers() -> Iterator[Path]:
    """Folders of servers of benchmarks."""
    return Path(tempfile.gettempdir()).glob("localgen-bench-*")


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # a socket's path is short
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


def saved(path: Path, *rates: float, model: str = "tiny", cpu: str = "EPYC") -> str:
    """A file with a result of these rates."""
    test = {"test": "tg128", "avg_ts": rates[0], "samples_ts": rates, "ttft_ms": [5.0]}
    record = {"model": model, "machine": {"cpu": cpu}, "tests": [test], "sessions": []}
    path.write_text(json.dumps(record))
    return str(path)


def test_a_model_of_this_machine(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "r.json"
    asking = ["bench", "tiny", "--time", "20", "--save", str(path), "--require", "tg128>=1"]
    assert run_command_line(asking) == 0
    out, err = capsys.readouterr()
    record = json.loads(path.read_text())
    names = [test["test"] for test in record["tests"]]
    assert names[:4] == ["pp512", "tg128", "tg128 code edit", "pp512 again"]
    assert [test["max_concurrency"] for test in record["sessions"]][:2] == [1, 4]
    assert all(rate > 0 for test in record["tests"] for rate in test["samples_ts"])
    assert 480 <= record["tests"][0]["n_prompt"] <= 545
    assert out.rstrip().split("\n")[-1] == record["verdict"]
    assert record["verdict"].startswith("One person: ")
    assert "tg128>=1: kept, it is" in err
    assert not list(folders_of_servers()), "no server is left behind"


def test_a_load_as_json(capsys: Captured) -> None:
    asking = ["bench", "tiny", "--rate", "5", "--poisson", "--time", "20", "--output-len", "4"]
    assert run_command_line([*asking, "--input-len", "30", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    (load,) = record["loads"]
    assert load["test"] == "5/s"
    assert load["completed"] == load["num_prompts"] > 5
    assert load["total_output_tokens"] == 4 * load["completed"]
    assert 25 <= load["total_input_tokens"] / load["completed"] <= 36


def test_loads_are_drawn_as_svg(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "plot.svg"
    asking = ["bench", "tiny", "--concurrency", "1,2", "--time", "20", "--input-len", "8"]
    assert run_command_line([*asking, "--output-len", "2", "--plot", str(path)]) == 0
    assert "95 % of the answered requests are within" in capsys.readouterr().out
    drawn = path.read_text()
    assert drawn.startswith("<svg")
    assert all(f">{name}</text>" in drawn for name in ("TTFT", "TPOT goal", "requests at once"))


@pytest.fixture
def plain() -> Any:
    with plain_server() as server:
        yield server


def test_a_server_at_a_url(plain: PlainServer, capsys: Captured) -> None:
    usage = {"prompt_tokens": 512, "completion_tokens": 5, "total_tokens": 517}
    plain.events = answer("a", "b", "c", "d", "e", usage=usage)
    assert run_command_line(["bench", "--url", plain.url, "--time", "5", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["url"].startswith(plain.url.removesuffix("/v1"))
    assert record["tests"][0]["n_prompt"] == 512
    assert any("does not report its context" in line for line in record["left_out"])
    assert {body["temperature"] for body in plain.asked} == {0.0}
    prompts = {body["messages"][0]["content"] for body in plain.asked}
    assert len(prompts) > len(plain.asked) / 2, "its cache has none of them"


def interrupt_second_call(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Ctrl+C during the second load of a kind."""
    original, calls = getattr(LoadGenerator, method), []

    def load(self: LoadGenerator, *arguments: Any) -> Load:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        found: Load = original(self, *arguments)
        return found

    monkeypatch.setattr(LoadGenerator, method, load)


@pytest.mark.parametrize(
    ("load", "method", "measured"),
    [
        (["--concurrency", "1,2,4", "--time", "5"], "closed_loop", ["1 at once"]),
        (["--slo", "ttft=1s", "--time", "20"], "open_loop", ["1 at once", "rate"]),
    ],
)
def test_ctrl_c_keeps_what_has_been_measured(
    plain: PlainServer,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    load: list[str],
    method: str,
    measured: list[str],
) -> None:
    usage = {"prompt_tokens": 128, "completion_tokens": 3, "total_tokens": 131}
    plain.events = answer("a", "b", "c", usage=usage)
    interrupt_second_call(monkeypatch, method)
    assert run_command_line(["bench", "--url", plain.url, *load]) == 130
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if line.startswith("| ") and "load" not in line]
    assert len(table) - 1 == len(measured), out
    assert "interrupted: the last load, and what would have followed, is left out" in out


def test_ctrl_c_during_the_first_load_says_nothing(
    plain: PlainServer, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> Load:
        raise KeyboardInterrupt

    plain.events = answer("a")
    monkeypatch.setattr(LoadGenerator, "closed_loop", interrupt)
    assert run_command_line(["bench", "--url", plain.url, "--concurrency", "1,2"]) == 130
    assert capsys.readouterr().out == ""


def test_results_are_compared(tmp_path: Path, capsys: Captured) -> None:
    before = saved(tmp_path / "a", 100, 101, 99)
    after = saved(tmp_path / "b", 110, 111, 109)
    other = saved(tmp_path / "c", 100, model="big", cpu="i9")
    assert run_command_line(["bench", "--compare", before, after]) == 0
    assert capsys.readouterr().out == "tg128: +10.0 % (+7.6 to +12.4)\n"
    assert run_command_line(["bench", "--compare", before, other]) == 0
    assert capsys.readouterr().out == (
        "model differs: tiny and big\ncpu differs: EPYC and i9\n"
        "tg128: measured once: give it more --time to tell a difference\n"
    )


def test_a_bound_that_is_not_kept(capsys: Captured) -> None:
    asking = ["bench", "tiny", "--concurrency", "2", "--time", "20", "--output-len", "2"]
    assert run_command_line([*asking, "--require", "2 at once ttft < 0.001"]) == 1
    assert "NOT kept, it is" in capsys.readouterr().err
    assert run_command_line([*asking, "--require", "tg128>1", "--require", "2 at once>0"]) == 1
    err = capsys.readouterr().err
    assert "tg128>1: NOT measured; there are 2 at once, 2 at once ttft" in err
    assert "2 at once>0: kept" in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--require", "tg128"], "give a figure and its bound"),
        (["--slo", "fast"], "give ttft=1s,tpot=125ms"),
        (["--slo", ""], "give ttft=1s,tpot=125ms"),
        (["--save", "/nowhere/x.json"], "--save /nowhere/x.json: its folder does not exist"),
        (["--plot", "x.svg"], "--plot draws several loads"),
        (["--plot", "x.svg", "--rate", "2"], "--plot draws several loads"),
        (["--plot", "x.svg", "--concurrency", "2"], "--plot draws several loads"),
        (["--poisson"], "--poisson is about the times of --rate"),
        (["--compare", "/nowhere/a", "/nowhere/b"], "leave the other arguments out"),
        (["--url", "http://127.0.0.1:1", "--ctx", "5"], "does not apply to a model on a remote"),
    ],
)
def test_wrong_options(options: list[str], says: str, capsys: Captured) -> None:
    assert run_command_line(["bench", "tiny", *options]) == 3
    assert says in capsys.readouterr().err.replace("\n", " ")


NAN = (
    '{"tests": [{"test": "a", "avg_ts": 1, "samples_ts": [1e999], "ttft_ms": [1]}], "sessions": []}'
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"tests": [{}], "sessions": []}',
        "[" * 99_999,
        NAN,
        NAN.replace("1e999", '"a"'),
    ],
    ids=range(7),
)
def test_files_that_are_no_results(tmp_path: Path, text: str, capsys: Captured) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    assert run_command_line(["bench", "--compare", str(path), str(path)]) == 3
    assert "no result of `localgen bench --save`" in capsys.readouterr().err


def test_an_alias_is_measured(capsys: Captured) -> None:
    assert run_command_line(["cp", "tiny", "mine"]) == 0
    asking = ["bench", "mine", "--concurrency", "1", "--time", "20", "--output-len", "2", "--json"]
    capsys.readouterr()
    assert run_command_line(asking) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "tiny"


def test_nothing_is_left_of_a_run_that_fails(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "new.json"
    assert run_command_line(["bench", "nosuchmodel", "--save", str(path)]) == 6
    assert not path.exists()
    asking = ["bench", "tiny", "--rate", "2", "--time", "6", "--input-len", "5000"]
    assert run_command_line(asking) == 11
    assert "no request was answered: the prompt is too long" in capsys.readouterr().err
    assert not list(folders_of_servers())


def test_a_server_that_refuses_ignore_eos_and_counts_nothing(
    plain: PlainServer, capsys: Captured
) -> None:
    plain.refuse = lambda body: (
        error(400, "Unrecognized argument: ignore_eos") if "ignore_eos" in body else None
    )
    plain.events = answer("a", "b", "c")
    asking = ["bench", "--url", plain.url, "--concurrency", "2", "--time", "5", "--json"]
    assert run_command_line(asking) == 0
    (load,) = json.loads(capsys.readouterr().out)["loads"]
    assert load["failed"] == 0
    assert load["total_output_tokens"] == 3 * load["completed"]
    assert load["total_input_tokens"] == 128 * load["completed"]


def test_reasoning_is_no_first_word_but_takes_time(plain: PlainServer, capsys: Captured) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    plain.gap_s = 0.02
    plain.events = [
        *(chunk({"reasoning_content": "hm"}) for _ in range(4)),
        *(chunk({}, "length"), chunk(usage=usage), DONE),
    ]
    asking = ["bench", "--url", plain.url, "--concurrency", "1", "--time", "5", "--json"]
    assert run_command_line(asking) == 0
    (load,) = json.loads(capsys.readouterr().out)["loads"]
    assert load["median_tpot_ms"] >= 19
    assert load["median_ttft_ms"] >= 80, "there was no word"


def test_a_server_that_is_not_there(capsys: Captured) -> None:
    assert run_command_line(["bench", "--url", "http://127.0.0.1:1"]) == 18
    assert "cannot reach" in capsys.readouterr().err
