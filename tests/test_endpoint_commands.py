"""Other servers from the command line: their names, `--url`, and options that do not apply."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plain_openai import PlainServer, answer, error, plain_server

from localgen.backends.errors import InvalidRequest
from localgen.cli import errors
from localgen.cli.main import run_command_line
from localgen.client.endpoints import (
    Endpoint,
    add_endpoint,
    endpoints_path,
    load_endpoints,
    normalize_base_url,
    remove_endpoint,
    validate_env_var_name,
)
from localgen.config import BadSetting

INVALID = errors.EXIT_STATUS_BY_CODE["invalid_request"]
BAD_SETTING = errors.EXIT_STATUS_BY_CODE["bad_setting"]
UNAVAILABLE = errors.EXIT_STATUS_BY_CODE["endpoint_unavailable"]
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config", "state", "runtime"):
        monkeypatch.setenv(f"LOCALGEN_{name.upper()}_DIR", str(tmp_path / name))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))


@pytest.fixture
def server() -> Iterator[PlainServer]:
    with plain_server("big", "small") as running:
        yield running


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Status and message of a command that fails."""
    capsys.readouterr()
    status = run_command_line(list(arguments))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("localgen: ")
    assert err.count("\n") == 1
    return status, err.removeprefix("localgen: ").strip()


# --- URLs and variables ---


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("https://host/openai/v1", "https://host/openai/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_base_urls_are_normalized(text: str, url: str) -> None:
    assert normalize_base_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:8000",
        "ftp://host/v1",
        "http://",
        "http:///v1",
        "http://[::1",
        "http://host:port",
        "http://host:99999",
        "http://ho st/v1",
        "http://host/\x1b[2J",
        "http://host/v1/chat/completions",
        "http://host/v1/models",
    ],
)
def test_invalid_base_urls_are_rejected(text: str) -> None:
    with pytest.raises(InvalidRequest, match="http://host:8000/v1"):
        normalize_base_url(text)


@pytest.mark.parametrize("secret", ["u:SECRET@h", "SECRET@h", "h/v1?key=SECRET", "h/v1#SECRET"])
def test_secret_in_a_url_is_rejected_and_not_shown(secret: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        normalize_base_url(f"https://{secret}")
    assert "SECRET" not in raised.value.message
    assert "--api-key-env" in raised.value.message


@pytest.mark.parametrize("text", ["sk-SECRET", "", "A B", "1A", "SECRET=1"])
def test_a_key_in_place_of_a_variable_is_not_shown(text: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        validate_env_var_name(text)
    assert "SECRET" not in raised.value.message


# --- names ---


def test_add_list_rm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIG_KEY", KEY)
    assert run_command_line(["endpoint", "add", "big", "https://h/v1", "--key-env", "BIG_KEY"]) == 0
    assert (
        run_command_line(["endpoint", "add", "near", "http://localhost:8000", "--model", "m:8b"])
        == 0
    )
    assert "localgen chat --url near" in capsys.readouterr().out
    assert run_command_line(["endpoint", "list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["NAME", "URL", "KEY", "MODEL"]
    assert rows[1:] == [
        ["big", "https://h/v1", "$BIG_KEY", "-"],
        ["near", "http://localhost:8000/v1", "-", "m:8b"],
    ]
    assert run_command_line(["endpoint", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[1] == {
        "name": "near",
        "url": "http://localhost:8000/v1",
        "key_env": None,
        "model": "m:8b",
    }
    assert run_command_line(["endpoint", "rm", "big"]) == 0
    assert list(load_endpoints()) == ["near"]


def test_keys_are_not_stored_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIG_KEY", KEY)
    add_endpoint(Endpoint("https://h/v1", "big", "BIG_KEY", 'odd "é" \U0001f600'))
    assert load_endpoints()["big"] == Endpoint(
        "https://h/v1", "big", "BIG_KEY", 'odd "é" \U0001f600'
    )
    assert KEY not in endpoints_path().read_text()
    assert endpoints_path().stat().st_mode & 0o777 == 0o600
    assert endpoints_path().parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in endpoints_path().parent.iterdir()] == ["endpoints.toml"]


def test_unset_key_variable_gives_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run_command_line(["endpoint", "add", "big", "https://h/v1", "--key-env", "NO_SUCH_KEY"])
        == 0
    )
    assert "NO_SUCH_KEY is not set:" in capsys.readouterr().err
    status, message = failure(capsys, "run", "--url", "big", "m", "x")
    assert (status, "NO_SUCH_KEY is not set" in message) == (BAD_SETTING, True)


def test_edits_keep_the_users_text() -> None:
    add_endpoint(Endpoint("http://a/v1", "a"))
    written = "# mine\n\n[b] # second\nurl = 'http://b'\n# of b\n\n[c]\nurl = 'http://c/v1'"
    endpoints_path().write_text(written)
    assert load_endpoints()["b"].url == "http://b/v1"
    add_endpoint(Endpoint("http://d/v1", "d"))
    assert endpoints_path().read_text().startswith(written)
    remove_endpoint("b")
    text = endpoints_path().read_text()
    assert text.startswith("# mine\n\n[c]\n")
    assert list(load_endpoints()) == ["c", "d"]


def test_a_table_in_another_layout_is_removed() -> None:
    add_endpoint(Endpoint("http://a/v1", "a"))
    endpoints_path().write_text("b.url = 'http://b/v1'\n[a]\nurl = 'http://a/v1'\n")
    remove_endpoint("b")
    assert list(load_endpoints()) == ["a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add", "a.b", "http://h"], "invalid name 'a.b'"),
        (["add", "a/b", "http://h"], "invalid name 'a/b'"),
        (
            ["add", "old", "http://other"],
            "endpoint old already exists (http://h/v1): remove it with localgen endpoint rm old",
        ),
        (["add", "x", "h:8000"], "'h:8000' is not the URL of a server"),
        (["add", "x", "http://h", "--key-env", "sk-1"], "the name of a variable"),
        (["add", "x", "http://h", "--model", " "], "--model: give a model name"),
        (["add", "x", "http://h", "--model", "a\nb"], "--model: give a model name"),
        (["rm", "x"], "no endpoint x, endpoints are old"),
    ],
)
def test_invalid_names_are_rejected(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    add_endpoint(Endpoint("http://h/v1", "old"))
    before = endpoints_path().read_text()
    status, told = failure(capsys, "endpoint", *arguments)
    assert (status, message in told) == (INVALID, True), told
    assert endpoints_path().read_text() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[a", "correct it or remove it"),
        ("a = 1", "a: not a table"),
        ("['a b']\nurl = 'http://h'", "a b: not a table with a name"),
        ("[a]\n", "a: '' is not the URL"),
        ("[a]\nurl = 5", "a: the values must be strings"),
        (
            "[a]\nurl = 'http://h'\nkey = 'sk'",
            "a: unknown field key, fields are url, key_env, model",
        ),
        ("[a]\nurl = 'http://h'\nkey_env = 'sk-SECRET'", "a: give the name of a variable"),
        ("\xff", "correct it or remove it"),
    ],
)
def test_a_damaged_file_is_one_line(
    capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    endpoints_path().parent.mkdir(mode=0o700)
    endpoints_path().write_text(content, encoding="latin-1")
    endpoints_path().chmod(0o600)
    status, told = failure(capsys, "run", "--url", "a", "m", "x")
    assert (status, message in told) == (BAD_SETTING, True), told
    assert str(endpoints_path()) in told
    assert "SECRET" not in told


def test_file_writable_by_others_is_rejected() -> None:
    add_endpoint(Endpoint("http://h/v1", "a"))
    endpoints_path().chmod(0o666)
    with pytest.raises(BadSetting, match="chmod 600"):
        load_endpoints()


def test_folder_that_cannot_be_created_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCALGEN_CONFIG_DIR", str(tmp_path / "file" / "config"))
    status, message = failure(capsys, "endpoint", "add", "b", "http://h")
    assert (status, "LOCALGEN_CONFIG_DIR" in message) == (BAD_SETTING, True), message


def test_endpoint_alone_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    status, message = failure(capsys, "endpoint")
    assert (status, "localgen endpoint --help" in message) == (errors.USAGE_ERROR, True)


# --- run and chat ---


def test_run_sends_the_prompt_to_the_url(
    server: PlainServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_command_line(["run", "--url", server.url, "big", "a b", "-sys", "brief", "--temp", "0"])
        == 0
    )
    assert capsys.readouterr() == ("re: a b \n", "")
    sent = server.asked[0]
    assert sent["messages"][0] == {"role": "system", "content": "brief"}
    assert (sent["model"], sent["temperature"]) == ("big", 0)


def test_run_at_a_name_with_a_model_of_its_own(
    server: PlainServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIG_KEY", KEY)
    monkeypatch.setenv("LOCALGEN_MODEL", "big")
    server.key = KEY
    add_endpoint(Endpoint(server.url, "near", "BIG_KEY", "small"))
    add_endpoint(Endpoint(server.url, "bare"))
    assert run_command_line(["run", "--url", "near", "a b"]) == 0
    assert run_command_line(["run", "--url", "near", "other", "a b"]) == 0
    assert run_command_line(["run", "--url", "bare", "--api-key-env", "BIG_KEY", "a b"]) == 0
    monkeypatch.setenv("LOCALGEN_URL", "near")
    assert run_command_line(["run", "a b"]) == 0
    assert [sent["model"] for sent in server.asked] == ["small", "other", "big", "small"]
    assert capsys.readouterr().out == "re: a b \n" * 4


def test_statistics_of_a_remote_answer(
    server: PlainServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["run", "--url", server.url, "big", "x", "--json", "--verbose"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["usage"]["prompt_tokens_details"] == {"cached_tokens": None}
    assert record["ctx"] is None
    assert set(record["timings"]) == {
        "measured",
        "ttft_ms",
        "predicted_n",
        "predicted_ms",
        "predicted_per_second",
    }
    assert "prompt:     40 prompt tokens\n" in err
    assert "measured by the client" in err
    assert "load:" not in err


def test_unknown_statistics_are_omitted_or_marked_as_estimated(
    server: PlainServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.events = answer("a", "b", "c")
    assert run_command_line(["run", "--url", server.url, "big", "x", "--json", "--verbose"]) == 0
    out, err = capsys.readouterr()
    usage = json.loads(out)["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (None, None)
    assert (usage["completion_tokens"], usage["estimated"]) == (3, True)
    assert "generated:  ~3 tokens (text chunks: the server reports no count)" in err
    assert "prompt:" not in err
    assert "context:" not in err


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--ctx", "64"], "--ctx"),
        (["-c64"], "--ctx"),
        (["--priority", "0"], "--priority"),
        (["--keep-alive", "5m"], "--keep-alive"),
        (["--backend", "auto"], "--backend"),
        (["-ngl", "-1"], "--gpu-layers"),
        (["--no-mmap"], "--mmap"),
    ],
)
@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_flag_for_our_own_server_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, flags: list[str], name: str
) -> None:
    status, message = failure(capsys, command, "--url", "http://h/v1", "m", *flags)
    assert status == INVALID
    assert message.startswith(f"{name} does not apply to a model on a remote server (--url)")


def test_variables_for_the_own_server_are_ignored_for_endpoints(
    server: PlainServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"CTX": "64", "THREADS": "2", "PRIORITY": "3", "KEEP_ALIVE": "1m"}.items():
        monkeypatch.setenv(f"LOCALGEN_{name}", value)
    monkeypatch.setenv("LOCALGEN_TEMP", "0.5")
    assert run_command_line(["run", "--url", server.url, "big", "x"]) == 0
    assert server.asked[0]["temperature"] == 0.5
    assert set(server.asked[0]) == {"model", "messages", "stream", "stream_options", "temperature"}


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["run", "--url", "nix", "m", "x"], INVALID, "no endpoint nix: none is defined"),
        (["run", "--url", "localhost:80", "m", "x"], INVALID, "is not the URL of a server"),
        (["run", "--url", "", "m", "x"], INVALID, "is not the URL of a server"),
        (["run", "--api-key-env", "K", "m", "x"], INVALID, "give --url as well"),
        (["run", "--url", "http://h", "--api-key-env", "a-b", "m", "x"], INVALID, "of a variable"),
        (["run", "--url", "{url}", "x y"], INVALID, "has 2 models, name one: big, small"),
        (["chat", "--url", "http://127.0.0.1:9/v1", "m"], INVALID, "no prompt"),
        (["run", "--url", "http://127.0.0.1:9/v1", "m", "x"], UNAVAILABLE, "connection refused"),
        (["run", "--url", "{url}/else", "m", "x"], UNAVAILABLE, "check the path"),
        (["ps", "--url", "http://h"], errors.USAGE_ERROR, "--url"),
        (["stop", "--url", "http://h"], errors.USAGE_ERROR, "--url"),
    ],
)
def test_bad_arguments_have_their_exit_status(
    server: PlainServer,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    filled = [argument.format(url=server.url) for argument in arguments]
    got, told = failure(capsys, *filled)
    assert (got, message in told) == (status, True), told


def test_missing_remote_model_is_not_pulled(
    server: PlainServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.models = ["big"]
    server.refuse = lambda body: error(404, "no such model")
    status, message = failure(capsys, "run", "--url", server.url, "llama-8b", "x")
    assert status == errors.EXIT_STATUS_BY_CODE["model_not_found"]
    assert message == f"no model llama-8b at {server.url}, models are big"
