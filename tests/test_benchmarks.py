"""The benchmarks' own arithmetic, their random model, and a short run without llama.cpp's tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from benchmarks import cpu, random_gguf
from benchmarks.llamacpp_tools import NAMES, ToolFailed, Tools
from benchmarks.measure import RATE, ModelLine, Report, table
from benchmarks.random_gguf import Q4_K, Q6_K, SHAPES, Tensor, q4_k, q6_k
from benchmarks.random_vocabulary import random_vocabulary, random_words
from benchmarks.streams import (
    Stream,
    StreamFailed,
    decode_rate,
    last_first_token_ms,
    longest_gap_ms,
    output_rate,
)
from localgen.backends.llamacpp.native import LlamaModel
from localgen.backends.llamacpp.options import LlamaOptions
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(("make", "kind"), [(q4_k, Q4_K), (q6_k, Q6_K)])
def test_random_blocks_have_the_deviation_asked_for(
    make: Callable[[np.random.Generator, int, float], NDArray[np.uint8]],
    kind: GGMLQuantizationType,
) -> None:
    weights = dequantize(make(np.random.default_rng(1), 2000, 0.02), kind)
    assert weights.shape == (2000, 256)
    assert abs(weights.mean()) < 1e-3
    assert weights.std() == pytest.approx(0.02, rel=0.02)


def test_the_large_model_is_that_of_llama_3_2_1b() -> None:
    tensors = list(random_gguf.tensors(SHAPES["1b"]))
    assert sum(np.prod(t.shape) for t in tensors) == 1_235_814_400
    # what llama-bench says of the published Q4_K_M file
    assert sum(random_gguf.num_bytes(t) for t in tensors) / 2**20 == pytest.approx(762.81, abs=0.01)
    finer = [t.name for t in tensors if t.type is Q6_K and "ffn_down" in t.name]
    assert len(finer) == 8
    assert Tensor("token_embd.weight", (128_256, 2048), Q6_K) in tensors


def test_the_vocabulary_has_its_size_and_no_token_twice() -> None:
    vocabulary = random_vocabulary(128_256)
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == 128_256
    assert vocabulary.special_id("<|eot_id|>") == 128_009
    assert all(vocabulary.tokens[i].startswith("Ġ") for i in vocabulary.spoken)
    with pytest.raises(ValueError, match="too few"):
        random_vocabulary(600)


def test_llama_cpp_reads_the_model_and_text_round_trips() -> None:
    vocab = LlamaCppTokenizer(
        LlamaModel(random_gguf.cached(SHAPES["quick"]), LlamaOptions(), lambda share: None)
    )
    words = random_words(400, "any")
    tokens = vocab.encode(words)
    assert len(tokens) == 1 + 400  # one for the beginning of the text
    for text in (words, "Größe, 鯨 and 🐋\n\n\t100 % }{"):
        pieces = b"".join(vocab.piece(token) for token in vocab.encode(text)[1:])
        assert pieces.decode() == text


def _stream(*arrivals: tuple[float, int], sent_s: float = 0.0) -> Stream:
    last_s, tokens = arrivals[-1]
    return Stream(sent_s=sent_s, ended_s=last_s, arrivals=list(arrivals), completion_tokens=tokens)


def test_decode_rate_counts_only_while_all_generate() -> None:
    early = _stream((1.0, 1), (2.0, 2), (3.0, 4), (4.0, 8))
    late = _stream((2.0, 1), (3.0, 3), (4.0, 5), (9.0, 6))
    # from 2 s to 4 s: 6 of the first and 4 of the second
    assert decode_rate([early, late]) == pytest.approx(5.0)
    assert decode_rate([early]) == pytest.approx(7 / 3)
    assert output_rate([early, late]) == pytest.approx(14 / 9)
    assert last_first_token_ms([early, late]) == pytest.approx(2000)
    assert longest_gap_ms([early, late]) == pytest.approx(5000)
    with pytest.raises(StreamFailed, match="never generated together"):
        decode_rate([early, _stream((5.0, 1), (6.0, 2))])


def test_ratios_are_taken_round_by_round() -> None:
    report = Report(ModelLine("m", 2**20, 10**9), 3, False, threads=2, load_options={})
    ours = report.add("tg", "ours", RATE, [10.0, 20.0, 90.0])
    theirs = report.add("tg", "theirs", RATE, [10.0, 40.0, 100.0])
    report.ratio(ours, theirs, 0.97, at_least=True)
    report.ratio(ours, theirs, 0.97, at_least=False)
    report.most(report.add("wait", "ours", "ms", [1.0, 5.0, 9.0]), 5.0)
    assert [c.met for c in report.checks] == [False, True, True]
    assert (report.checks[0].value, report.checks[0].low, report.checks[0].high) == (0.9, 0.5, 1.0)
    assert "| m     | 1.00 MiB | 1.00 B |" in report.text()


def test_a_table_is_aligned_markdown() -> None:
    assert (
        table(("a", "long"), [("xyz", "1")]) == "| a   | long |\n| --- | ---- |\n| xyz | 1    |\n"
    )


def _fake_tools(folder: Path, script: str) -> Tools:
    for name in NAMES:
        (folder / name).write_text("#!/bin/sh\n" + script)
        (folder / name).chmod(0o755)
    return Tools(folder)


def test_a_line_that_a_tool_lost_is_asked_for_again(tmp_path: Path) -> None:
    script = 'if [ -e "$0.ran" ]; then echo \'{"avg_ts": 12.5}\'; fi; touch "$0.ran"\n'
    tools = _fake_tools(tmp_path, script)
    assert tools.generation(tmp_path / "model.gguf", 128, 2) == 12.5
    assert tools.commands == ["llama-bench -m model.gguf -p 0 -n 128 -t 2 -r 1 -o jsonl"]


def test_a_tool_that_fails_says_why(tmp_path: Path) -> None:
    tools = _fake_tools(tmp_path, "echo no such model >&2; exit 3\n")
    with pytest.raises(ToolFailed, match="llama-bench ended with status 3: no such model"):
        tools.generation(tmp_path / "model.gguf", 128, 2)


def test_missing_tools_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu.main(["--quick", "--tools", str(tmp_path)]) == 1
    assert "has no llama-bench, llama-batched-bench" in capsys.readouterr().err


def test_a_quick_run_without_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    tests = ["alone", "prefix", "turn", "overhead", "help"]
    assert cpu.main(["--quick", "--no-tools", "--output", str(output), "--only", *tests]) == 0
    assert "| model" in capsys.readouterr().out
    text = output.read_text()
    assert str(tmp_path) not in text
    result = json.loads(text)
    assert result["quick"]
    assert {"date", "machine", "versions", "commands", "threads"} <= result.keys()
    sides = {series["side"] for series in result["series"]}
    assert {"localgen", "bare loop", "client", "engine in this process"} <= sides
    assert all(value > 0 for s in result["series"] for value in s["values"] if s["unit"] == RATE)
    # the whole first turn came from the cache
    computed = [c for c in result["checks"] if "prompt computed" in c["name"]]
    assert [c["met"] for c in computed] == [True, True], computed
