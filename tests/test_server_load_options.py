"""`localgen serve` with load options: of its model, or of every model."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_server import RealServer, real_server

from localgen.backends.formats.model_files import ModelFile
from localgen.backends.model_info import LoadOptions
from localgen.cli import options as declared
from localgen.cli.main import run_command_line
from localgen.hub.resolve import resolve_model
from localgen.server.models.serve_options import ServeOptions


def ctx_of_answer(server: RealServer, **fields: Any) -> int:
    """Context length that applied to an answer."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 1, **fields}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["localgen"]["ctx"])


def options_of(server: RealServer, name: str = "tiny") -> dict[str, Any]:
    """Load options in force of a loaded model."""
    models = httpx.get(f"{server.url}/v1/stats").json()["models"]
    (model,) = [each for each in models if each["name"] == name]
    options: dict[str, Any] = model["info"]["options"]
    return options


def test_options_of_the_model_hold_when_it_is_loaded_again() -> None:
    with real_server("tiny", "--ctx", "512", "--cache-type-k", "q8_0", "--no-mmap") as server:
        for _ in range(2):
            assert ctx_of_answer(server, model="tiny") == 512
            in_force = options_of(server)
            assert (in_force["ctx"], in_force["cache_type_k"]) == (512, "q8_0")
            assert in_force["mmap"] is False
            httpx.post(f"{server.url}/v1/models/unload", json={"model": "tiny"})
        # a request may ask for others
        load = {"model": "tiny", "options": {"ctx": 1024}}
        reply = httpx.post(f"{server.url}/v1/models/load", json=load, timeout=60)
        assert reply.json()["model"]["ctx"] == 1024
        assert options_of(server)["cache_type_k"] == "q8_0"


def test_peers_are_of_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["serve", "--kv-listen", "/tmp/x/kv.sock"]) != 0
    assert "localgen serve MODEL" in capsys.readouterr().err


def test_options_without_a_model_are_for_every_model() -> None:
    """Those of variables, too: the built-in model, and one that only the CUDA backend runs."""
    variables = {
        "LOCALGEN_CTX": "256",
        "LOCALGEN_BACKEND": "cuda",
        "LOCALGEN_DEVICE": "cpu",
    }
    with real_server(**variables) as server:
        assert ctx_of_answer(server) == 256
        in_force = options_of(server)
        assert (in_force["backend"], in_force["device"]) == ("cuda", "cpu")


def test_a_request_without_a_model_gets_that_of_serve(tmp_path: Path) -> None:
    copy = tmp_path / "copied.gguf"
    copy.write_bytes(resolve_model("tiny").path.read_bytes())
    with real_server(str(copy), "--ctx", "300") as server:
        assert ctx_of_answer(server) == 300
        # the options are for this model only
        assert ctx_of_answer(server, model="tiny") != 300
        assert options_of(server, "copied")["ctx"] == 300


def pulled(cache: Path, revision: str) -> None:
    """A model in the cache, as a download of this commit leaves it."""
    repo = cache / "models--acme--Chat-GGUF"
    file = repo / "snapshots" / revision / "chat-F16.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(resolve_model("tiny").path.read_bytes())
    (repo / "refs").mkdir(exist_ok=True)
    (repo / "refs" / "main").write_text(revision)


def test_a_model_stays_the_same_when_a_newer_commit_is_pulled(tmp_path: Path) -> None:
    """Its options, its name in lists and metrics, and that it is loaded."""
    name = "acme/Chat-GGUF:F16"
    pulled(tmp_path, "1" * 40)
    with real_server("acme/chat-gguf", "--ctx", "300", HF_HUB_CACHE=str(tmp_path)) as server:
        assert ctx_of_answer(server) == 300
        pulled(tmp_path, "2" * 40)
        for spelling in (name, "acme/chat-gguf", "chat-F16"):
            assert ctx_of_answer(server, model=spelling) == 300
        loaded = httpx.get(f"{server.url}/v1/stats").json()["models"]
        assert [each["name"] for each in loaded] == [name]
        cards = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [each["state"] for each in cards if each["id"] == name] == ["loaded"]
        unload = httpx.post(f"{server.url}/v1/models/unload", json={"model": "chat-F16"})
        assert unload.json() == {"unloaded": True}
        assert ctx_of_answer(server) == 300
        assert options_of(server, name)["ctx"] == 300
        metrics = httpx.get(f"{server.url}/metrics").text
        assert set(re.findall(r'model_name="([^"]*)"', metrics)) == {name}
        assert "2222" in server.log.read_text(), "the newer file was loaded"


def test_a_context_for_every_model_is_at_most_what_it_was_trained_for() -> None:
    with real_server("--ctx", "100000") as server:
        assert ctx_of_answer(server) == 2048
        assert options_of(server)["ctx"] == 2048
        said = "tiny was trained for 2,048 tokens: its context is that, not 100,000 as in --ctx"
        assert said in server.log.read_text()
        # what a request asks for is not changed
        load = {"model": "tiny", "options": {"ctx": 100000}}
        reply = httpx.post(f"{server.url}/v1/models/load", json=load, timeout=60)
        assert (reply.status_code, "use 1 to 2,048" in reply.text) == (400, True), reply.text


def test_an_option_of_one_model_needs_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template"
    template.write_text("x")
    assert run_command_line(["serve", "--chat-template", str(template)]) != 0
    assert "--chat-template is for one model: name it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--ctx", "-5"], "--ctx must be at least 1"),
        (["--device", "gpu"], "--device is 'gpu', it must be cuda, cuda:N or cpu"),
        (["--cache-type-k", "q9"], "--cache-type-k is 'q9'"),
    ],
)
def test_invalid_options_end_serve(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["serve", *arguments]) != 0
    assert reason in capsys.readouterr().err


def test_serve_has_every_load_option() -> None:
    """Error texts of the server name them."""
    (flags,) = declared.SERVE_PANELS.values()
    loading = {flag.field for flag in (*declared.LOAD_OPTIONS,)} | {"ctx"}
    assert {flag.field for flag in flags} | {"draft", "parallel", "max_queue"} == loading


def test_what_is_requested_comes_first() -> None:
    file = ModelFile("a", Path("/a"), 0, (), "file")
    other = ModelFile("b", Path("/b"), 0, (), "file")
    mine = LoadOptions(ctx=10, threads=2)
    every = ServeOptions(load=mine)
    assert every.complete(file, LoadOptions()) == mine
    assert every.complete(file, LoadOptions(ctx=5)) == LoadOptions(ctx=5, threads=2)
    assert every.complete(other, LoadOptions(prefix_cache=False)).prefix_cache is False
    one = ServeOptions(load=mine, model="a", identity=file.identity)
    assert one.complete(file, LoadOptions(threads=1)) == LoadOptions(ctx=10, threads=1)
    assert one.complete(other, LoadOptions()) == LoadOptions()


def test_files_of_one_quantization_are_several_models() -> None:
    first, second = (
        ModelFile("a/b:Q8_0", Path(f"/c/{commit}/{stem}-Q8_0.gguf"), 0, (), "cache")
        for commit, stem in (("1", "x"), ("1", "y"))
    )
    newer = replace(first, path=Path("/c/2/x-Q8_0.gguf"))
    assert first.identity == newer.identity != second.identity


def test_error_texts_name_options_that_serve_has() -> None:
    """Of a model that needs the CUDA backend, without a GPU."""
    with real_server() as server:
        copy = {"source": "tiny", "destination": "x"}
        assert httpx.post(f"{server.url}/api/copy", json=copy).status_code == 200
        load = {"model": "x", "options": {"backend": "cuda", "device": "cuda"}}
        reply = httpx.post(f"{server.url}/v1/models/load", json=load, timeout=60)
        if reply.status_code == 200:
            pytest.skip("this machine has a GPU")
        named = set(re.findall(r"--[a-z-]+", reply.text))
        (flags,) = declared.SERVE_PANELS.values()
        assert named <= {flag.long_name for flag in flags}
        assert named
