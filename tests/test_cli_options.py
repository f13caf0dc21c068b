"""Options on the command line, and the fields they become."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from localgen.backends.errors import InvalidRequest
from localgen.backends.model_info import LoadOptions, option_flag
from localgen.backends.sampling_params import ANY_JSON_OBJECT, SamplingParams
from localgen.chat.parameters import ModelOptions
from localgen.cli import options as declared
from localgen.cli.options import takes_model_options
from localgen.config import BadSetting

# not shown on a terminal; limited per request by the context
NOT_ON_THE_COMMAND_LINE = {"logprobs", "infill_sampler"}
CTX_OF_A_LOAD = {"ctx"}


def parse(*arguments: str) -> ModelOptions:
    """The options of a command line."""
    got: list[ModelOptions] = []

    @takes_model_options
    def command(options: ModelOptions, model: str | None = None) -> None:
        got.append(options)

    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(command)
    typer.main.get_command(app).main(list(arguments), standalone_mode=False)
    return got[0]


def test_every_field_has_an_option() -> None:
    sampling = {flag.field for flag in declared.SAMPLING_OPTIONS}
    loading = {flag.field for flag in declared.LOAD_OPTIONS}
    assert sampling == {f.name for f in fields(SamplingParams)} - NOT_ON_THE_COMMAND_LINE
    assert loading == {f.name for f in fields(LoadOptions)} - CTX_OF_A_LOAD
    assert {flag.field for flag in declared.REQUEST_OPTIONS} == {
        f.name for f in fields(ModelOptions)
    } - {
        "params",
        "load",
        "figures",  # a setting of a chat
        "save_prefix",  # --no-history
    }


def test_messages_name_load_options_by_their_flags() -> None:
    for flag in declared.LOAD_OPTIONS:
        assert option_flag(flag.field) == flag.long_name


def test_no_two_options_share_a_name() -> None:
    flags = [flag for panel in declared.OPTION_PANELS.values() for flag in panel]
    names = [name for flag in flags for name in flag.names.replace("/", " ").split()]
    assert len(set(names)) == len(names)


def test_no_options_set_no_fields() -> None:
    assert parse() == ModelOptions()


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["-n", "5"], "max_tokens", 5),
        (["-n5"], "max_tokens", 5),
        (["--max-tokens=5"], "max_tokens", 5),
        (["-n", "-1"], "max_tokens", None),
        (["--min-tokens", "3"], "min_tokens", 3),
        (["--think-max", "0"], "thinking_budget", 0),
        (["--think-max", "-1"], "thinking_budget", None),
        (["-s", "3"], "seed", 3),
        (["--seed", "-1"], "seed", None),
        (["--temp", "0"], "temperature", 0.0),
        (["--top-k", "0"], "top_k", 0),
        (["--top-n-sigma", "-1"], "top_n_sigma", -1.0),
        (["--dry-sequence-breaker", "a", "--dry-sequence-breaker", "\n"], "dry_sequence_breakers",
         ("a", "\n")),
        (["--mirostat", "2"], "mirostat", 2),
        (["--mirostat-ent", "4"], "mirostat_tau", 4.0),
        (["--mirostat-lr", ".2"], "mirostat_eta", 0.2),
        (["--dynatemp-exp", "2"], "dynatemp_exponent", 2.0),
        (["--logit-bias", "5=-1.5", "--logit-bias", "6=2"], "logit_bias", {5: -1.5, 6: 2.0}),
        (["--stop", "END", "--stop", "two words"], "stop", ("END", "two words")),
        (["--stop-token", "2"], "stop_token_ids", (2,)),
        (["--ignore-eos"], "ignore_eos", True),
    ],
)  # fmt: skip
def test_sampling_options(arguments: list[str], field: str, value: object) -> None:
    assert getattr(parse(*arguments).params, field) == value


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["-t", "3"], "threads", 3),
        (["-tb", "4"], "threads_batch", 4),
        (["-ngl", "10"], "gpu_layers", 10),
        (["-ngl", "-1"], "gpu_layers", -1),
        (["-fa", "on"], "flash_attn", "on"),
        (["-ctk", "q8_0"], "cache_type_k", "q8_0"),
        (["-ctv", "q4_0"], "cache_type_v", "q4_0"),
        (["-np", "4"], "parallel", 4),
        (["-b", "64"], "max_batch_tokens", 64),
        (["--no-mmap"], "mmap", False),
        (["--mlock"], "mlock", True),
        (["--no-prefix-cache"], "prefix_cache", False),
    ],
)
def test_loading_options(arguments: list[str], field: str, value: object) -> None:
    assert getattr(parse(*arguments).load, field) == value


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["-c", "512"], "ctx", 512),
        (["--ctx", "0"], "ctx", None),
        (["-sys", "be brief"], "system", "be brief"),
        (["--priority", "-2"], "priority", -2),
        (["--verbose"], "verbose", True),
        (["--keep-alive", "5m"], "keep_alive", "5m"),
        (["--keep-alive", "-1"], "keep_alive", "-1"),
    ],
)
def test_request_options_set_their_fields(arguments: list[str], field: str, value: object) -> None:
    assert getattr(parse(*arguments), field) == value


def test_each_option_reaches_its_field_and_no_other() -> None:
    examples: dict[Any, tuple[str, ...]] = {
        int: ("3",), float: ("0.5",), str: ("16",), list[str]: ("7=1",), list[int]: ("7",),
        bool: (), declared.OnOffAuto: ("on",), declared.Backend: ("cuda",),
    }  # fmt: skip
    for flag in (*declared.SAMPLING_OPTIONS, *declared.LOAD_OPTIONS):
        if flag.value_type is Path:
            continue
        name = flag.names.split()[-1].split("/")[0]
        got = parse(name, *examples[flag.value_type])
        changed = {
            f.name
            for values, empty in ((got.params, SamplingParams()), (got.load, LoadOptions()))
            for f in fields(values)
            if getattr(values, f.name) != getattr(empty, f.name)
        }
        assert changed == {flag.field}, flag.names


def test_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALGEN_MAX_TOKENS", "7")
    monkeypatch.setenv("LOCALGEN_GPU_LAYERS", "0")
    monkeypatch.setenv("LOCALGEN_MMAP", "false")
    found = parse("-ngl", "5")
    assert (found.params.max_tokens, found.load.gpu_layers, found.load.mmap) == (7, 5, False)


@pytest.mark.parametrize("sign", ["", "@"])
def test_a_template_is_read_from_its_file(tmp_path: Path, sign: str) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }} é", encoding="utf-8")
    assert parse("--chat-template", f"{sign}{path}").load.chat_template == "{{ messages }} é"


@pytest.mark.parametrize("flag", ["--system", "-j", "--regex", "--grammar"])
def test_an_at_sign_names_a_file(tmp_path: Path, flag: str) -> None:
    path = tmp_path / "text"
    path.write_text('["é one",\n"two"]\n', encoding="utf-8")
    found = parse(flag, f"@{path}")
    texts = (found.system, found.params.json_schema, found.params.regex, found.params.grammar)
    assert [text for text in texts if text is not None] == ['["é one",\n"two"]']
    with pytest.raises(InvalidRequest, match=r"--[a-z-]+ .*none: No such file"):
        parse(flag, f"@{tmp_path}/none")


@pytest.mark.parametrize("flag", ["-j", "--format", "--json-schema"])
def test_json_without_a_schema_is_any_object(flag: str) -> None:
    assert parse(flag, "json").params.json_schema == ANY_JSON_OBJECT


@pytest.mark.parametrize("sign", ["", "@"])
@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_unreadable_template_is_rejected(tmp_path: Path, content: bytes | None, sign: str) -> None:
    path = tmp_path / "chat.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"--chat-template .*chat\.jinja: "):
        parse("--chat-template", f"{sign}{path}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temp", "warm"],
        ["-n", "1.5"],
        ["-fa", "perhaps"],
        ["--tmep", "1"],
        ["-n"],
        ["a", "b"],
    ],
)
def test_wrong_options_are_usage_errors(arguments: list[str]) -> None:
    with pytest.raises(typer.TyperException) as raised:
        parse(*arguments)
    assert raised.value.exit_code == 2
    assert "\n" not in raised.value.format_message()


def test_wrong_logit_bias_shows_the_expected_form() -> None:
    with pytest.raises(InvalidRequest, match="give ID=BIAS"):
        parse("--logit-bias", "x")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--temp", "nan"], "--temp nan: give a finite number"),
        (["--top-p", "inf"], "--top-p inf: give a finite number"),
        (["--itl-target-ms", "nan"], "--itl-target-ms nan: give a finite number"),
        (["-n", "0"], "--max-tokens must be at least 1, or -1 for no limit"),
        (["-s", "-2"], "--seed must be at least 0, or -1 for a new one each time"),
        (["-c", "-1"], "--ctx must be at least 1, or 0 for the default"),
        (["--min-tokens", "-1"], "--min-tokens must be at least 0$"),
        (["--think-max", "-2"], "--think-max must be at least 0, or -1 for no limit"),
        (["--logit-bias", "5=nan"], "give a finite number"),
        (["--logit-bias", "5=-inf"], "5=-100 bans the token"),
    ],
)
def test_numbers_that_nothing_accepts_are_refused(arguments: list[str], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        parse(*arguments)


def test_wrong_keep_alive_names_the_option() -> None:
    with pytest.raises(BadSetting, match="--keep-alive=soon: give a time such as 30s"):
        parse("--keep-alive", "soon")
