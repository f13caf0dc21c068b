"""Models with the same name: which file answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import ServerHarness, running_alone, server_harness, wait_until

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions
from localgen.chat.parameters import ModelOptions
from localgen.chat.session import ChatSession
from localgen.cli.main import run_command_line
from localgen.client import LocalClient


@pytest.fixture(scope="module")
def server() -> Iterator[ServerHarness]:
    with server_harness() as built:
        yield built


@pytest.fixture
def served(server: ServerHarness) -> Iterator[ServerHarness]:
    yield from running_alone(server)


def ask(served: ServerHarness, model: str) -> Any:
    return served.chat(model, "a b").json()


def twins(served: ServerHarness) -> list[str]:
    """Two files with the same name in two folders."""
    first = Path(served.model("twin"))
    paths = []
    for folder in ("one", "two"):
        path = first.parent / folder / first.name
        path.parent.mkdir()
        path.write_bytes(first.read_bytes())
        paths.append(str(path))
    return paths


def test_each_path_is_its_own_model(served: ServerHarness) -> None:
    one, two = twins(served)
    for path in (one, two, one):
        assert ask(served, path)["choices"][0]["message"]["content"] == "a b"
    assert served.loads(one) == served.loads(two) == 1
    assert ask(served, "twin")["error"]["code"] == "invalid_request"
    with served.client() as client, pytest.raises(InvalidRequest, match="2 models are named"):
        client.unload("twin")


def test_a_short_name_means_what_was_loaded_by_its_path(served: ServerHarness) -> None:
    path = served.model("lonely")
    ask(served, path)
    assert ask(served, "lonely")["choices"][0]["message"]["content"] == "a b"
    assert served.loads(path) == 1
    with served.client() as client:
        assert client.unload("lonely")
    assert ask(served, "lonely")["error"]["code"] == "model_not_found"


def test_a_chat_with_a_path_survives_the_unloading_of_its_model(
    served: ServerHarness, tmp_path: Path
) -> None:
    path = served.model("mine")
    with served.client() as client:
        session = ChatSession(client, tmp_path, ModelOptions())
        session.load(path, lambda _share: None)
        client.unload(path)
        session.ensure_loaded(lambda _share: None)
        assert served.loads(path) == 2


def test_keep_alive_is_for_one_model(served: ServerHarness) -> None:
    brief, lasting = served.model("brief"), served.model("lasting")
    with served.client() as client:
        load(client, brief, "0.2")
        load(client, lasting, "-1")
        wait_until(lambda: served.loaded() == ["lasting"])
        (model,) = client.running_models()
        assert model.until_s is None


def load(client: LocalClient, path: str, keep_alive: str) -> None:
    client.load(path, LoadOptions(), lambda _share: None, keep_alive=keep_alive)


def test_aliases_of_installed_models_are_listed_as_models(served: ServerHarness) -> None:
    served.named("pet")
    with (served.settings.state_dir / "models.toml").open("a") as names:
        names.write('future = "llama-8b"\n')
    cards = {card["id"]: card for card in served.http.get("/v1/models").json()["data"]}
    tags = {entry["name"] for entry in served.http.get("/api/tags").json()["models"]}
    assert cards["pet"]["path"] == served.model("echo").replace("echo", "pet")
    assert {"pet", "tiny"} <= tags == set(cards)
    assert "future" not in tags


def test_ps_shows_the_aliases_of_a_file(
    served: ServerHarness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in served.settings.to_environment().items():
        monkeypatch.setenv(name, value)
    path = served.model("mine")
    names = f'work = "{path}"\npet = "{path}"\nother = "{served.model("other")}"\n'
    (served.settings.state_dir / "models.toml").write_text(names)
    ask(served, "work")
    assert run_command_line(["ps"]) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert row.startswith("mine ")
    assert row.endswith("   work, pet")
    assert run_command_line(["ps", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)
    assert model["aliases"] == ["work", "pet"]
