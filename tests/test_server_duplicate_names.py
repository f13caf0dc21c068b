"""Models with the same name: which file answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
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


def twins(served: ServerHarness, name: str = "twin") -> list[str]:
    """Two files with the same name in two folders."""
    first = Path(served.model(name))
    paths = []
    for folder in ("one", "two"):
        path = first.parent / folder / first.name
        path.parent.mkdir(exist_ok=True)
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
    assert row.startswith("work ")
    assert row.endswith("   pet")
    assert run_command_line(["ps", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)
    assert (model["name"], model["aliases"]) == ("work", ["pet"])


# -- one name on every route ---------------------------------------------------------------------


def chat_routes(model: str) -> dict[str, dict[str, Any]]:
    """Requests of every protocol for a short answer."""
    messages = [{"role": "user", "content": "a b"}]
    return {
        "/v1/chat/completions": {"model": model, "messages": messages},
        "/v1/completions": {"model": model, "prompt": "a b"},
        "/v1/embeddings": {"model": model, "input": "a b"},
        "/v1/responses": {"model": model, "input": "a b"},
        "/v1/messages": {"model": model, "messages": messages, "max_tokens": 9},
        "/api/chat": {"model": model, "messages": messages, "stream": False},
        "/api/generate": {"model": model, "prompt": "a b", "stream": False},
        "/api/embed": {"model": model, "input": "a b"},
        "/completion": {"model": model, "prompt": "a b"},
    }


def listed_names(served: ServerHarness) -> list[str]:
    """Names in the list of models, which are the same in all lists."""
    names = [card["id"] for card in served.http.get("/v1/models").json()["data"]]
    tags = [entry["name"] for entry in served.http.get("/api/tags").json()["models"]]
    assert names == tags
    assert len(set(names)) == len(names)
    return [name for name in names if "/" not in name]  # not of the cache


def loaded_names(served: ServerHarness) -> list[str]:
    """Names of the loaded models, which are the same everywhere."""
    names = served.loaded()
    running = served.http.get("/api/ps").json()["models"]
    assert [entry["name"] for entry in running] == names
    assert len(set(names)) == len(names)
    return names


def is_logged(served: ServerHarness, name: str) -> bool:
    """True if the last line of a request in the log has this name of a model."""
    lines = served.settings.log_path.read_text().splitlines()
    (found,) = re.findall(r" model=(\S+)", [line for line in lines if " request id=" in line][-1])
    return bool(found == name)


def metric_names(served: ServerHarness) -> list[str]:
    """Models with running requests in the metrics. Each series is there once."""
    page = served.http.get("/metrics").text
    series = [line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")]
    assert len(set(series)) == len(series)
    return re.findall(r'localgen:num_requests_running\{model_name="([^"]*)"', page)


def test_an_alias_is_the_name_on_every_route(served: ServerHarness) -> None:
    """Of a file whose own name is that of an installed model."""
    path = served.model("tiny")
    (served.settings.state_dir / "models.toml").write_text(f'own = "{path}"\n')
    assert listed_names(served) == ["tiny", "own"]
    for route, body in chat_routes("own").items():
        reply = served.http.post(route, json=body)
        assert (reply.status_code, reply.json()["model"]) == (200, "own"), route
        wait_until(partial(is_logged, served, "own"))
    assert served.loads(path) == 1
    assert listed_names(served) == ["tiny", "own"]
    assert loaded_names(served) == metric_names(served) == ["own"]
    cards = {card["id"]: card for card in served.http.get("/v1/models").json()["data"]}
    assert cards["own"]["state"] == "loaded"
    assert cards["tiny"]["state"] == "available"
    for name in cards:
        assert served.http.get(f"/v1/models/{name}").json() == cards[name]
    with served.client() as client:
        assert not client.unload("tiny")
        assert client.unload("own")


def test_two_names_of_a_model_share_it(served: ServerHarness) -> None:
    """Each is answered and logged as it was asked for; the first one is counted."""
    path = served.model("shared")
    (served.settings.state_dir / "models.toml").write_text(f'one = "{path}"\ntwo = "{path}"\n')
    for name in ("two", "one", "two"):
        assert ask(served, name)["model"] == name
        wait_until(partial(is_logged, served, name))
    # a path is not a name
    assert ask(served, path)["model"] == "one"
    assert served.loads(path) == 1
    assert loaded_names(served) == ["one"]
    assert "one" in metric_names(served)
    counted = 'localgen:request_success_total{finished_reason="stop",model_name="one"} 4.0'
    wait_until(lambda: counted in served.http.get("/metrics").text)
    assert 'model_name="two"' not in served.http.get("/metrics").text
    assert {"one", "two"} <= set(listed_names(served))


def test_a_model_at_a_path_has_a_name_of_its_own(served: ServerHarness) -> None:
    """Loaded without an alias, from a file with the name of an installed model."""
    path = served.model("tiny")
    assert (served.settings.state_dir / "models.toml").write_text("") == 0
    name = ask(served, path)["model"]
    assert re.fullmatch("tiny@[0-9a-f]{12}", name)
    assert listed_names(served) == ["tiny", name]
    assert loaded_names(served) == [name]
    assert ask(served, name)["model"] == name
    assert served.http.get(f"/v1/models/{name}").json()["path"] == path
    # the file is not one that can be described
    assert "not a valid GGUF" in served.http.post("/api/show", json={"model": name}).text
    assert served.loads(path) == 1


def test_models_that_share_a_name_are_told_apart(served: ServerHarness) -> None:
    (served.settings.state_dir / "models.toml").write_text("")
    one, two = twins(served, "pair")
    for path in (one, two):
        ask(served, path)
    names = loaded_names(served)
    assert all(re.fullmatch("pair@[0-9a-f]{12}", name) for name in names)
    assert set(names) <= set(metric_names(served))
    assert set(listed_names(served)) == {"tiny", *names}
    for name, path in zip(names, (one, two), strict=True):
        assert ask(served, name)["model"] == name
        assert served.loads(path) == 1


def test_a_name_that_was_given_to_another_model(served: ServerHarness) -> None:
    """What is counted by a name is that of one model, as long as the server runs."""
    aliases = served.settings.state_dir / "models.toml"
    paths = [served.model("former"), served.model("later")]
    aliases.write_text(f'moved = "{paths[0]}"\n')
    ask(served, "moved")
    deleted = served.http.request("DELETE", "/api/delete", json={"model": "moved"})
    assert deleted.status_code == 200
    with served.client() as client:
        client.unload(paths[0])
    aliases.write_text(f'moved = "{paths[1]}"\n')
    assert ask(served, "moved")["model"] == "moved"
    (name,) = loaded_names(served)
    assert re.fullmatch("moved@[0-9a-f]{12}", name)
    assert listed_names(served) == ["tiny", "moved"]
