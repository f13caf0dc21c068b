"""Model names over TCP: names only, no paths of the server's machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import chat_body
from tcp_server import TcpServer, code, tcp_server

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.hub.resolve import reject_path, resolve_model

PATHS = [
    "/etc/passwd",
    "../../etc/passwd",
    "user/../../../etc/passwd",
    "..",
    ".",
    "./model",
    "~/model",
    "~root/model",
    "/dev/zero",
    "/dev/stdin",
    "\\\\host\\share",
    "..\\..\\model",
    "model.gguf",
    "models/model.GGUF",
]
NO_PATHS = [
    "tiny\0",
    "%2e%2e/etc",
    "file:///etc/passwd",
    "hf.co//etc/passwd",
    "a/b/c",
    "etc/passwd",
]


@pytest.fixture(scope="module")
def opened() -> Iterator[TcpServer]:
    with tcp_server() as found:
        yield found


def ask(opened: TcpServer, path: str, model: str) -> httpx.Response:
    bodies = {
        "/v1/chat/completions": chat_body(model, "a"),
        "/v1/completions": {"model": model, "prompt": "a"},
        "/v1/embeddings": {"model": model, "input": "a"},
        "/v1/models/load": {"model": model},
    }
    return opened.http.post(path, json=bodies[path])


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models/load"],
)
@pytest.mark.parametrize("name", PATHS)
def test_paths_are_refused(opened: TcpServer, path: str, name: str) -> None:
    reply = ask(opened, path, name)
    assert (reply.status_code, code(reply)) == (400, "invalid_request")
    assert "not a path" in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", NO_PATHS)
def test_other_invalid_names_are_rejected(opened: TcpServer, name: str) -> None:
    reply = ask(opened, "/v1/chat/completions", name)
    assert reply.status_code in (400, 404)
    assert "/etc" not in reply.json()["error"]["message"].replace(name, "")


def test_rejection_does_not_reveal_existing_files(opened: TcpServer) -> None:
    there = opened.harness.model("secret")
    missing = there.replace("secret", "missing")
    said = [ask(opened, "/v1/chat/completions", path).json()["error"] for path in (there, missing)]
    assert said[0] == said[1]
    assert opened.harness.loads(there) == 0


def test_a_model_that_is_loaded_by_its_path_has_a_name_too(opened: TcpServer) -> None:
    path = opened.harness.model("lent")
    assert opened.harness.chat(path, "a").status_code == 200
    assert ask(opened, "/v1/chat/completions", path).status_code == 400
    assert ask(opened, "/v1/chat/completions", "lent").status_code == 200


def test_aliases_are_accepted(opened: TcpServer) -> None:
    name = opened.harness.named("given")
    assert ask(opened, "/v1/chat/completions", name).status_code == 200


def test_unloading_a_path_reveals_nothing(opened: TcpServer) -> None:
    for path in ("/etc/passwd", "/nothing"):
        reply = opened.http.post("/v1/models/unload", json={"model": path})
        assert reply.json() == {"unloaded": False}


def test_a_folder_beside_the_server_is_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`user/repo` is the hub's, whatever lies in the server's working folder."""
    (tmp_path / "user" / "repo").mkdir(parents=True)
    # first: the library is imported with the cache of the user, and keeps it after this test
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="the folder user/repo has neither"):
        resolve_model("user/repo")
    with pytest.raises(ModelNotFound, match="Model 'user/repo' not found"):
        resolve_model("user/repo", allow_paths=False)


@pytest.mark.parametrize("name", ["tiny", "llama3.1:8b", "hf.co/user/repo:Q4_K_M", "a..b", "x.y"])
def test_model_names_are_accepted(name: str) -> None:
    reject_path(name)


@pytest.mark.parametrize("name", PATHS)
def test_paths_are_rejected_as_names(name: str) -> None:
    with pytest.raises(InvalidRequest, match="not a path"):
        reject_path(name)
