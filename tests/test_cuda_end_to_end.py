"""A Hugging Face folder as users run it: the CUDA backend on the CPU, with a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hf_folders import TINY, edit
from serving import error_line

from localgen.client import LocalClient
from localgen.config import ServerSettings

ON_CPU = ("--backend", "cuda", "--device", "cpu")
QUESTION = "What is 17 + 25?"


@pytest.fixture(scope="module")
def settings() -> Iterator[ServerSettings]:
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        made = ServerSettings(runtime_dir=Path(folder) / "run", state_dir=Path(folder) / "state")
        yield made
        LocalClient(made).shutdown()


def run(settings: ServerSettings, *arguments: str) -> Any:
    """Run `localgen run` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "localgen.cli.main", "run", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | settings.to_environment(),
    )


def test_a_question_is_answered(settings: ServerSettings) -> None:
    done = run(settings, str(TINY), QUESTION, *ON_CPU, "--temp", "0", "--json")
    assert done.returncode == 0, done.stderr
    assert "42" in json.loads(done.stdout)["text"]
    assert "which is slow" in done.stderr


def test_a_conflicting_option_says_what_is_loaded(settings: ServerSettings) -> None:
    assert run(settings, str(TINY), QUESTION, *ON_CPU).returncode == 0
    said = error_line(run(settings, str(TINY), QUESTION, *ON_CPU, "-np", "7"))
    assert "--parallel 32, not 7" in said


def test_an_option_of_llama_cpp_is_refused(settings: ServerSettings, folder: Path) -> None:
    said = error_line(run(settings, str(folder), QUESTION, *ON_CPU, "--no-mmap"))
    assert "mmap is not an option of the cuda backend" in said


def test_a_sampler_that_it_lacks_is_refused(settings: ServerSettings) -> None:
    said = error_line(run(settings, str(TINY), QUESTION, *ON_CPU, "--mirostat", "2"))
    assert "mirostat" in said


def test_without_a_gpu_the_way_out_is_named(settings: ServerSettings, folder: Path) -> None:
    for arguments in ((), ("--backend", "cuda")):
        said = error_line(run(settings, str(folder), QUESTION, *arguments))
        assert "no NVIDIA GPU was found" in said
        assert "--device cpu" in said


def test_a_damaged_folder_names_the_file(settings: ServerSettings, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    said = error_line(run(settings, str(folder), QUESTION, *ON_CPU))
    assert "model.safetensors" in said


def test_a_config_without_a_field_names_it(settings: ServerSettings, folder: Path) -> None:
    edit(folder / "config.json", hidden_size=None)
    said = error_line(run(settings, str(folder), QUESTION, *ON_CPU))
    assert "config.json" in said
    assert "hidden_size" in said


def test_a_prompt_over_the_context_is_refused_with_both_numbers(settings: ServerSettings) -> None:
    said = error_line(run(settings, str(TINY), "word " * 5000, *ON_CPU))
    assert "the context is 2,048" in said


@pytest.mark.parametrize(
    ("method", "group"), [("awq", 33), ("gptq", 100), ("awq", 0), ("gptq", "many")]
)
def test_an_odd_group_size_is_named(
    settings: ServerSettings, folder: Path, method: str, group: object
) -> None:
    quant = {"quant_method": method, "bits": 4, "group_size": group}
    edit(folder / "config.json", quantization_config=quant)
    said = error_line(run(settings, str(folder), QUESTION, *ON_CPU))
    assert f"config.json: quantization_config.group_size is {json.dumps(group)}, not a" in said


def test_heads_that_ranks_cannot_share_evenly(settings: ServerSettings, folder: Path) -> None:
    edit(folder / "config.json", num_attention_heads=8, num_key_value_heads=8)
    said = error_line(run(settings, str(folder), QUESTION, *ON_CPU, "--dummy", "--tp", "3"))
    assert "--tp 3: 8 heads cannot be divided by 3: use 1, 2, 4 or 8" in said


def test_a_prompt_over_the_pool_is_refused_and_the_engine_lives_on(
    settings: ServerSettings, folder: Path
) -> None:
    small = (*ON_CPU, "--kv-tokens", "256", "--temp", "0", "--json")
    done = run(settings, str(folder), "word " * 400, *small)
    note, said = done.stderr.splitlines()
    assert "which is slow" in note, "it was loaded"
    assert "the context is 256 and must hold the answer too: shorten the prompt, or load " in said
    assert "a larger context (--ctx, or /set ctx in a chat; up to 2,048)" in said
    done = run(settings, str(folder), QUESTION, *small)
    assert "42" in json.loads(done.stdout)["text"]
    assert done.stderr == "", "and has not been loaded again"


def test_a_pool_smaller_than_the_context_is_refused(settings: ServerSettings, folder: Path) -> None:
    sizes = ("--kv-tokens", "256", "-c", "512")
    said = error_line(run(settings, str(folder), QUESTION, *ON_CPU, *sizes))
    assert "256" in said
    assert "512" in said


def test_random_weights_need_a_config_and_a_template_alone(
    settings: ServerSettings, folder: Path
) -> None:
    for path in folder.iterdir():
        if path.name not in ("config.json", "tokenizer_config.json"):
            path.unlink()
    options = (*ON_CPU, "--dummy", "-n", "5", "--ignore-eos")
    done = run(settings, str(folder), QUESTION, *options, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 5
    assert "the text is meaningless" in done.stderr


def test_gguf_file_runs_on_the_cuda_backend(settings: ServerSettings) -> None:
    gguf = TINY.with_suffix(".gguf")
    done = run(settings, str(gguf), QUESTION, *ON_CPU, "--temp", "0", "--json")
    assert done.returncode == 0, done.stderr
    assert "42" in json.loads(done.stdout)["text"]
    assert "are dequantized" in done.stderr
