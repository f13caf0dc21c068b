"""The command `localgen bench`: real servers, saved results, wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import own_folders
from plain_openai import PlainServer, answer, plain_server

from localgen.cli.main import run_command_line

__all__ = ["own_folders"]
Captured = pytest.CaptureFixture[str]


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
    assert run_command_line(["ps"]) == 0
    assert "tiny" not in capsys.readouterr().out, "no engine is left behind"


def test_a_load_as_json(capsys: Captured) -> None:
    asking = ["bench", "tiny", "--rate", "5", "--poisson", "--time", "6", "--output-len", "4"]
    assert run_command_line([*asking, "--input-len", "30", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    (load,) = record["sessions"]
    assert load["test"] == "5/s"
    assert load["completed"] == load["num_prompts"] > 5
    assert load["total_output_tokens"] == 4 * load["completed"]
    assert 25 <= load["total_input_tokens"] / load["completed"] <= 36


def test_a_search_draws_an_svg(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "plot.svg"
    asking = ["bench", "tiny", "--slo", "ttft=2s", "--time", "8", "--input-len", "8"]
    assert run_command_line([*asking, "--output-len", "2", "--plot", str(path)]) == 0
    out = capsys.readouterr().out
    assert "95 %" in out.rstrip().split("\n")[-1]
    assert "<svg" in path.read_text()
    assert "Goodput" in path.read_text() or "No&#160;rate" in path.read_text()


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
    asking = ["bench", "tiny", "--concurrency", "2", "--time", "5", "--output-len", "2"]
    assert run_command_line([*asking, "--require", "2 at once ttft < 0.001"]) == 1
    assert "NOT kept, it is" in capsys.readouterr().err
    assert run_command_line([*asking, "--require", "tg128>1"]) == 3
    assert "not measured; there are 2atonce, 2atoncettft" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--require", "tg128"], "give a figure and its bound"),
        (["--slo", "fast"], "give ttft=1s,tpot=125ms"),
        (["--save", "/nowhere/x.json"], "--save /nowhere/x.json: No such file"),
        (["--plot", "x.svg"], "--plot draws a load"),
        (["--poisson"], "--poisson is about the times of --rate"),
        (["--compare", "/nowhere/a", "/nowhere/b"], "--compare /nowhere/a: No such file"),
        (["--url", "http://127.0.0.1:1", "--ctx", "5"], "does not apply to a model on a remote"),
    ],
)
def test_wrong_options(options: list[str], says: str, capsys: Captured) -> None:
    assert run_command_line(["bench", "tiny", *options]) == 3
    assert says in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tests": [{}], "sessions": []}', "[" * 99_999])
def test_files_that_are_no_results(tmp_path: Path, text: str, capsys: Captured) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    assert run_command_line(["bench", "--compare", str(path), str(path)]) == 3
    assert "no result of `localgen bench --save`" in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys: Captured) -> None:
    assert run_command_line(["bench", "--url", "http://127.0.0.1:1"]) == 18
    assert "cannot reach" in capsys.readouterr().err
