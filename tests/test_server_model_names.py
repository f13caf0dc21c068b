"""Every route that names a model: over TCP the answer does not depend on which files exist."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from tcp_server import TcpServer, tcp_server
from test_hub import put

from localgen.backends.model_info import LoadOptions
from localgen.hub.latest_tag import without_latest
from localgen.server import app as server_app
from localgen.server.http.access import AccessPolicy
from localgen.server.models.disk_paths import without_folders

# fields that may name a model, whatever the route
NAME_FIELDS = {"model", "name", "source", "destination", "draft", "from", "path", "file", "models"}
# method, path, the field with the name, and the other fields
Case = tuple[str, str, str, dict[str, Any]]
MESSAGES = [{"role": "user", "content": "a"}]


@dataclass(frozen=True)
class Named:
    """A route with fields that name models. body: its other fields."""

    fields: tuple[str, ...]
    body: dict[str, Any]


NAMING = {
    ("POST", "/v1/chat/completions"): Named(("model",), {"messages": MESSAGES}),
    ("POST", "/v1/completions"): Named(("model",), {"prompt": "a"}),
    ("POST", "/v1/embeddings"): Named(("model",), {"input": "a"}),
    ("POST", "/v1/responses"): Named(("model",), {"input": "a"}),
    ("POST", "/v1/messages"): Named(("model",), {"messages": MESSAGES, "max_tokens": 5}),
    ("POST", "/v1/messages/count_tokens"): Named(("model",), {"messages": MESSAGES}),
    ("POST", "/chat/completions"): Named(("model",), {"messages": MESSAGES}),
    ("POST", "/completion"): Named(("model",), {"prompt": "a"}),
    ("POST", "/completions"): Named(("model",), {"prompt": "a"}),
    ("POST", "/infill"): Named(("model",), {"input_prefix": "a", "input_suffix": "b"}),
    **{
        ("POST", path): Named(("model",), {"query": "a", "documents": ["b"]})
        for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")
    },
    ("POST", "/embedding"): Named(("model",), {"content": "a"}),
    ("POST", "/embeddings"): Named(("model",), {"content": "a"}),
    ("GET", "/props"): Named(("model",), {}),
    ("GET", "/slots"): Named(("model",), {}),
    ("POST", "/tokenize"): Named(("model",), {"content": "a"}),
    ("POST", "/detokenize"): Named(("model",), {"tokens": [1]}),
    ("POST", "/apply-template"): Named(("model",), {"messages": MESSAGES}),
    ("POST", "/v1/models/load"): Named(("model", "options.draft"), {"model": "echo"}),
    ("POST", "/v1/models/unload"): Named(("model",), {}),
    ("GET", "/v1/models/{name}"): Named(("name",), {}),
    ("POST", "/api/chat"): Named(("model",), {"messages": MESSAGES}),
    ("POST", "/api/generate"): Named(("model",), {"prompt": "a"}),
    ("POST", "/api/embed"): Named(("model",), {"input": "a"}),
    ("POST", "/api/embeddings"): Named(("model",), {"prompt": "a"}),
    ("POST", "/api/show"): Named(("model", "name"), {}),
    ("POST", "/api/pull"): Named(("model", "name"), {}),
    ("DELETE", "/api/delete"): Named(("model", "name"), {}),
    ("POST", "/api/copy"): Named(
        ("source", "destination"), {"source": "echo", "destination": "fresh"}
    ),
}
# a request without a prompt or messages loads the model, or unloads it
LOADING = {
    ("POST", "/api/chat"): {"keep_alive": 0},
    ("POST", "/api/generate"): {"keep_alive": 0},
}
OTHER_ROUTES = {
    ("GET", "/"),
    ("GET", "/api/ps"),
    ("GET", "/api/tags"),
    ("GET", "/api/version"),
    ("GET", "/health"),
    ("GET", "/livez"),
    ("GET", "/metrics"),
    ("GET", "/models"),
    ("GET", "/version"),
    ("GET", "/v1/loads"),
    ("GET", "/v1/models"),
    ("GET", "/v1/stats"),
    ("POST", "/v1/requests/{request_id}/cancel"),
    ("POST", "/v1/requests/{request_id}/answer-now"),
    ("POST", "/v1/shutdown"),
    ("POST", "/v1/private-port"),
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
}
# load options that are texts: all but the draft model are not names of models
OTHER_TEXT_OPTIONS = {
    "backend",
    "device",
    "flash_attn",
    "cache_type_k",
    "cache_type_v",
    "chat_template",
    "kv_listen",
    "kv_peer",
}

# files below the server's working folder, each with a name of the same form that does not exist
FILES = {
    "there/weights": "gone_/weights",  # a folder with a .gguf file
    "there/notes.txt": "gone_/notes.txt",
    "there/model.gguf": "gone_/model.gguf",
    "there/link": "gone_/link",  # a link to a file elsewhere
    "there/dangling": "gone_/dangling",
    "linked/weights": "l_nked/weights",  # below a link to a folder
    "checkpoint": "gheckpoint",  # a folder with config.json
    "bare.gguf": "b_re.gguf",
}
SPELLINGS: dict[str, Callable[[str, Path], str]] = {
    "relative": lambda path, here: path,
    "dot": lambda path, here: f"./{path}",
    "up": lambda path, here: f"../{here.name}/{path}",
    "through": lambda path, here: f"there/../{path}",
    "absolute": lambda path, here: str(here / path),
    "home": lambda path, here: f"~/{path}",
    "encoded": lambda path, here: quote(path, safe="").replace(".", "%2e"),
    "backslashes": lambda path, here: path.replace("/", "\\"),
    "zero byte": lambda path, here: f"{path}\0",
    "zero byte and ending": lambda path, here: f"{path}\0.gguf",
    "latest": lambda path, here: f"{path}:latest",
    "latest twice": lambda path, here: f"{path}:latest:latest",
    "quantization": lambda path, here: f"{path}:Q4_K_M",
    "hub": lambda path, here: f"hf.co/{path}",
    "hub, absolute": lambda path, here: f"hf.co/{here / path}",
    "url": lambda path, here: f"file://{here / path}",
    "space": lambda path, here: f" {path}",
    "slash": lambda path, here: f"{path}/",
    "double slash": lambda path, here: path.replace("/", "//"),
}
# (spelling, file): every file as it is, and one file in every spelling
PAIRS = [
    *(("relative", path) for path in FILES),
    *((spelling, "there/weights") for spelling in SPELLINGS if spelling != "relative"),
    *((spelling, "there/model.gguf") for spelling in ("latest", "latest twice", "quantization")),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder and home of the server."""
    folder = tmp_path_factory.mktemp("served")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("there/weights", "checkpoint"):
        (folder / name).mkdir(parents=True)
    (elsewhere / "weights").mkdir()
    for path in (
        folder / "there/weights/hidden.gguf",
        folder / "there/model.gguf",
        folder / "bare.gguf",
        elsewhere / "weights/hidden.gguf",
        elsewhere / "file.gguf",
    ):
        path.write_text("{}")
    (folder / "there/notes.txt").write_text("private")
    (folder / "checkpoint/config.json").write_text("{}")
    (folder / "there/link").symlink_to(elsewhere / "file.gguf")
    (folder / "there/dangling").symlink_to(elsewhere / "nothing.gguf")
    (folder / "linked").symlink_to(elsewhere)
    return folder


@pytest.fixture(scope="module")
def opened(here: Path) -> Iterator[TcpServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(here))
        patch.setenv("HF_HUB_CACHE", str(here / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.chdir(here)
        with tcp_server() as found:
            # a connection per request: it is quicker than waiting for delayed acknowledgments
            limits = httpx.Limits(max_keepalive_connections=0)
            url = found.http.base_url
            with httpx.Client(base_url=url, timeout=20, trust_env=False, limits=limits) as http:
                found.http.close()
                found.http = http
                yield found


def routes() -> tuple[FastAPI, set[tuple[str, str]]]:
    """The application, and its routes that are in the schema."""
    seen: list[FastAPI] = []

    def keep(app: FastAPI, *_: object) -> FastAPI:
        seen.append(app)
        return app

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_app, "GuardMiddleware", keep)
        server_app.create_app(
            MagicMock(),
            MagicMock(),
            AccessPolicy(),
            listen=MagicMock(),
            request_shutdown=lambda: None,
            is_shutting_down=lambda: False,
        )
    (app,) = seen
    schema = app.openapi()["paths"]
    return app, {(method.upper(), path) for path in schema for method in schema[path]}


def top_fields(app: FastAPI, method: str, path: str) -> set[str]:
    """Names of a route's parameters and of the fields of its body."""
    schema = app.openapi()
    route = schema["paths"][path][method.lower()]
    found = {parameter["name"] for parameter in route.get("parameters", ())}
    if "requestBody" in route:
        body = route["requestBody"]["content"]["application/json"]["schema"]
        if "$ref" in body:
            body = schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]
        found |= set(body["properties"])
    return found


def test_every_route_and_every_field_that_names_a_model_is_tested() -> None:
    app, found = routes()
    assert found == set(NAMING) | OTHER_ROUTES
    for method, path in found:
        named = NAMING.get((method, path), Named((), {}))
        assert top_fields(app, method, path) & NAME_FIELDS == {
            field for field in named.fields if "." not in field
        }, path
    texts = {field.name for field in fields(LoadOptions) if "str" in str(field.type)}
    assert texts == OTHER_TEXT_OPTIONS | {"draft"}


def test_no_route_is_left_out_of_the_schema() -> None:
    app, found = routes()
    hidden = [
        (method, route.path)
        for route in _flat(app.routes)
        for method in (route.methods or set()) - {"HEAD"}
        if not route.include_in_schema
    ]
    assert not hidden
    assert len(found) == len(NAMING) + len(OTHER_ROUTES)


def _flat(found: Any) -> Iterator[APIRoute]:
    for route in found:
        if isinstance(route, APIRoute):
            yield route
        else:
            yield from _flat(getattr(route, "routes", ()))


CASES: list[Case] = [
    *((method, path, field, named.body) for (method, path), named in NAMING.items()
      for field in named.fields),
    *((*route, "model", body) for route, body in LOADING.items()),
    ("POST", "/api/chat", "model", {}),
    ("POST", "/api/generate", "model", {}),
    ("POST", "/v1/models/load", "model", {"stream": True}),
    ("POST", "/api/pull", "model", {"stream": False}),
]  # fmt: skip


def ask(http: httpx.Client, case: Case, name: str) -> httpx.Response:
    method, path, field, body = case
    if "{" in path:
        return http.request(method, path.replace(f"{{{field}}}", quote(name, safe="")))
    if method == "GET":
        return http.get(path, params={field: name})
    outer, _, inner = field.partition(".")
    return http.request(method, path, json=body | {outer: {inner: name} if inner else name})


def said(reply: httpx.Response, name: str) -> tuple[int, str]:
    """Status and text of a reply, without the name that was asked for."""
    text = re.sub('"created_at":"[^"]*"', "", reply.text)
    # messages show a name as it is, as Python shows it, and by the last component of its path;
    # or what it means without `hf.co/` and `:latest`
    for form in (name, without_latest(name).removeprefix("hf.co/"), without_folders(name)):
        for shown in (form, repr(form)[1:-1]):
            text = text.replace(json.dumps(shown)[1:-1], "NAME")
    return reply.status_code, text


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case[1:])))
def test_what_exists_and_what_does_not_answer_alike(
    opened: TcpServer, here: Path, case: Case
) -> None:
    for spelling, path in PAIRS:
        names = [SPELLINGS[spelling](each, here) for each in (path, FILES[path])]
        replies = []
        for name in names:
            replies.append(said(ask(opened.http, case, name), name))
            if case[1] == "/api/copy":
                forget(opened, "fresh", name)
        assert replies[0] == replies[1], names
        assert "hidden" not in replies[0][1]
    assert not list(here.rglob("*.loads")), "a file was opened"


def forget(opened: TcpServer, *names: str) -> None:
    """Remove aliases that a case has made."""
    for name in names:
        with contextlib.suppress(UnicodeError):
            opened.http.request("DELETE", "/api/delete", json={"model": name})


def test_an_alias_of_a_relative_name_is_no_path(opened: TcpServer, here: Path) -> None:
    for target in ("there/weights", "gone_/weights"):
        reply = opened.http.post("/api/copy", json={"source": target, "destination": "hubbed"})
        assert reply.status_code == 200
        for case in CASES[:8]:
            if case[2] == "model":
                text = ask(opened.http, case, "hubbed").text
                assert "no .gguf" not in text
                assert "hidden" not in text
        show = opened.http.post("/api/show", json={"model": "hubbed"})
        assert show.status_code == 404
        forget(opened, "hubbed")
    assert not list(here.rglob("*.loads"))


def test_a_path_that_a_local_client_loaded_is_no_name_over_tcp(
    opened: TcpServer, here: Path
) -> None:
    """`there/weights` is a path for a local client, and a repository for others."""
    local = opened.harness.http
    chat = NAMING["POST", "/v1/chat/completions"].body
    path = "there/weights"
    assert local.post("/v1/chat/completions", json=chat | {"model": path}).status_code == 200
    assert (here / "there/weights/hidden.gguf.loads").exists()
    try:
        reply = opened.http.post("/v1/chat/completions", json=chat | {"model": path})
        assert reply.status_code == 404
        for name in (path, str(here / path / "hidden.gguf")):
            over_tcp = opened.http.post("/v1/models/unload", json={"model": name})
            assert over_tcp.json() == {"unloaded": False}
        reply = local.post("/v1/models/unload", json={"model": path})
        assert reply.json() == {"unloaded": True}
    finally:
        (here / "there/weights/hidden.gguf.loads").unlink()


@pytest.fixture(scope="module")
def private(opened: TcpServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models that the user has named: lost, broken, drafty and friend."""
    folder = tmp_path_factory.mktemp("private") / "My Models (old)"
    folder.mkdir()
    broken = folder / "broken.gguf"
    broken.write_text(json.dumps({"fail": f"cannot load {broken}: it is damaged"}))
    for name in ("drafty", "friend"):
        (folder / f"{name}.gguf").write_text("{}")
    with (opened.harness.settings.state_dir / "models.toml").open("a") as names:
        for name in ("lost", "broken", "drafty", "friend"):
            names.write(f"{name} = {json.dumps(str(folder / name) + '.gguf')}\n")
    return folder


DRAFTY = {"model": "drafty", "options": {"draft": "friend"}}
NAMED_FILES: dict[str, tuple[str, str, Any]] = {
    "a missing file": ("POST", "/v1/chat/completions", {"model": "lost", "messages": MESSAGES}),
    "a failed load": ("POST", "/v1/models/load", {"model": "broken"}),
    "in a stream": ("POST", "/v1/models/load", {"model": "broken", "stream": True}),
    "a draft model": ("POST", "/v1/models/load", DRAFTY),
    "an alias": ("POST", "/api/pull", {"model": "lost"}),
    "a taken name": ("POST", "/api/copy", {"source": "tiny", "destination": "lost"}),
    "a source": ("POST", "/api/copy", {"source": "lost", "destination": "fresh"}),
    "details": ("POST", "/api/show", {"model": "tiny"}),
    "the list": ("GET", "/v1/models", None),
    "one model": ("GET", "/v1/models/drafty", None),
    "Ollama's list": ("GET", "/api/tags", None),
    "statistics": ("GET", "/v1/stats", None),
}  # fmt: skip


@pytest.mark.parametrize("what", NAMED_FILES)
def test_paths_of_the_disk_are_for_local_clients(
    opened: TcpServer, private: Path, what: str
) -> None:
    method, path, body = NAMED_FILES[what]
    if what == "statistics":
        ask(opened.http, ("POST", "/v1/models/load", "model", {}), "drafty")
    text = opened.http.request(method, path, json=body).text
    assert private.name not in text
    assert "/My Models" not in text
    assert str(Path(json.__file__).parents[2]) not in text
    assert str(opened.harness.folder) not in text


def test_local_clients_see_paths(opened: TcpServer, private: Path) -> None:
    local = opened.harness.http
    cards = local.get("/v1/models").json()["data"]
    assert str(private / "drafty.gguf") in [card["path"] for card in cards]
    reply = local.post("/v1/models/load", json={"model": "broken"})
    assert str(private / "broken.gguf") in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "text",
    [
        "cannot load {}: it is damaged",
        "there is no file {}",
        "{} has no tokenizer.json, see https://hf.co/user/repo",
        "No such file or directory: '{}'",
        "llama.cpp runs .gguf files, {} is not one",
        "<{}> cannot be read",
        "{{{}}} cannot be read",
    ],
)
@pytest.mark.parametrize(
    "folder", ["/home/me", "/mnt/My Models/b", "~/x", "/", "/a b/c.d (1, 2)/Bob's"]
)
def test_folders_are_taken_out_of_texts(text: str, folder: str) -> None:
    assert without_folders(text.format(f"{folder.rstrip('/')}/m.gguf")) == text.format("m.gguf")


@pytest.mark.parametrize("text", ["give 3 / 4", "user/repo:Q4_K_M", "hf.co/a/b", "https://h/x/y"])
def test_texts_without_paths_are_kept(text: str) -> None:
    assert without_folders(text) == text


TAKEN = ["tiny", "smollm2", "llama-8b", "LLaMA_8b", "llama3.1:8b", "llama-8b:q8_0", "echo"]


@pytest.mark.parametrize("suffix", ["", ":latest", ":latest:latest"])
@pytest.mark.parametrize("name", [*TAKEN, "lent", "chat-q8_0", "Chat-Q8_0"])
def test_a_copy_takes_no_name_that_means_a_model(
    opened: TcpServer, here: Path, name: str, suffix: str
) -> None:
    """lent: loaded by its path, so it has the name of its file; chat-q8_0: a file of the cache."""
    if not (here / "cache/models--acme--Chat").exists():
        put(here / "cache", "acme/Chat", "chat-Q8_0.gguf")
    lent = opened.harness.model("lent")
    assert opened.harness.chat(lent, "a").status_code == 200
    aliases = opened.harness.settings.state_dir / "models.toml"
    before = aliases.read_text()
    reply = opened.http.post("/api/copy", json={"source": "echo", "destination": name + suffix})
    assert reply.status_code == 400, reply.text
    assert "choose another name" in reply.text
    assert aliases.read_text() == before


def test_a_copy_that_exists_is_made_again(opened: TcpServer) -> None:
    """As after a failure on another machine of a cluster."""
    aliases = opened.harness.settings.state_dir / "models.toml"
    body = {"source": "echo", "destination": "twice"}
    for _ in range(2):
        assert opened.http.post("/api/copy", json=body).status_code == 200
        assert aliases.read_text().count("twice = ") == 1
    opened.http.request("DELETE", "/api/delete", json={"model": "twice", "keep_files": True})
    assert aliases.read_text().count("twice = ") == 1
    deleted = opened.http.request("DELETE", "/api/delete", json={"model": "twice"})
    assert (deleted.status_code, aliases.read_text().count("twice = ")) == (200, 0)


def test_a_deletion_that_keeps_the_files_unloads_the_model(opened: TcpServer, here: Path) -> None:
    file = put(here / "cache", "acme/Held", "held-Q8_0.gguf") / "held-Q8_0.gguf"
    file.write_text("{}")
    name = "acme/Held:Q8_0"
    assert opened.harness.chat(name, "a").status_code == 200
    for keep_files in (True, False):
        body = {"model": name, "keep_files": keep_files}
        assert opened.http.request("DELETE", "/api/delete", json=body).status_code == 200
        loaded = opened.http.get("/api/ps").json()["models"]
        assert name.lower() not in [each["name"].lower() for each in loaded]
        assert file.exists() == keep_files
