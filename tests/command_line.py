"""Runs command lines in this process: scripted clients, standard input, folders of their own."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_client import Script, ScriptedClient

import localgen.client


class Piped(io.TextIOWrapper):
    """Standard input that is a pipe."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")


class Terminal(Piped):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(sys, "stdin", Terminal(b""))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptedClient]:
    def make(*scripts: Script, running: bool = True) -> ScriptedClient:
        client = ScriptedClient(*scripts, running=running)
        monkeypatch.setattr(localgen.client, "LocalClient", lambda *_args, **_named: client)
        return client

    return make


def pipe_in(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", Piped(content))
