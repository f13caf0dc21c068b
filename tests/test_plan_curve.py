"""`localgen plan --curve`: the chart, its tables, measured points, JSON, wrong options."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from test_plan_command import OUT_OF_MEMORY, measured, offline, rows, told

from localgen.cli import errors

__all__ = ["measured", "offline"]
INVALID = errors.EXIT_STATUS_BY_CODE["invalid_request"]


def record(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    out, _ = told(capsys, *arguments, "--curve", "--json", status=status)
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_this_machine_and_named_gpus(capsys: pytest.CaptureFixture[str], offline: None) -> None:
    out, _ = told(capsys, "llama-1b", "--curve", "--gpu", "h100=2.50", "--gpu", "RTX 4090")
    lines = out.splitlines()
    assert lines[0].endswith("Q4_K_M: upper limit of tokens/s, with 8,192 tokens of context")
    assert max(map(len, lines[:22])) <= 100
    ends = [line.rpartition("  ")[2].strip() for line in lines[2:20]]
    assert [end for end in ends if end in ("h100", "4090", "this machine")] == [
        *("h100", "4090", "this machine"),
    ], "from the fastest to the slowest"
    assert " GB, 20 GB/s, " in out
    assert "compute measured for Q4_K_M" in out
    assert "h100: 85.5 GB, 3,350 GB/s, 989 TFLOP/s, 2.5 per hour (datasheet)" in out
    assert out.count("COST OF A MILLION") == 2, "of the h100, and in the table of all"
    assert out.count("KV SHARE AT 1") == 3
    assert "speculation: tokens per pass with drafts from the text itself" in out
    assert rows(out)["80%"][2].startswith("3.36 (")


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str], offline: None) -> None:
    found = record(capsys, "llama-1b", "--ctx", "1024", "--gpu", "h100", "--price", "0.5")
    here, h100 = found["curves"]
    assert (here["device"], here["ctx"], h100["device"]) == ("this machine", 1024, "h100")
    assert here["bandwidth_bytes_per_s"] == 20e9
    points = {point["requests"]: point for point in here["points"]}
    assert points[1]["limit"] == "memory"
    assert points[1]["cost_per_million"] == pytest.approx(
        0.5 / 3600 / points[1]["tokens_per_s"] * 1e6
    )
    assert h100["points"][0]["cost_per_million"] is None
    last = max(points)
    assert points[last]["kv_share"] > points[1]["kv_share"]
    # a byte is read in 1/20e9 s, and computed in 8e-10/64 s for each token
    weights_s = (1 - points[1]["kv_share"]) / points[1]["tokens_per_s"]
    cache_s = points[1]["kv_share"] / points[1]["tokens_per_s"]
    compute_s = weights_s * 20e9 * 80e-11 / 64
    assert here["ridge"] == math.ceil(weights_s / (compute_s - cache_s))
    assert [one["ctx"] for one in here["contexts"]] == [1024, 4096, 16_384, 32_768, 131_072]
    passes = {(p["acceptance"], p["drafts"]): p for p in found["speculation"][0]["passes"]}
    assert passes[0.5, 1]["tokens"] == 1.5
    assert found["measured"] == []


def test_quantizations_beside_each_other(capsys: pytest.CaptureFixture[str], offline: None) -> None:
    out, _ = told(capsys, "llama-1b", "--curve", "--quant", "Q4_K_M", "--quant", "Q8_0")
    assert "this machine Q4_K_M: " in out
    assert "this machine Q8_0: " in out


def test_a_draft_model_takes_its_time(capsys: pytest.CaptureFixture[str], offline: None) -> None:
    out, _ = told(capsys, "llama-8b", "--curve", "--draft", "llama-1b")
    assert "with drafts of bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M" in out
    alone = record(capsys, "llama-8b")["speculation"][0]["passes"]
    drafted = record(capsys, "llama-8b", "--draft", "llama-1b")["speculation"][0]["passes"]
    for free, paid in zip(alone, drafted, strict=True):
        assert paid["tokens"] == free["tokens"]
        assert paid["speedup"] < free["speedup"]


def test_no_speed_of_drafts_without_a_peak(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = told(capsys, "tiny", "--curve")
    assert "no ridge: the peak of this device is unknown" in out
    assert rows(out)["50%"] == ["1.50", "1.75", "1.94", "2.00"]


def test_several_gpus_share_a_model(capsys: pytest.CaptureFixture[str], offline: None) -> None:
    found = record(capsys, "llama-70b", "--gpu", "h100", "--tp", "4")
    here, four = found["curves"]
    assert not here["fits"], "8 GB"
    assert (four["device"], four["devices"], four["fits"]) == ("4 x h100", 4, True)
    assert four["ctx"] == 8192, "not that of this machine, which has none"
    (_, one) = record(capsys, "llama-70b", "--gpu", "4090", status=OUT_OF_MEMORY)["curves"]
    assert not one["fits"]
    out, err = told(capsys, "llama-70b", "--curve", status=OUT_OF_MEMORY)
    assert "does not fit: weights 42.5 GB" in out
    assert "speculation" not in out
    assert "fits on none of these devices" in err


def test_nothing_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str], offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    gpus = ["--gpu", "h100=2.5", "--gpu", "m4-max", "--quant", "Q4_K_M", "--quant", "Q8_0"]
    out, _ = told(capsys, "llama-8b", "--curve", *gpus)
    assert max(map(len, out.splitlines())) <= 80


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A result of `localgen bench`: one and four requests, with 100 tokens of context."""
    session = {
        "samples_ts": [],
        "output_throughput": 1.0,
        "completed": 10,
        "total_input_tokens": 900,
        "total_output_tokens": 200,
    }
    path = tmp_path / "bench.json"
    content = {
        "model": "big",
        "tests": [{"test": "tg128", "samples_ts": [30.0], "avg_ts": 30.0, "ttft_ms": [5.0]}],
        "sessions": [
            session | {"test": f"{n} sessions", "max_concurrency": n, "median_tpot_ms": 50.0 * n}
            for n in (1, 4)
        ],
    }
    path.write_text(json.dumps(content))
    return path


def test_what_was_measured_is_marked(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    out, err = told(capsys, "tiny", "--curve", "--bench", str(saved))
    assert "with 100 tokens of context" in out, "that of the measured requests"
    chart = out[: out.index("requests at once")]
    assert chart.count("●") == 2
    assert "● measured" in out
    assert "--bench: measured with big, not tiny" in err
    assert record(capsys, "tiny", "--bench", str(saved))["measured"] == [
        {"requests": 1, "tokens_per_s": 30.0},
        {"requests": 4, "tokens_per_s": 20.0},
    ]
    assert record(capsys, "tiny", "--bench", str(saved), "--ctx", "512")["curves"][0]["ctx"] == 512


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--gpu", "h100"), "are about --curve"),
        (("--price", "1"), "are about --curve"),
        (("--bench", "x.json"), "are about --curve"),
        (("--curve", "--tp", "2"), "--tp is the number of each --gpu"),
        (("--curve", "--gpu", "gpu9"), "gpu9 is not known; known are h200, h100"),
        (("--curve", "--price", "0"), "give a price per hour, above 0"),
        (("--curve", "--bench", "none.json"), "--bench none.json: No such file"),
        (("--curve", "--ctx", "100000"), "was trained for 2,048 tokens"),
    ],
)
def test_wrong_options(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    out, err = told(capsys, "tiny", *arguments, status=INVALID)
    assert says in err
    assert out == ""


def test_a_result_without_decode_speeds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text(json.dumps({"tests": [], "sessions": []}))
    _, err = told(capsys, "tiny", "--curve", "--bench", str(path), status=INVALID)
    assert "it has no tg128, sessions or --concurrency" in err


@pytest.mark.parametrize(
    "broken",
    [
        {"completed": 0},
        {"max_concurrency": "x"},
        {"median_tpot_ms": "a"},
        {"median_tpot_ms": -5},
        {"median_tpot_ms": float("nan")},
        {"total_input_tokens": None},
    ],
)
def test_damaged_results(
    capsys: pytest.CaptureFixture[str], saved: Path, broken: dict[str, object]
) -> None:
    content = json.loads(saved.read_text())
    for session in content["sessions"]:
        session.update(broken)
    saved.write_text(json.dumps(content))
    _, err = told(capsys, "tiny", "--curve", "--bench", str(saved), status=INVALID)
    assert "no result of `localgen bench --save`" in err
