"""`localgen plan`: local models, models on the hub, offline, and beside a loaded model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draft_models import DRAFT_GGUF
from loopback_hub import LoopbackHub
from models import TINY_GGUF
from pull_fixtures import hub
from serving import settings_in, short_folder

from localgen.backends.model_info import LoadOptions
from localgen.cli import errors
from localgen.cli.main import run_command_line
from localgen.client import LocalClient
from localgen.config import ServerSettings
from localgen.machine import bandwidth, measurements, step_times

__all__ = ["hub"]
OUT_OF_MEMORY = errors.EXIT_STATUS_BY_CODE["out_of_memory"]


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ServerSettings]:
    """A memory bandwidth of 20 GB/s, and server folders without a server."""
    monkeypatch.setattr(bandwidth, "measure_ram_bandwidth", lambda: 20e9)
    monkeypatch.setattr(measurements, "measurements_path", lambda: tmp_path / "measurements.json")
    monkeypatch.setattr("psutil.getloadavg", lambda: (0.0, 0.0, 0.0))
    seconds = {
        "Q4_K_M": (4e-11, 8e-11, 40e-11, 80e-11),
        "Q8_0": (3e-11, 12e-11, 9e-11, 90e-11),
    }
    seconds["Q4_0"] = seconds["Q4_K_M"]
    monkeypatch.setattr(step_times, "_measure_in_process", lambda: seconds)
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("LOCALGEN_MEMORY_LIMIT", "8G")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with short_folder() as folder:
        settings = settings_in(folder)
        monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", str(settings.runtime_dir))
        yield settings


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def told(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[str, str]:
    found = run_command_line(["plan", *arguments])
    out, err = capsys.readouterr()
    assert found == status, err
    return out, err


def rows(out: str) -> dict[str, list[str]]:
    """The cells of a table by the first cell of each line."""
    lines = [line.split("   ") for line in out.splitlines()]
    return {line[0].strip(): [cell.strip() for cell in line[1:] if cell.strip()] for line in lines}


def record(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told(capsys, *arguments, "--json", status=status)[0])
    return found


def test_plan_of_the_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = told(capsys)
    assert err == ""
    assert out.startswith("tiny, local; llamacpp on the CPU: ")
    table = rows(out)
    # 6 layers of 2 heads of 64, keys and values of two bytes
    note = "16,384 tokens for all requests together, 3.1 MB per 1,000, f16"
    assert table["KV cache"] == ["50.3 MB", note]
    assert table["context"] == ["2,048", "2,048 fits, the model's maximum"]
    assert table["GPU layers"][0] == "0 of 6"
    assert table["speed"][0].startswith("at most ")
    assert "limited by memory bandwidth, 20.0 GB/s measured" in table["speed"][1]
    assert "LOADED" not in out


def test_json_has_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, str(TINY_GGUF), "--ctx", "512", "-ctk", "q8_0", "-ctv", "q8_0")
    assert found["loaded"] is None
    (plan,) = found["plans"]
    assert plan["fits"] is True
    assert (plan["ctx"], plan["kv_tokens"], plan["ctx_train"]) == (512, 16_384, 2048)
    assert plan["kv_bytes"] == 16_384 * 6 * 2 * 2 * 64 * 34 / 32
    assert plan["total_bytes"] == plan["weights_bytes"] + plan["kv_bytes"] + plan["work_bytes"]
    assert plan["speed"]["most_tokens_per_s"] == 20e9 / plan["speed"]["bytes_per_token"]


def test_plan_of_a_model_on_the_hub(capsys: pytest.CaptureFixture[str], offline: None) -> None:
    out, err = told(capsys, "llama-8b", "--ctx", "8192")
    assert "using the catalog's figures" in err
    assert "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M, not downloaded" in out
    assert rows(out)["weights"] == ["4.9 GB", "Q4_K_M"]
    assert rows(out)["context"] == ["8,192", rows(out)["context"][1]]
    out, _ = told(capsys, "llama-8b", "--ctx", "16384")
    assert rows(out)["KV cache"][1].startswith("16,384 tokens, 131 MB per 1,000")


def test_the_fastest_type_here(capsys: pytest.CaptureFixture[str], offline: None) -> None:
    out, err = told(capsys, "llama-1b", "--quant", "Q4_K_M", "--quant", "Q8_0")
    assert "measuring the speed of each type on this CPU, once" in err
    head, *lines = [line for line in out.splitlines() if "   " in line]
    assert head.endswith("   ONE STREAM   3 DRAFTS   16 STREAMS")
    (q8_0,) = (plan for plan in record(capsys, "llama-1b", "--quant", "Q8_0")["plans"])
    one_stream = 1 / (q8_0["speed"]["bytes_per_token"] * 3e-11)
    assert q8_0["rates"]["one_stream"] == pytest.approx(one_stream)
    assert any(f"   {one_stream:.1f}   " in line for line in lines)
    assert "Fastest here: one stream: Q4_K_M, 3 drafts: Q4_K_M, 16 streams: Q8_0." in out
    out, _ = told(capsys, "llama-70b", "--quant", "Q4_K_M", "--quant", "Q4_0", status=9)
    assert out.count("does not fit") == 2
    assert out.count("   none   ") == 2
    assert "Fastest here" not in out
    out, err = told(capsys, "llama-1b", "--quant", "Q8_0")
    assert "measuring" not in err
    assert rows(out)["one stream"][0] == f"about {one_stream:.1f} tokens/s"


def test_a_draft_model_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = told(capsys, "tiny", "--draft", str(DRAFT_GGUF))
    assert err == ""
    total, note = rows(out)["draft model"]
    assert note.startswith("tiny-draft: weights 2.")
    (plan,) = record(capsys, "tiny", "--draft", str(DRAFT_GGUF))["plans"]
    (alone,) = record(capsys, "tiny", "--draft", "ngram")["plans"]
    assert alone["draft"] is None
    assert plan["total_bytes"] == alone["total_bytes"] + plan["draft"]["total_bytes"]
    assert total.split()[0] == f"{plan['draft']['total_bytes'] / 1e6:.1f}"


def test_the_catalogs_draft_model(capsys: pytest.CaptureFixture[str], offline: None) -> None:
    out, err = told(capsys, "llama-8b", "--ctx", "8192", "--draft", "auto", "--json")
    (plan,) = json.loads(out)["plans"]
    assert err.count("using the catalog's figures") == 1
    assert "Llama-3.2-1B" in plan["draft"]["name"]
    assert plan["draft"]["weights_bytes"] > 500_000_000
    out, err = told(capsys, "tiny", "--draft", "auto")
    assert "the catalog has no draft model for tiny" in err
    assert "draft model" not in out


def test_plan_that_does_not_fit(capsys: pytest.CaptureFixture[str], offline: None) -> None:
    out, err = told(capsys, "llama-8b", "--ctx", "131072", status=OUT_OF_MEMORY)
    assert rows(out)["context"][0] == "131,072"
    last = err.splitlines()[-1]
    assert last.startswith("localgen: bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M needs 22.4 ")
    assert "8.6 GB are free; what would fit: --ctx " in last
    assert "-ctk q8_0 -ctv q8_0" in last
    found = record(capsys, "llama-8b", "--ctx", "131072", status=OUT_OF_MEMORY)
    assert found["plans"][0]["fits"] is False
    assert found["plans"][0]["refusal"] in err


def test_a_model_without_a_context_that_fits(
    capsys: pytest.CaptureFixture[str], offline: None
) -> None:
    out, err = told(capsys, "llama-70b", status=OUT_OF_MEMORY)
    assert rows(out)["context"] == ["256", "no context fits, the model's maximum is 131,072"]
    assert "needs 42.9 GB, 8.6 GB are free" in err.splitlines()[-1]


def test_quantizations_beside_each_other(capsys: pytest.CaptureFixture[str], offline: None) -> None:
    out, _ = told(capsys, "llama-8b", "--quant", "q4_k_m", "--quant", "Q8_0")
    assert [line.split()[0] for line in out.splitlines()[3:5]] == ["Q4_K_M", "Q8_0"]
    assert "AT MOST: limit set by memory bandwidth" in out
    all_of_them = record(capsys, "llama-8b", "--quant", "all")["plans"]
    assert len(all_of_them) > 10
    assert {plan["fits"] for plan in all_of_them} == {True, False}


def test_an_entry_that_lacks_facts_names_them(
    capsys: pytest.CaptureFixture[str], offline: None
) -> None:
    out, _ = told(capsys, "qwen3.5-4b")
    assert rows(out)["KV cache"] == ["unknown"]
    assert "unknown: layers, hidden, heads, kv_heads" in out
    out, _ = told(capsys, "gemma4-31b")
    assert rows(out)["total"][0] == "unknown"
    assert "the size of its weights" in out


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["nothing-like-it"], "model_not_found", "Model 'nothing-like-it' not found"),
        (["missing.gguf"], "model_not_found", "there is no file missing.gguf"),
        (["tiny", "--ctx", "4096"], "invalid_request", "was trained for 2,048 tokens"),
        (["tiny", "--ctx", "-1"], "invalid_request", "use 1 to 2,048"),
        (
            ["tiny", "-ctk", "q3"],
            "invalid_request",
            "--cache-type-k is 'q3', it must be one of f32",
        ),
        (["tiny", "--quant", "Q8_0"], "invalid_request", "is a file with one quantization"),
        (["llama-8b", "--quant", "Q9"], "model_not_found", "has no Q9. Available: "),
        (["acme/unknown"], "hub_unavailable", "HF_HUB_OFFLINE is set"),
        (["tiny", "--draft", ""], "invalid_request", "--draft is empty"),
        (
            ["tiny", "--draft", "nowhere"],
            "model_not_found",
            "--draft nowhere: Model 'nowhere' not found",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    capsys: pytest.CaptureFixture[str],
    offline: None,
    arguments: list[str],
    code: str,
    complaint: str,
) -> None:
    out, err = told(capsys, *arguments, status=errors.EXIT_STATUS_BY_CODE[code])
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("localgen: ")
    assert complaint in last


def test_a_damaged_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(TINY_GGUF.read_bytes()[:200_000])
    _, err = told(capsys, str(path), status=errors.EXIT_STATUS_BY_CODE["load_failed"])
    assert str(path) in err


def test_the_hub_is_asked_for_the_beginning_of_a_file(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    content = TINY_GGUF.read_bytes()
    hub.add("acme/Tiny-GGUF", {"tiny-F16.gguf": content, "tiny-Q8_0.gguf": content[:9_000_000]})
    (plan,) = record(capsys, "acme/Tiny-GGUF:Q8_0")["plans"]
    assert (plan["source"], plan["weights_bytes"]) == ("hub", 9_000_000)
    assert plan["kv_bytes_per_1k"] == 3_072_000
    assert plan["ctx_train"] == 2048
    both = record(capsys, "acme/Tiny-GGUF", "--quant", "all")["plans"]
    assert [one["quant"] for one in both] == ["F16", "Q8_0"]
    assert "local" not in told(capsys, "acme/Tiny-GGUF", "--quant", "all")[0]
    assert not list((Path(measurements.measurements_path()).parent / "hub").glob("**/*.gguf"))


def test_a_folder_on_the_hub(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    files = {"config.json": json.dumps(config).encode(), "model.safetensors": bytes(5000)}
    hub.add("acme/Tiny", files)
    arguments = ("acme/Tiny", "--backend", "cuda", "--device", "cpu")
    (plan,) = record(capsys, *arguments)["plans"]
    assert plan["source"] == "hub"
    # float32 on a CPU
    assert (plan["weights_bytes"], plan["kv_bytes_per_1k"]) == (10_000, 2 * 2 * 2 * 16 * 4 * 1000)
    _, err = told(capsys, "acme/Tiny", status=errors.EXIT_STATUS_BY_CODE["invalid_request"])
    assert "only the cuda backend runs" in err


def test_beside_the_loaded_model(
    capsys: pytest.CaptureFixture[str], measured: ServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCALGEN_MEMORY_LIMIT")
    with LocalClient(measured) as client:
        client.connect()
        try:
            info = client.load("tiny", LoadOptions(parallel=4, ctx=1024, kv_unified=True))
            found = record(capsys, "tiny")
            out, _ = told(capsys, "tiny")
            (running,) = client.stats()["models"]
        finally:
            client.shutdown()
    (plan,), loaded = found["plans"], found["loaded"]
    assert (plan["ctx"], plan["kv_tokens"]) == (loaded["ctx"], loaded["kv_tokens"]) == (1024, 16384)
    assert plan["kv_bytes"] == info.kv_bytes == loaded["kv_bytes"]
    assert plan["work_bytes"] == info.work_bytes
    assert plan["weights_bytes"] == info.size_bytes
    assert loaded["weights_bytes"] == pytest.approx(info.size_bytes, abs=11_000)
    assert loaded["work_bytes"] == pytest.approx(plan["work_bytes"], rel=0.3)
    assert loaded["rss_bytes"] > loaded["kv_bytes"]
    assert running["rss_bytes"] > 0
    assert running["gpu_bytes"] is None
    assert "LOADED" in out
    assert rows(out)["KV cache"][:2] == ["50.3 MB", "50.3 MB"]
    assert "resident" in rows(out)["total"][2]


def test_a_draft_model_beside_the_loaded_one(
    capsys: pytest.CaptureFixture[str],
    measured: ServerSettings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("LOCALGEN_MEMORY_LIMIT")
    with LocalClient(measured) as client:
        client.connect()
        try:
            draft = tmp_path / "tiny-draft.gguf"
            shutil.copy(DRAFT_GGUF, draft)
            client.load("tiny", LoadOptions(ctx=1024, draft=str(draft)))
            found = record(capsys, "tiny")
            out, _ = told(capsys, "tiny")
            without = record(capsys, "tiny", "--draft", "none")
            draft.unlink()
            gone, said = told(capsys, "tiny")
        finally:
            client.shutdown()
    (plan,), loaded = found["plans"], found["loaded"]
    assert plan["draft"]["name"] == "tiny-draft"
    assert plan["draft"]["kv_bytes"] == loaded["draft"]["kv"]
    assert plan["draft"]["weights_bytes"] == pytest.approx(loaded["draft"]["weights"], abs=11_000)
    planned, allocated, _ = rows(out)["draft model"]
    assert allocated.split()[1] == planned.split()[1] == "MB"
    assert without["plans"][0]["draft"] is None
    assert without["loaded"]["draft"] is not None
    assert str(draft) in said
    assert len(rows(gone)["draft model"]) == 1, "what is loaded, and no estimate"


def test_nothing_is_started_for_a_plan(measured: ServerSettings) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "localgen.cli.main", "plan", "tiny", "--measure"],
        env=os.environ | measured.to_environment() | {"XDG_CACHE_HOME": str(measured.state_dir)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "at most" in done.stdout
    assert not measured.socket_path.exists()
