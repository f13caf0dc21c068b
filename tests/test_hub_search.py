"""`localgen search`: the catalog, filtered, with what fits and what is installed."""

from __future__ import annotations

import json
import re

import pytest
from loopback_hub import LoopbackHub
from pull_fixtures import hub, random_bytes

from localgen.cli.main import run_command_line
from localgen.hub import catalog, quant_choice
from localgen.hub.quant_choice import AvailableMemory
from localgen.hub.search import search_catalog

__all__ = ["hub"]
SOME = AvailableMemory(ram_bytes=8_000_000_000)


def names(*words: str) -> list[str]:
    return [model.name for model in search_catalog(words, SOME)]


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant_choice, "available_memory", lambda: SOME)


def test_without_words_all_models_are_listed(hub: LoopbackHub) -> None:
    assert names() == ["smollm2", *(entry.alias for entry in catalog.catalog_entries())]
    assert hub.requests == []


def test_all_words_must_match(hub: LoopbackHub) -> None:
    assert names("CODER", "7b") == ["qwen2.5-coder-7b"]
    assert names("code") == [
        entry.alias for entry in catalog.catalog_entries() if entry.kind == "code"
    ]
    # other spellings of a name
    assert "llama3.1-8b" in names("llama-8b")
    assert names("llama-3.1-8b") == ["llama3.1-8b"]
    assert names("llama3.1:8b") == ["llama3.1-8b"]
    assert names("llama", "nothing-like-it") == []


def test_what_fits_is_the_estimate_of_show_quants(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    for name, place in (("llama3.1-8b", "CPU"), ("llama3.3-70b", None)):
        assert run_command_line(["show", name, "--quants", "--json"]) == 0
        rows = {row["quant"]: row for row in json.loads(capsys.readouterr().out)}
        assert run_command_line(["search", name, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        for field in ("size_bytes", "need_bytes", "runs_on"):
            assert found[field] == rows["Q4_K_M"][field]
        assert found["runs_on"] == place


def test_table_of_results(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["search", "llama3.3"]) == 0
    out, err = capsys.readouterr()
    head, row = (re.split(r" {3,}", line) for line in out.splitlines())
    assert head == ["NAME", "PARAMS", "SIZE", "NEEDS", "RUNS ON", "INSTALLED", "ALSO"]
    assert row[:3] == ["llama3.3-70b", "70.5B", "42.5 GB"]
    assert row[4] == "does not fit"
    assert err.startswith("8.0 GB of memory are free; `localgen pull NAME`")
    assert run_command_line(["search", "gemma3-1b"]) == 0
    row = re.split(r" {3,}", capsys.readouterr().out.splitlines()[1])
    assert row[:2] == ["gemma3-1b", "1.0B"]


def test_installed_models_are_marked(hub: LoopbackHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add(
        "bartowski/Llama-3.2-1B-Instruct-GGUF",
        {"Llama-3.2-1B-Instruct-Q8_0.gguf": random_bytes(50_000)},
    )
    assert run_command_line(["pull", "llama-1b:q8_0"]) == 0
    capsys.readouterr()
    assert run_command_line(["search", "llama", "--json"]) == 0
    records = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    assert records["llama3.2-1b"]["installed"] == ["Q8_0"]
    assert records["llama3.2-3b"]["installed"] == []
    assert records["llama3.2-1b"]["params"] == 1_240_000_000


def test_no_match_says_what_one_can_do(
    hub: LoopbackHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["search", "lama-9b"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "Did you mean llama-8b" in err
    assert "localgen pull owner/name" in err
    assert run_command_line(["search", "lama-9b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert hub.requests == []
