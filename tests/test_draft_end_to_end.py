"""A draft model with real commands, server and engines of both backends."""

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
from draft_models import DRAFT_GGUF, other_token
from hf_folders import TINY
from real_server import real_server
from serving import error_line

from localgen.client import LocalClient
from localgen.config import ServerSettings

QUESTION = "What is 17 + 25?"
ON_CPU = ("--backend", "cuda", "--device", "cpu")
GREEDY = ("--temp", "0", "--json")


@pytest.fixture(scope="module")
def settings() -> Iterator[ServerSettings]:
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        made = ServerSettings(runtime_dir=Path(folder) / "run", state_dir=Path(folder) / "state")
        yield made
        LocalClient(made).shutdown()


@pytest.fixture
def client(settings: ServerSettings) -> Iterator[LocalClient]:
    with LocalClient(settings) as made:
        made.connect()
        yield made
        for model in made.running_models():
            made.unload(model.id)


def run(settings: ServerSettings, *arguments: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "localgen.cli.main", "run", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | settings.to_environment(),
        cwd=DRAFT_GGUF.parent,
    )


@pytest.mark.parametrize("model", ["tiny", str(TINY)], ids=["llamacpp", "cuda"])
def test_a_question_is_answered_with_a_draft_model(
    settings: ServerSettings, client: LocalClient, model: str
) -> None:
    where = () if model == "tiny" else ON_CPU
    asked = (model, QUESTION, "--draft", f"./{DRAFT_GGUF.name}", *where, *GREEDY)
    done = run(settings, *asked)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert "42" in record["text"]
    assert set(record["timings"]["draft_by"]) <= {"n-gram", "tiny-draft"}
    (loaded,) = client.stats()["models"]
    assert loaded["draft"] == "tiny-draft"
    assert loaded["info"]["options"]["draft"] == str(DRAFT_GGUF)
    assert loaded["stats"]["speculation"]["drafters"] == ["n-gram", "tiny-draft"]
    again = run(settings, *asked)
    assert json.loads(again.stdout)["text"] == record["text"]
    other = run(settings, model, QUESTION, "--draft", "ngram", *where)
    assert "is loaded with --draft" in other.stderr


def test_unsuitable_draft_model_is_one_line_and_the_server_continues(
    settings: ServerSettings, client: LocalClient, tmp_path: Path
) -> None:
    stranger = str(other_token(tmp_path / "stranger.gguf"))
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(b"GGUF" + bytes(1000))
    for draft, said in (
        (stranger, "stranger cannot draft for tiny: token 1 is '<|sesame|>' there"),
        (str(corrupt), "corrupt.gguf"),
        ("nonesuch", "--draft nonesuch: Model 'nonesuch' not found"),
        (str(TINY), "llama.cpp runs .gguf files"),
    ):
        done = run(settings, "tiny", QUESTION, "--draft", draft)
        assert said in error_line(done)
    done = run(settings, "tiny", QUESTION, "--draft", "auto", *GREEDY)
    assert "42" in json.loads(done.stdout)["text"]
    assert "the catalog has no draft model for tiny" in done.stderr


def test_server_starts_with_a_default_drafter(tmp_path: Path) -> None:
    with real_server("tiny", "--draft", str(DRAFT_GGUF)) as served:
        log = served.log.read_text()
    assert "loading tiny" in log
    assert "error" not in log.lower()


def test_unsuitable_default_drafter_for_the_named_model_ends_the_server(
    settings: ServerSettings, tmp_path: Path
) -> None:
    stranger = str(other_token(tmp_path / "stranger.gguf"))
    with tempfile.TemporaryDirectory(prefix="lg") as folder:
        own = ServerSettings(runtime_dir=Path(folder) / "run", state_dir=Path(folder) / "state")
        done = subprocess.run(
            [sys.executable, "-m", "localgen.cli.main", "serve", "tiny", "--draft", stranger],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | own.to_environment(),
        )
    assert done.returncode != 0
    assert "stranger cannot draft for tiny" in done.stderr.splitlines()[-1]
