"""A hub on loopback and helpers for tests of pulls."""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub

from localgen.hub import pull
from localgen.hub.download import PullPlan
from localgen.hub.hf_client import repo_folder
from localgen.hub.resolve import resolve_model

REPO = "acme/Chat-GGUF"
Q4 = "chat-Q4_K_M.gguf"


# magic, version 3, no tensors, no keys: a pull checks these before it downloads the rest
GGUF_START = struct.pack("<4sIQQ", b"GGUF", 3, 0, 0)


def random_bytes(size_bytes: int, seed: int = 0) -> bytes:
    return GGUF_START + random.Random(seed).randbytes(size_bytes - len(GGUF_START))


CONTENT = random_bytes(3_000_000)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    from huggingface_hub import constants

    server = LoopbackHub()
    endpoint = server.endpoint
    # huggingface_hub reads its variables at import
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    server.add(REPO, {Q4: CONTENT, "README.md": b"# Chat\n"})
    with server.serving():
        yield server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces waits by short ones; returns the seconds requested."""
    waits: list[float] = []
    sleep = time.sleep

    def skip(seconds: float) -> None:
        waits.append(seconds)
        sleep(min(seconds, 0.01))

    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", skip)
    return waits


def fetch(name: str = REPO) -> PullPlan:
    plan = pull.plan_pull(name)
    pull.run_pull(plan, lambda here: None)
    return plan


def unfinished() -> list[Path]:
    return list(repo_folder(REPO).glob("blobs/*.incomplete"))


def assert_clean(name: str = REPO, content: bytes = CONTENT) -> None:
    """Assert that the model resolves and no unfinished file is left."""
    file = resolve_model(name)
    assert b"".join(path.read_bytes() for path in file.shards) == content
    assert unfinished() == []


def environment(hub: LoopbackHub, cache: Path, folder: Path) -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(cache),
        "HF_HOME": str(folder / "home"),
        "NO_PROXY": "*",
        "PYTHONPATH": os.pathsep.join([root, os.environ["PYTHONPATH"]]),
        "LOCALGEN_STATE_DIR": str(folder / "state"),
    }
