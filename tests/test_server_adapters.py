"""LoRA adapters in the server: by name and per request, over one loaded model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_server import RealServer, real_server

from benchmarks.random_adapter import TINY, RandomAdapter, random_adapter
from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.cli.completion_values import complete_adapter, complete_model
from localgen.cli.main import run_command_line
from localgen.config import BadSetting
from localgen.hub.adapter import AdapterEntry, parse_adapter
from localgen.hub.adapters import add_adapter
from localgen.hub.aliases import add_alias
from localgen.hub.models_file import models_store, read_models_file
from localgen.hub.resolve import find_adapter, resolve_model

QUESTIONS = ("What is 2 + 3?", "Tell me about the sea.", "Who are you?", "Say hello.")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters poet.gguf and clerk, which is PEFT's form."""
    folder = tmp_path_factory.mktemp("adapters")
    random_adapter(1).write_gguf(folder / "poet.gguf")
    random_adapter(2).write_peft(folder / "clerk")
    return folder


@pytest.fixture(scope="module")
def server(files: Path) -> Iterator[RealServer]:
    with real_server(LOCALGEN_KEEP_ALIVE="-1") as running:
        write(running, tables(files))
        yield running


def tables(files: Path) -> str:
    return (
        f'work = "tiny"\n'
        f'[adapter.poet]\npath = "{files / "poet.gguf"}"\nmodel = "tiny"\n'
        f'[adapter.clerk]\npath = "{files / "clerk"}"\nmodel = "work"\nscale = 0.9\n'
        f'[preset.rhyme]\nmodel = "poet"\nmax_tokens = 5\ntemperature = 0\n'
    )


def write(server: RealServer, content: str) -> None:
    (server.settings.state_dir / "models.toml").write_text(content)


def post(server: RealServer, path: str, **body: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60).json()


def ask(server: RealServer, model: str, question: str = QUESTIONS[0], **fields: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    fields = {"temperature": 0, "max_tokens": 16} | fields
    return post(server, "/v1/chat/completions", model=model, messages=messages, **fields)


def text_of(answered: Any) -> str:
    text: str = answered["choices"][0]["message"]["content"]
    return text


def test_two_adapters_and_the_base_at_once_over_one_loaded_model(server: RealServer) -> None:
    names = ("tiny", "poet", "clerk")
    pairs = [(name, question) for question in QUESTIONS for name in names]
    alone = [text_of(ask(server, *pair)) for pair in pairs]
    assert len(set(alone)) > 2 * len(QUESTIONS)
    with ThreadPoolExecutor(len(pairs)) as pool:
        answers = list(pool.map(lambda pair: ask(server, *pair, cache_salt="again"), pairs))
    assert [text_of(each) for each in answers] == alone
    assert [each["model"] for each in answers] == [name for name, _ in pairs]
    (model,) = httpx.get(f"{server.url}/v1/stats").json()["models"]
    assert model["name"] == "tiny"
    assert model["size_bytes"] == resolve_model("tiny").size_bytes, "the base counts once"
    assert {each["name"]: each["running"] for each in model["adapters"]} == {"poet": 0, "clerk": 0}
    assert set(names) <= set(model["names"]), "by which routers know who has an adapter"


def test_prefixes_are_those_of_the_adapter(server: RealServer) -> None:
    question = "Count slowly from one to ten, then say goodbye to each of the seven seas."

    def cached(model: str) -> int:
        usage = ask(server, model, question, cache_salt="own")["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached(model) for model in ("tiny", "poet", "clerk")] == [0, 0, 0]
    assert all(cached(model) > 10 for model in ("tiny", "poet", "clerk"))


def test_a_request_may_give_adapters_and_scales(server: RealServer) -> None:
    poet, base = text_of(ask(server, "poet")), text_of(ask(server, "tiny"))
    given = [{"id": "poet", "scale": 1.0}]
    assert text_of(ask(server, "tiny", lora=given)) == poet
    assert text_of(ask(server, "clerk", lora=given)) == poet, "it replaces that of the name"
    assert text_of(ask(server, "poet", lora=[{"id": "poet", "scale": 0}])) == base
    both = text_of(ask(server, "tiny", lora=[{"id": "poet"}, {"id": "clerk"}]))
    assert both not in (poet, base)
    native = post(server, "/completion", prompt="Hello", n_predict=8, temperature=0, lora=given)
    openai = post(
        server, "/v1/completions", model="poet", prompt="Hello", max_tokens=8, temperature=0
    )
    assert native["content"] == openai["choices"][0]["text"]


def test_every_protocol_takes_the_name(server: RealServer) -> None:
    said = text_of(ask(server, "poet", max_tokens=6))
    turn = {"role": "user", "content": QUESTIONS[0]}
    greedy = {"temperature": 0, "num_predict": 6}
    ollama = post(
        server, "/api/chat", model="poet:latest", messages=[turn], stream=False, options=greedy
    )
    assert ollama["message"]["content"] == said
    responses = post(
        server,
        "/v1/responses",
        model="poet",
        input=QUESTIONS[0],
        temperature=0,
        max_output_tokens=6,
    )
    assert responses["output"][-1]["content"][0]["text"] == said
    messages = post(
        server, "/v1/messages", model="poet", messages=[turn], max_tokens=6, temperature=0
    )
    assert messages["content"][-1]["text"] == said
    assert text_of(ask(server, "rhyme", max_tokens=6)) == said, "a preset of an adapter"


def test_adapters_are_listed_with_their_model(server: RealServer) -> None:
    cards = {each["id"]: each for each in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert (cards["poet"]["parent"], cards["poet"]["source"]) == ("tiny", "adapter")
    assert cards["poet"]["size_bytes"] < 1e6 < cards["tiny"]["size_bytes"]
    assert "parent" not in cards["tiny"]
    tags = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert {"poet", "clerk"} <= {each["name"] for each in tags}
    loaded = post(server, "/v1/models/load", model="poet")["model"]
    assert (loaded["name"], loaded["notes"][0]) == ("poet", "poet is an adapter of tiny")


def test_an_edit_applies_from_the_next_request(server: RealServer, files: Path) -> None:
    before = text_of(ask(server, "poet"))
    write(server, tables(files).replace('model = "tiny"\n', 'model = "tiny"\nscale = 0\n', 1))
    assert text_of(ask(server, "poet")) == text_of(ask(server, "tiny"))
    write(server, tables(files))
    assert text_of(ask(server, "poet")) == before


def test_refusals_are_one_line(server: RealServer, files: Path) -> None:
    def error(path: str, **body: Any) -> tuple[str, str]:
        found = post(server, path, **body)["error"]
        return found["code"], found["message"]

    broken = files / "model.gguf"
    broken.write_bytes(resolve_model("tiny").path.read_bytes())
    write(
        server,
        tables(files) + f'[adapter.gone]\npath = "/nowhere/gone.gguf"\nmodel = "tiny"\n'
        f'[adapter.broken]\npath = "{broken}"\nmodel = "tiny"\n',
    )
    turn = [{"role": "user", "content": "hi"}]
    chat = "/v1/chat/completions"
    code, message = error(chat, model="gone", messages=turn)
    assert (code, message) == (
        "model_not_found",
        "adapter gone: there is no gone.gguf: correct its path in models.toml",
    )
    code, message = error(chat, model="broken", messages=turn)
    assert (code, message) == (
        "load_failed",
        "adapter broken (model.gguf) is no LoRA adapter: it is a model: give a GGUF file of a LoRA "
        "adapter, or the folder that PEFT has written",
    )
    code, message = error(chat, model="tiny", messages=turn, lora=[{"id": "x"}])
    assert code == "invalid_request"
    assert message.startswith("lora: 'x' is not an adapter of models.toml. Adapters: poet, clerk")
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        code, message = error(path, model="poet", **body)
        assert (code, "name its model" in message) == ("invalid_request", True)
    write(server, tables(files))


# -- models.toml and commands -------------------------------------------------------------------


def put(content: str) -> None:
    models_store().path.parent.mkdir(exist_ok=True)
    models_store().path.write_text(content)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('[adapter.a]\nmodel = "tiny"\n', "adapter a: path: give a text"),
        ('[adapter.a]\npath = "/x"\n', "adapter a: model: give a text"),
        ('[adapter.a]\npath = "x/y"\nmodel = "tiny"\n', "give an absolute path"),
        ('[adapter.a]\npath = "/x"\nmodel = "tiny"\nscale = "1"\n', "scale is '1': give a number"),
        ('[adapter.a]\npath = "/x"\nmodel = "tiny"\nscale = nan\n', "scale is nan: give a number"),
        ('[adapter.a]\npath = "/x"\nmodel = "tiny"\nrank = 4\n', "unknown field rank"),
        ("[adapter]\na = 1\n", r"expected tables such as \[adapter.NAME\]"),
        ('a = "tiny"\n[adapter.a]\npath = "/x"\nmodel = "tiny"\n', "adapter a is also an alias"),
        ('[adapter.tiny]\npath = "/x"\nmodel = "tiny"\n', "is also a model of localgen"),
        (
            '[adapter.a]\npath = "/x"\nmodel = "tiny"\n[adapter.b]\npath = "/x"\nmodel = "a"\n',
            "adapter b: a is an adapter: give its model",
        ),
        (
            '[preset.a]\nmodel = "tiny"\n[adapter.b]\npath = "/x"\nmodel = "a"\n',
            "adapter b: a is a preset",
        ),
        ('b = "a"\n[adapter.a]\npath = "/x"\nmodel = "tiny"\n', "b is an alias of an adapter"),
    ],
)
def test_damaged_tables_are_reported(content: str, why: str) -> None:
    put(content)
    with pytest.raises(BadSetting, match=why):
        read_models_file()


@pytest.mark.parametrize(
    ("path", "scale", "why"),
    [
        ("~nosuchuser/x.gguf", 1.0, "the home folder of ~nosuchuser is unknown: give an absolute"),
        ("/x.gguf", 10**400, "scale is 1000"),
    ],
)
def test_values_that_python_cannot_use(
    path: str, scale: float, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        parse_adapter({"path": path, "model": "tiny", "scale": scale})
    if path.startswith("~"):
        assert run_command_line(["adapter", "add", "x", path, "tiny"]) == 3
        assert capsys.readouterr().err.startswith(f"localgen: path is {path}: {why}")


def test_the_tag_latest_of_a_model_is_left_out(files: Path) -> None:
    path = str(files / "poet.gguf")
    add_alias("work", "tiny:latest")
    assert run_command_line(["adapter", "add", "poet", path, "work:latest"]) == 0
    assert read_models_file().adapters["poet"].model == "work"
    assert resolve_model("poet").name == "tiny"
    with pytest.raises(InvalidRequest, match="poet is an adapter: give its model"):
        add_adapter("clerk", AdapterEntry(path, "poet:latest"))


def test_names_lead_to_the_model_and_the_adapter(files: Path) -> None:
    put(tables(files))
    for name in ("poet", "poet:latest", "clerk", "rhyme"):
        assert resolve_model(name).name == "tiny"
    found = find_adapter("clerk")
    assert found == ("clerk", AdapterEntry(str(files / "clerk"), "work", 0.9))
    for name, own in (("rhyme", "poet"), ("poet:latest", "poet")):
        found = find_adapter(name)
        assert found is not None
        assert found[0] == own
    for other in (None, "tiny", "work", "nothing"):
        assert find_adapter(other) is None
    home = parse_adapter({"path": "~/a.gguf", "model": "tiny"})
    assert Path(home.path).is_absolute()


def test_commands_add_list_and_remove(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: str) -> tuple[int, str]:
        status = run_command_line(list(args))
        said = capsys.readouterr()
        return status, said.out + said.err

    path = str(files / "poet.gguf")
    assert run("adapter", "add", "poet", path, "tiny", "--scale", "0.5") == (
        0,
        "poet is an adapter of tiny: localgen chat poet\n",
    )
    assert "poet" in run("adapter", "list")[1]
    assert '"scale": 0.5' in run("adapter", "list", "--json")[1]
    assert "scale 0.5" in run("show", "poet")[1]
    listed = run("list")[1].splitlines()
    assert next(line.split() for line in listed if line.startswith("poet"))[-1] == "tiny"
    assert complete_model("po") == complete_adapter("po") == ["poet"]
    for args, why in (
        (("adapter", "add", "poet", path, "tiny"), "already an adapter of tiny"),
        (("adapter", "add", "tiny", path, "tiny"), "name of a model of localgen"),
        (("adapter", "add", "b", "/nowhere", "tiny"), "there is no /nowhere: give a"),
        (("adapter", "add", "b", path, "nothing"), "Model 'nothing' not found"),
        (("adapter", "add", "b", path, "poet"), "poet is an adapter: give its model"),
        (("cp", "poet", "b"), "poet is an adapter: an alias is of a model, such as tiny"),
        (("adapter", "rm", "b"), "b is not an adapter; adapters: poet"),
    ):
        status, said = run(*args)
        assert status
        assert why in said
        assert said.count("\n") == 1
    assert run("rm", "poet", "--yes") == (0, "poet is no longer an adapter; tiny is kept\n")
    assert not read_models_file().adapters
    assert Path(path).exists()


def test_files_that_are_no_adapter_of_the_model_are_refused_at_once(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (junk := tmp_path / "junk.gguf").write_bytes(b"hello")
    (weights := tmp_path / "weights.safetensors").write_bytes(b"\0" * 64)
    tiny, folder = str(resolve_model("tiny").path), str(TINY)
    ours = random_adapter(3)
    narrow = {name: (a[:, 1:], b[1:]) for name, (a, b) in ours.matrices.items()}
    other = RandomAdapter({name: narrow[name] for name in narrow if "q_proj" in name}, ours.config)
    other.write_peft(tmp_path / "other")
    wide = {name: (a[:, 1:], b) for name, (a, b) in ours.matrices.items()}
    RandomAdapter(wide, ours.config).write_gguf(tmp_path / "other.gguf")
    poet, clerk = str(files / "poet.gguf"), str(files / "clerk")
    needed = "give a GGUF file of a LoRA adapter, or the folder that PEFT has written"
    put("")
    for path, model, why in (
        (str(junk), "tiny", f"is not a valid GGUF file: it does not begin with GGUF: {needed}"),
        (str(weights), "tiny", needed),
        (tiny, "tiny", f"is no LoRA adapter: it is a model: {needed}"),
        (str(tmp_path), "tiny", "has no adapter_config.json: give the folder that PEFT"),
        (f"{tmp_path}/other.gguf", "tiny", "and [4, 255]; use the model that it was trained"),
        (f"{tmp_path}/other", "tiny", "outputs for 4 heads of tiny: use the model that it was"),
        (poet, folder, "which has no adapters: give a GGUF file of the model"),
        # one that is not installed
        (str(junk), "llama-8b", needed),
        (tiny, "llama-8b", f"it is a model: {needed}"),
        (str(tmp_path), "llama-8b", "has no adapter_config.json"),
    ):
        assert run_command_line(["adapter", "add", "b", path, model])
        said = capsys.readouterr().err
        assert why in said
        assert said.count("\n") == 1
    assert not read_models_file().adapters
    for name, path in (("b", poet), ("c", clerk)):
        assert run_command_line(["adapter", "add", name, path, "llama-8b"]) == 0
        assert "llama-8b is not installed" in capsys.readouterr().err


def test_an_adapter_takes_no_name_that_means_something(files: Path) -> None:
    entry = AdapterEntry(str(files / "poet.gguf"), "tiny")
    add_alias("work", "tiny")
    for name, why in (("work", "another model"), ("llama-8b", "catalog"), ("a/b", "cannot be")):
        with pytest.raises(InvalidRequest, match=why):
            add_adapter(name, entry)
    with pytest.raises(ModelNotFound, match="there is no /nowhere: give a GGUF file"):
        add_adapter("x", AdapterEntry("/nowhere", "tiny"))
    add_adapter("poet", entry)
    with pytest.raises(InvalidRequest, match="poet is an adapter"):
        add_alias("poet", "tiny")
