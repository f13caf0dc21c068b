"""Presets: several names with their own settings over one loaded model, edited while in use."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_server import RealServer, real_server
from serving import server_harness, wait_until

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams, reject_mirostat_conflicts
from localgen.backends.types import Message, Request
from localgen.cli.completion_values import complete_model, complete_preset
from localgen.cli.main import run_command_line
from localgen.config import BadSetting
from localgen.hub.models_file import models_store, read_models_file
from localgen.hub.preset import Preset, parse_preset
from localgen.hub.presets import add_preset
from localgen.hub.remove import kind_of_name, remove_name
from localgen.hub.resolve import find_preset, resolve_model
from localgen.server.requests.presets import NamedSettings

HELLO = Message("user", "hello")
PIRATE, CALM = "You are a pirate.\nSay arr.", "Stay calm."


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server(LOCALGEN_KEEP_ALIVE="-1") as running:
        yield running


def write(server: RealServer, content: str) -> None:
    (server.settings.state_dir / "models.toml").write_text(content)


def post(server: RealServer, path: str, **body: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60).json()


def prompt_of(server: RealServer, model: str, *messages: Message) -> str:
    rows = [{"role": each.role, "content": each.content} for each in messages or (HELLO,)]
    prompt: str = post(server, "/apply-template", model=model, messages=rows)["prompt"]
    return prompt


def answer(server: RealServer, model: str, **fields: Any) -> Any:
    messages = fields.pop("messages", [{"role": "user", "content": "hello"}])
    return post(server, "/v1/chat/completions", model=model, messages=messages, **fields)


def text_of(answered: Any) -> str:
    text: str = answered["choices"][0]["message"]["content"]
    return text


TWO = f"""
t = "tiny"
[preset.pirate]
model = "tiny"
system = {json.dumps(PIRATE)}
temperature = 0
max_tokens = 6
[preset.calm]
model = "t"
system = {json.dumps(CALM)}
temperature = 0
max_tokens = 9
ctx = 256
"""


def test_two_presets_share_one_loaded_model_and_answer_as_each_alone(server: RealServer) -> None:
    write(server, TWO)
    for name, system, tokens in (("pirate", PIRATE, 6), ("calm", CALM, 9)):
        by_name = answer(server, name)
        given = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
        alone = answer(server, "tiny", messages=given, temperature=0, max_tokens=tokens)
        assert (by_name["model"], text_of(by_name)) == (name, text_of(alone))
        assert by_name["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert answer(server, "calm")["localgen"]["ctx"] == 256
    models = httpx.get(f"{server.url}/v1/stats").json()["models"]
    assert [each["name"] for each in models] == ["tiny"]


def test_own_parameters_and_an_own_system_message_beat_the_presets(server: RealServer) -> None:
    write(server, TWO)
    assert answer(server, "pirate", max_tokens=2)["usage"]["completion_tokens"] == 2
    assert answer(server, "calm", ctx=300)["localgen"]["ctx"] == 300
    assert PIRATE in prompt_of(server, "pirate")
    replaced = prompt_of(server, "pirate", Message("system", "Mine."), HELLO)
    assert "Mine." in replaced
    assert PIRATE not in replaced
    assert PIRATE in prompt_of(server, "pirate:latest")


def test_every_protocol_applies_a_preset(server: RealServer) -> None:
    write(server, TWO)
    said = text_of(answer(server, "pirate"))
    turn = {"role": "user", "content": "hello"}
    ollama = post(server, "/api/chat", model="pirate", messages=[turn], stream=False)
    assert ollama["message"]["content"] == said
    plain = post(server, "/api/generate", model="pirate", prompt="hello", stream=False)
    assert plain["response"] == said
    responses = post(server, "/v1/responses", model="pirate", input="hello")
    assert responses["output"][-1]["content"][0]["text"] == said
    messages = post(server, "/v1/messages", model="pirate", messages=[turn], max_tokens=6)
    assert messages["content"][-1]["text"] == said
    raw = post(server, "/v1/completions", model="pirate", prompt="hello")
    assert raw["usage"]["completion_tokens"] == 6


def test_it_is_listed_and_shown_as_a_model(server: RealServer) -> None:
    write(server, TWO)
    cards = {each["id"]: each for each in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert cards["pirate"]["source"] == "preset"
    tags = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert {"pirate", "calm"} <= {each["name"] for each in tags}
    shown = post(server, "/api/show", model="calm")
    assert shown["system"] == CALM
    assert "PARAMETER num_ctx 256" in shown["modelfile"]
    write(server, '[preset.p]\nmodel = "tiny"\nstop = ["a b", "\\"\\n"]\nregex = "x"\n')
    shown = post(server, "/api/show", model="p")
    rows = 'PARAMETER stop "a b"\nPARAMETER stop """"\n"""\nPARAMETER regex "x"\n'
    assert shown["modelfile"].endswith(rows)
    assert f'{"stop":<30} "a b"\n' in shown["parameters"]
    write(server, TWO)
    loaded = post(server, "/v1/models/load", model="calm")["model"]
    assert (loaded["name"], loaded["notes"][0]) == ("calm", "calm is a preset of tiny")


def test_choices_of_a_seeded_preset_have_a_seed_each() -> None:
    with server_harness() as server:
        table = f"[preset.p]\nmodel = {json.dumps(server.model())}\nseed = 7\n"
        (server.settings.state_dir / "models.toml").write_text(table)
        server.start()
        for own, wanted in (({}, "789"), ({"seed": 4}, "456")):
            choices = server.chat("p", "!seed", n=3, **own).json()["choices"]
            assert [each["message"]["content"] for each in choices] == list(wanted)


@pytest.mark.parametrize("name", ["long", "long:latest"])
def test_a_server_for_a_preset_loads_what_its_requests_ask_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_MODEL", name)
    with server_harness() as server:
        model = server.model()
        table = f"[preset.long]\nmodel = {json.dumps(model)}\nctx = 32768\n"
        (server.settings.state_dir / "models.toml").write_text(table)
        server.start()
        wait_until(server.loaded)
        assert server.chat("long").json()["localgen"]["ctx"] == 32768
        assert server.loads(model) == 1


def test_an_edit_applies_from_the_next_request_and_a_broken_one_says_so(
    server: RealServer,
) -> None:
    write(server, TWO)
    assert PIRATE in prompt_of(server, "pirate")
    write(server, TWO.replace("pirate.", "parrot."))
    assert "parrot." in prompt_of(server, "pirate")
    write(server, TWO.replace("temperature = 0", 'temperature = "hot"'))
    broken = answer(server, "pirate")
    assert broken["usage"]["completion_tokens"] == 6
    (note,) = broken["localgen"]["notes"]
    reason = "models.toml: preset pirate: temperature: Expected float, got str"
    assert note == f"{reason}. Until then pirate is what it was before that edit"
    assert "parrot." in prompt_of(server, "pirate")
    assert answer(server, "tiny", max_tokens=1)["localgen"]["notes"] == []
    write(server, TWO)
    assert answer(server, "pirate")["localgen"]["notes"] == []


def test_its_model_may_change_while_the_old_one_is_loaded(server: RealServer) -> None:
    write(server, '[preset.p]\nmodel = "tiny"\nmax_tokens = 1\n')
    assert answer(server, "p")["usage"]["completion_tokens"] == 1
    write(server, '[preset.p]\nmodel = "nowhere"\nmax_tokens = 1\n')
    assert answer(server, "p")["error"]["code"] == "model_not_found"
    write(server, "")
    assert answer(server, "p")["error"]["code"] == "model_not_found"


def test_a_context_beyond_the_loaded_one_is_refused_with_both_numbers(server: RealServer) -> None:
    write(server, '[preset.long]\nmodel = "tiny"\nctx = 4096\n')
    refused = answer(server, "long")["error"]
    assert refused["param"] == "ctx"
    assert refused["message"] == (
        "models.toml: preset long: ctx is 4,096, tiny is loaded with 2,048 tokens: lower it"
    )
    assert answer(server, "long", ctx=64, max_tokens=1)["localgen"]["ctx"] == 64


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('regex = "(("', "regex: invalid regex"),
        ("json_schema = '{'", "json_schema: "),
        ("mirostat = 2", "mirostat cannot be used with temperature 0"),
        ("ctx = 10_000_000", "ctx "),
    ],
)
def test_an_error_of_a_setting_names_its_key_and_the_preset(
    server: RealServer,
    setting: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = f'[preset.p]\nmodel = "tiny"\n{setting}\n'
    write(server, content)
    fields = {"temperature": 0} if "mirostat" in setting else {}
    message = answer(server, "p", **fields)["error"]["message"]
    assert message.startswith(f"models.toml: preset p: {said}")
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(server.settings.state_dir))
    monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", str(server.settings.runtime_dir))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    options = ["--temp", "0"] if fields else []
    assert run("run", "p", "hi", *options)
    assert f"localgen: models.toml: preset p: {said}" in capsys.readouterr().err


def test_a_context_that_the_first_load_refuses_is_that_of_the_preset() -> None:
    named = NamedSettings("p", Preset("tiny", ctx=9999))
    error = InvalidRequest("--ctx 9,999: tiny was trained for 2,048 tokens")
    assert named.explained(error).message == f"models.toml: preset p: {error.message[2:]}"
    assert named.explained(error, own_ctx=9999) is error
    assert NamedSettings("tiny").explained(error) is error


def test_an_error_of_the_requests_own_setting_does_not_name_the_preset(server: RealServer) -> None:
    write(server, '[preset.p]\nmodel = "tiny"\nregex = "a"\n')
    message = answer(server, "p", regex="((")["error"]["message"]
    assert message.startswith("regex: invalid regex")


def run(*arguments: str) -> int:
    return run_command_line(list(arguments))


def test_the_commands_keep_the_rest_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cp", "tiny", "t") == 0
    path = models_store().path
    path.write_text("# mine\n" + path.read_text())
    options = ("--system", PIRATE, "--temp", "0.5", "--stop", "a", "--stop", "b", "--think", "off")
    assert run("preset", "add", "pirate", "t", *options) == 0
    assert run("preset", "add", "calm", "tiny", "--ctx", "256", "--think", "low") == 0
    assert run("cp", "tiny", "u") == 0
    params = SamplingParams(temperature=0.5, stop=("a", "b"))
    assert find_preset("pirate") == Preset("t", PIRATE, think=False, params=params)
    assert find_preset("calm:latest") == Preset("tiny", think="low", ctx=256)
    assert resolve_model("pirate").name == "tiny"
    capsys.readouterr()
    assert run("preset", "list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "name": "pirate",
            "model": "t",
            "system": PIRATE,
            "think": False,
            "temperature": 0.5,
            "stop": ["a", "b"],
        },
        {"name": "calm", "model": "tiny", "think": "low", "ctx": 256},
    ]
    assert run("list") == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows if " preset " in row] == ["pirate", "calm"]
    assert {"pirate", "calm"} <= set(complete_model(""))
    assert complete_preset("PI") == ["PIrate"]
    assert run("preset", "rm", "pirate") == run("rm", "calm", "-y") == run("rm", "u", "-y") == 0
    assert path.read_text() == '# mine\nt = "tiny"\n\n'
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "tiny", "tiny"), "tiny is the name of a model of localgen: choose another"),
        (("add", "t", "tiny"), "t is the name of another model: choose another name"),
        (("add", "llama-8b", "tiny"), "llama-8b is a name of the catalog: choose another name"),
        (("add", "p", "tiny"), "p is already a preset of tiny: localgen preset rm p removes it"),
        (("add", "q", "p"), "p is a preset: give its model"),
        (("add", "preset", "tiny"), "preset cannot be a preset: models.toml uses it"),
        (("add", "a/b", "tiny"), "'a/b' cannot be a preset: use letters, digits and"),
        (("add", "q", "nowhere"), "Model 'nowhere' not found."),
        (("add", "q", "tiny", "--temp", "-1"), "--temp is -1, it must be 0 to 100"),
        (("add", "q", "tiny", "--ctx", "4096"), "--ctx 4,096: tiny was trained for 2,048 tokens"),
        (("add", "q", "tiny", "--ctx", "99999999999"), "--ctx is 99,999,999,999: give 1 to 2,147"),
        (("add", "q", "tiny", "--regex", "(("), "--regex: invalid regex"),
        (("add", "q", "tiny", "--json-schema", "{}", "--grammar", "x"), "give one of json_schema"),
        (("add", "q", "tiny", "--think", "hard"), "--think hard: give on, off, low, medium"),
        (("rm", "q"), "q is not a preset; presets: p"),
    ],
)
def test_mistakes_get_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("cp", "tiny", "t") == run("preset", "add", "p", "tiny") == 0
    before = models_store().read_text()
    capsys.readouterr()
    assert run("preset", *arguments) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"localgen: {said}")
    assert models_store().read_text() == before


def test_an_alias_of_a_preset_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("preset", "add", "p", "tiny") == 0
    assert run("cp", "p", "q") != 0
    assert "p is a preset: an alias is of a model, such as tiny" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [("cp", "t:latest", "q"), ("preset", "add", "q", "t:latest:latest")],
)
def test_a_model_with_the_tag_latest_can_be_used(command: tuple[str, ...]) -> None:
    assert run("cp", "tiny", "t") == 0
    assert run(*command) == 0
    assert resolve_model("q").name == "tiny"


@pytest.mark.parametrize("command", [("cp", "p:latest", "q"), ("preset", "add", "q", "p:latest")])
def test_a_preset_with_the_tag_latest_is_no_model(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("preset", "add", "p", "tiny") == 0
    assert run(*command) != 0
    assert "p is a preset: " in capsys.readouterr().err
    assert list(read_models_file().models) == ["p"]


def test_a_name_is_removed_by_what_it_is() -> None:
    assert run("cp", "tiny", "t") == run("preset", "add", "p", "t") == 0
    assert (kind_of_name("p"), kind_of_name("t"), kind_of_name("q")) == ("preset", "alias", None)
    remove_name("p")
    remove_name("t")
    with pytest.raises(ModelNotFound, match="t is not a preset"):
        remove_name("t")


def test_a_layout_that_cannot_be_changed_is_edited_by_hand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, layout = models_store().path, 'preset = {p = {model = "tiny"}}\n'
    path.parent.mkdir(mode=0o700)
    path.write_text(layout)
    assert run("preset", "add", "q", "tiny") != 0
    said = capsys.readouterr().err
    assert said == f"localgen: the layout of {path} is unusual: edit it by hand\n"
    assert path.read_text() == layout


@pytest.mark.parametrize("system", ["a\r\nb", "a\rb", "a\n", "\r\n", "a\n\r\nb"])
def test_any_line_end_of_a_system_prompt_is_kept(system: str) -> None:
    add_preset("p", Preset("tiny", system))
    preset = find_preset("p")
    assert preset is not None
    assert preset.system == system


def test_variables_of_chat_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALGEN_MAX_TOKENS", "5")
    assert run("preset", "add", "p", "tiny") == 0
    assert find_preset("p") == Preset("tiny")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("preset = 3\n", "preset: expected tables such as [preset.NAME]"),
        ('[preset]\np = "tiny"\n', "preset: expected tables such as [preset.NAME]"),
        ('[preset.p]\nsystem = "a"\n', "preset p: model: give the name of a model"),
        ('[preset.p]\nmodel = "tiny"\ntemp = 1\n', "preset p: unknown field temp: fields are"),
        ('[preset.p]\nmodel = "tiny"\nctx = 0\n', "preset p: ctx is 0: give 1 to 2,147,483,647"),
        (
            '[preset.p]\nmodel = "tiny"\nseed = -1\n',
            "preset p: seed is -1: give 0 to 4,294,967,295",
        ),
        ('[preset.p]\nmodel = "tiny"\nthink = "no"\n', "preset p: think is 'no': give true"),
        ('[preset.p]\nmodel = "tiny"\ntop_p = 2\n', "preset p: top_p is 2, it must be 0 to 1"),
        ('p = "tiny"\n[preset.p]\nmodel = "tiny"\n', "preset p is also an alias"),
        (
            '[preset.p]\nmodel = "tiny"\n[preset.tiny]\nmodel = "tiny"\n',
            "preset tiny is also a model of localgen: rename it, as in [preset.my-tiny]",
        ),
        (
            'a = "smollm2"\n[adapter.smollm2]\npath = "/x"\nmodel = "smollm2"\n',
            "adapter smollm2 is also a model of localgen: rename it, as in [adapter.my-smollm2]",
        ),
        (
            '[preset.llama-8b]\nmodel = "llama-8b"\n',
            "preset llama-8b has the name of its model: rename it, as in [preset.my-llama-8b]",
        ),
        ('a = "p"\n[preset.p]\nmodel = "tiny"\n', "a is an alias of a preset: give a model"),
        ('a = "p:latest"\n[preset.p]\nmodel = "tiny"\n', "a is an alias of a preset: give a"),
        (
            '[preset.p]\nmodel = "q:latest"\n[preset.q]\nmodel = "tiny"\n',
            "preset p: q is a preset",
        ),
        ('[preset.p]\nmodel = "q"\n[preset.q]\nmodel = "tiny"\n', "preset p: q is a preset"),
        ('[adapter]\np = "x"\n', "adapter: expected tables such as [adapter.NAME]"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_its_place(content: str, said: str) -> None:
    models_store().path.parent.mkdir(mode=0o700)
    models_store().path.write_text(content)
    with pytest.raises(BadSetting) as raised:
        read_models_file()
    assert raised.value.message.startswith(f"{models_store().path}: {said}")


def test_a_string_named_preset_is_an_alias_as_before() -> None:
    models_store().path.parent.mkdir(mode=0o700)
    models_store().path.write_text('preset = "tiny"\n')
    assert read_models_file().aliases == {"preset": "tiny"}
    with pytest.raises(InvalidRequest, match="preset is an alias"):
        add_preset("p", Preset("tiny"))


def test_what_excludes_a_parameter_of_the_request_is_left_out() -> None:
    preset = Preset("tiny", params=SamplingParams(mirostat=2, regex="a", top_k=None))
    params = preset.apply(Request(id="1", prompt="", params=SamplingParams(top_k=5))).params
    assert (params.top_k, params.mirostat, params.regex) == (5, None, "a")
    ours = Preset("tiny", params=SamplingParams(top_k=3, json_schema="{}"))
    requested = SamplingParams(mirostat=1, grammar="root ::= []")
    params = ours.apply(Request(id="1", prompt="", params=requested)).params
    reject_mirostat_conflicts(params)
    assert (params.grammar, params.json_schema) == ("root ::= []", None)


@pytest.mark.parametrize(
    ("think", "own", "wanted"),
    [
        (False, {}, (False, None)),
        ("high", {}, (None, "high")),
        (True, {"thinking": False}, (False, None)),
        ("high", {"thinking": True}, (True, None)),
        (False, {"reasoning_effort": "low"}, (None, "low")),
    ],
)
def test_thinking(think: bool | str, own: dict[str, Any], wanted: tuple[Any, Any]) -> None:
    request = Preset("tiny", think=think).apply(Request(id="1", messages=(HELLO,), **own))
    assert (request.thinking, request.reasoning_effort) == wanted


def test_only_a_context_above_the_default_is_one_of_the_load() -> None:
    assert Preset("tiny", ctx=4096).load_options(LoadOptions()) == LoadOptions()
    long = Preset("tiny", ctx=32768)
    assert long.load_options(LoadOptions()) == LoadOptions(ctx=32768)
    assert long.load_options(LoadOptions(), 512) == LoadOptions()
    assert long.load_options(LoadOptions(ctx=1024)) == LoadOptions(ctx=1024)


def test_a_preset_is_read_as_it_is_written() -> None:
    params = SamplingParams(temperature=0.0, seed=0, stop=("\n",), dry_sequence_breakers=("a",))
    for preset in (
        Preset("tiny", "é\n", think=False, ctx=1, params=params),
        Preset("user/repo:Q4_K_M", think="low", params=SamplingParams(max_tokens=3)),
    ):
        assert parse_preset(preset.to_table()) == preset


def test_a_broken_file_does_not_stop_what_needs_no_names(
    server: RealServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(server.settings.state_dir))
    monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", str(server.settings.runtime_dir))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    write(server, '[preset.p]\nmodel = "tiny"\ntemperature = -1\n')
    problem = "models.toml: preset p: temperature is -1, it must be 0 to 100"
    assert run("run", "tiny", "hi", "-n", "1") == run("show", "tiny") == 0
    assert problem not in capsys.readouterr().err
    assert run("ps") == 0
    said = capsys.readouterr()
    assert "tiny" in said.out
    assert said.err.endswith(f"{problem}; the names in it are not listed\n")
    assert said.err.count("\n") == 1
    assert run("stop", "q")
    said = capsys.readouterr()
    assert f"{problem}; the names in it are not known\n" in said.err
    assert "q is not loaded; loaded models: tiny" in said.err
    assert run("stop", "tiny") == run("logs", "-n", "1") == 0
    write(server, "")
