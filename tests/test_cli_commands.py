"""The commands: output, exit status, and never a traceback."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_client import Script, ScriptedClient, answer

import localgen.client
from localgen.backends.errors import EngineDied, InvalidRequest, LocalgenError, ModelNotFound
from localgen.backends.types import Message
from localgen.cli import commands, errors
from localgen.cli.arguments import split_model_and_prompt
from localgen.cli.main import run_command_line
from localgen.client import TextDelta

ROOT = Path(__file__).parents[1]


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
        monkeypatch.setattr(localgen.client, "Client", lambda *_args, **_named: client)
        return client

    return make


def pipe_in(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", Piped(content))


def test_run_prints_the_answer(
    scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    client = scripted(("4", "2", answer()))
    arguments = [
        "run",
        "tiny",
        "17 + 25?",
        "-sys",
        "be brief",
        "--temp",
        "0",
        "-c",
        "64",
        "-t",
        "2",
    ]
    assert run_command_line(arguments) == 0
    assert capsys.readouterr() == ("42\n", "")
    asked = client.record.asked[0]
    assert asked.messages == (Message("system", "be brief"), Message("user", "17 + 25?"))
    assert (asked.params.temperature, asked.ctx) == (0.0, 64)
    assert client.record.loaded[0][1].threads == 2


def test_thoughts_of_one_answer(
    scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(*[(TextDelta("", 1, "Hm."), "4", answer())] * 2)
    assert run_command_line(["run", "tiny", "x", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["reasoning"], record["text"]) == ("Hm.", "4")
    assert run_command_line(["run", "tiny", "x"]) == 0
    assert capsys.readouterr() == ("4\n", ""), "a pipe gets the answer and nothing else"


def test_run_json(
    scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(("4", "2", answer(notes=("preempted",))))
    assert run_command_line(["run", "tiny", "x", "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert out.count("\n") == 1
    assert record["text"] == "42"
    assert record["prompt"] == "x"
    assert record["usage"]["prompt_tokens_details"] == {"cached_tokens": 12}
    assert record["timings"]["ttft_ms"] == 56.4
    assert (record["ctx"], record["seed"], record["notes"]) == (2048, 7, ["preempted"])
    assert err == "preempted\n"


@pytest.mark.parametrize("arguments", [["run", "tiny", "x", "--json"], ["list", "--json"]])
def test_json_on_a_terminal_is_inert(
    scripted: Callable[..., ScriptedClient],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    hostile = "\x1b[2J \x9b2J \x7f \u202e é"
    client = scripted((hostile, answer()))
    client.names = ("tiny", hostile)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run_command_line(arguments) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert out.isascii()
    found = json.loads(out)
    assert (found["text"] if arguments[0] == "run" else found[1]["name"]) == hostile


def test_keep_alive_reaches_the_server(scripted: Callable[..., ScriptedClient]) -> None:
    client = scripted()
    assert run_command_line(["run", "tiny", "x"]) == 0
    assert run_command_line(["run", "tiny", "x", "--keep-alive", "0"]) == 0
    assert client.record.keep_alives == [None, "0"]


def test_run_verbose_goes_to_stderr(
    scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted()
    assert run_command_line(["run", "tiny", "x", "--verbose"]) == 0
    out, err = capsys.readouterr()
    assert out == "re: x\n"
    assert [line.split(":")[0] for line in err.splitlines()] == [
        "load", "prompt", "generated", "TTFT", "drafts", "context",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "piped", "model", "prompt"),
    [
        ([], b"from a pipe\n", None, "from a pipe"),
        (["tiny"], b"from a pipe", "tiny", "from a pipe"),
        (["tiny", "ask"], b"context\n", "tiny", "ask\n\ncontext"),
        (["two words"], b"", None, "two words"),
        (["two words"], b"context", None, "two words\n\ncontext"),
        (["tiny", "word"], b"", "tiny", "word"),
        ([], "é\n\nb\n".encode(), None, "é\n\nb"),
    ],
)
def test_where_the_prompt_comes_from(
    scripted: Callable[..., ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    piped: bytes,
    model: str | None,
    prompt: str,
) -> None:
    client = scripted()
    pipe_in(monkeypatch, piped)
    assert run_command_line(["run", *arguments]) == 0
    assert client.record.loaded[0][0] == model
    assert client.record.asked[0].messages == (Message("user", prompt),)


def test_chat_answers_piped_input_as_one_prompt(
    scripted: Callable[..., ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = scripted()
    pipe_in(monkeypatch, b"one\ntwo\n")
    assert run_command_line(["chat"]) == 0
    assert capsys.readouterr() == ("re: one\ntwo\n", "")
    assert len(client.record.asked) == 1


def test_model_and_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my models"
    path.mkdir()
    assert split_model_and_prompt([str(path)]) == (str(path), None)
    assert split_model_and_prompt(["my models/x.gguf"]) == ("my models/x.gguf", None)
    assert split_model_and_prompt(["long " * 5000]) == (None, "long " * 5000)
    monkeypatch.setenv("LOCALGEN_MODEL", "usual")
    assert split_model_and_prompt(["two words"]) == ("usual", "two words")
    assert split_model_and_prompt([]) == ("usual", None)
    assert split_model_and_prompt([], "of the endpoint") == ("of the endpoint", None)
    assert split_model_and_prompt(["other", "x"]) == ("other", "x")
    assert split_model_and_prompt(["other", "x", "y"]) == ("other", "x y")
    assert split_model_and_prompt(["x", "y"], model="other") == ("other", "x y")
    assert split_model_and_prompt(["other"], prompt="x") == ("other", "x")
    assert split_model_and_prompt([], prompt="x") == ("usual", "x")
    with pytest.raises(InvalidRequest, match="two prompts: 'x y'"):
        split_model_and_prompt(["other", "x", "y"], prompt="z")


@pytest.mark.parametrize(
    ("arguments", "piped", "status", "complaint"),
    [
        (["run"], b"", 3, "no prompt"),
        (["run", "tiny"], b" \n", 3, "no prompt"),
        (["run"], b"\xff\xfe", 3, "not UTF-8"),
        (["run", "gone", "x"], b"", 6, "Model 'gone' not found"),
        (["run", "What", "is", "it"], b"", 6, "`localgen run -p 'What is it'` asks the default"),
        (["run", "tiny", "-p", "x", "-f", "y"], b"", 3, "exclude each other"),
        (["run", "tiny", "-f", "/no/file"], b"", 3, "--file /no/file: No such file"),
        (["run", "tiny", "x", "--temp", "warm"], b"", 2, "--temp"),
        (["run", "tiny", "x", "--nope"], b"", 2, "localgen run --help"),
        (["rnu"], b"", 2, "Did you mean 'run'"),
        (["chat", "two words"], b"", 3, "localgen run"),
        (["stop", "other"], b"", 6, "other is not loaded; loaded models: tiny"),
        (["serve", "--keep-alive", "soon"], b"", 12, "--keep-alive"),
        (["run", "tiny", "x", "--keep-alive", "soon"], b"", 12, "--keep-alive=soon"),
        (["run", "tiny", "x", "--temp", "nan"], b"", 3, "--temp nan"),
        (["run", "tiny", "caf\udce9"], b"", 3, "is not UTF-8 text"),
        (["run", "tiny", "x", "--stop", "\udcff"], b"", 3, "is not UTF-8 text"),
        (["stop", "\udcff"], b"", 3, "is not UTF-8 text"),
    ],
)
def test_errors_are_one_line_and_a_status(
    scripted: Callable[..., ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    piped: bytes,
    status: int,
    complaint: str,
) -> None:
    scripted()
    pipe_in(monkeypatch, piped)
    assert run_command_line(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("localgen: ")
    assert err.count("\n") == 1
    assert complaint in err


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (KeyboardInterrupt(), 130),
        (EngineDied("gone"), 10),
        (ModelNotFound("two\nlines \x1b[31m"), 6),
        (BrokenPipeError(), 141),
        (ZeroDivisionError("odd"), 70),
    ],
)
def test_ends_in_mid_answer(
    scripted: Callable[..., ScriptedClient],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    end: BaseException,
    status: int,
) -> None:
    scripted(("half", end))
    # a broken pipe replaces the descriptor, which pytest still needs
    monkeypatch.setattr(os, "dup2", lambda *_: 0)
    assert run_command_line(["run", "tiny", "x"]) == status
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "\x1b" not in err
    assert err.count("\n") == (status not in (130, 141))


def test_a_defect_is_written_to_a_log(
    scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scripted((ZeroDivisionError("odd"),))
    run_command_line(["run", "tiny", "x"])
    log = tmp_path / "state" / "crash.log"
    assert str(log) in capsys.readouterr().err
    assert "ZeroDivisionError: odd" in log.read_text()


def test_leaving_early_cancels(scripted: Callable[..., ScriptedClient]) -> None:
    client = scripted(("a", "b", "c", answer()))

    def broken(_text: str) -> None:
        raise BrokenPipeError

    from localgen.repl.plain_answer import write_plain_answer

    with pytest.raises(BrokenPipeError):
        write_plain_answer(
            client.chat("tiny", [Message("user", "x")], answer_params()), broken, broken
        )
    assert client.record.closed_early == 1


def answer_params() -> Any:
    from localgen.backends.sampling_params import SamplingParams

    return SamplingParams()


def test_ps(scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]) -> None:
    scripted()
    assert run_command_line(["ps"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "ID", "SIZE", "MEMORY", "PROCESSOR", "CONTEXT", "UNTIL"]
    cells = ["tiny", "a1b2", "12.0 MB", "130 MB", "100% CPU", "2,048", "5 minutes from now"]
    assert re.split(r" {3,}", row) == cells
    assert run_command_line(["ps", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)
    assert (model["name"], model["memory_bytes"]) == ("tiny", 130_000_000)


@pytest.mark.parametrize("name", ["list", "ls"])
def test_list(
    name: str, scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(running=False)
    assert run_command_line([name]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "NAME", "tiny", "other",
    ]  # fmt: skip


def test_stop(scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]) -> None:
    client = scripted()
    assert run_command_line(["stop", "tiny"]) == 0
    assert (client.record.unloaded, client.record.shutdowns) == (["tiny"], 0)
    assert run_command_line(["stop"]) == 0
    assert client.record.shutdowns == 1
    assert capsys.readouterr().out == "tiny unloaded\nserver stopped\n"


def test_stop_starts_nothing(
    scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    client = scripted(running=False)
    assert run_command_line(["stop"]) == 0
    assert capsys.readouterr().out == "no server is running\n"
    assert run_command_line(["stop", "tiny"]) == errors.exit_status("server_unavailable")
    assert "tiny is not loaded: no server is running" in capsys.readouterr().err
    assert client.record.connects == 0


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["--version"]) == 0
    assert capsys.readouterr().out == f"localgen {localgen.__version__}\n"
    assert run_command_line([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in commands.COMMANDS)
    assert "141" in text


@pytest.mark.parametrize("name", [*commands.COMMANDS, "ls"])
def test_help_of_each_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Usage: localgen")
    assert err == ""


def test_every_kind_of_error_has_a_status_of_its_own() -> None:
    for module in (
        "localgen.config",
        "localgen.client.errors",
        "localgen.hub.resolve",
        "localgen.chat.database",
    ):
        importlib.import_module(module)
    codes = {kind.code for kind in LocalgenError.__subclasses__()}
    assert codes == set(errors.EXIT_STATUS_BY_CODE)
    statuses = [
        *errors.EXIT_STATUS_BY_CODE.values(),
        0,
        errors.OTHER_ERROR,
        errors.USAGE_ERROR,
        70,
        130,
        141,
    ]
    assert len(set(statuses)) == len(statuses)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], ["rnu"]])
def test_no_heavy_import_before_it_is_needed(arguments: list[str]) -> None:
    program = (
        "import sys; from localgen.cli.main import run_command_line\n"
        "run_command_line(sys.argv[1:])\n"
        "print('LOADED', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = {name.split(".")[0] for name in done.stdout.rpartition("LOADED")[2].split()}
    assert loaded.isdisjoint(
        {"torch", "textual", "llama_cpp", "fastapi", "httpx", "prompt_toolkit", "rich", "numpy"}
    )


def test_a_reader_that_goes_away_is_no_error() -> None:
    program = "from localgen.cli.main import main; import sys; sys.argv[1:] = ['--help']; main()"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (errors.BROKEN_PIPE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full")
@pytest.mark.parametrize(
    ("redirection", "status", "complaint"),
    [
        (">/dev/full", errors.exit_status("disk_full"), "standard output: No space left"),
        (">&-", errors.OTHER_ERROR, "standard output is closed"),
        (">&- 2>&-", errors.OTHER_ERROR, ""),
    ],
)
def test_output_that_cannot_be_written(redirection: str, status: int, complaint: str) -> None:
    command = f'"{sys.executable}" -m localgen --help {redirection}'
    done = subprocess.run(
        command, shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert done.returncode == status
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == bool(complaint)


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str, target: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/state/models.toml")

    monkeypatch.setattr("localgen.hub.aliases.add_alias", fail)
    assert run_command_line(["cp", "tiny", "mine"]) == errors.OTHER_ERROR
    assert capsys.readouterr().err == "localgen: /state/models.toml: Permission denied\n"


def test_ctrl_c_during_the_import_is_silent() -> None:
    program = """
import importlib.abc, os, signal, sys, time
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "localgen.cli.main":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
sys.meta_path.insert(0, Interrupting())
from localgen.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["help"], "Usage: localgen [OPTIONS]"),
        (["-h"], "Usage: localgen [OPTIONS]"),
        (["help", "run"], "Usage: localgen run"),
        (["run", "-h"], "Usage: localgen run"),
        (["version"], "localgen "),
    ],
)
def test_spellings_of_other_tools(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(arguments) == 0
    assert line in capsys.readouterr().out


def test_ways_to_give_a_prompt(
    scripted: Callable[..., ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    client = scripted()
    monkeypatch.setattr(sys, "stdin", Terminal(b""))
    path = tmp_path / "prompt.txt"
    path.write_text("from a file\n")
    for arguments in (
        ["run", "tiny", "two", "words"],
        ["run", "-m", "tiny", "two", "words"],
        ["run", "-p", "two words"],
        ["run", "tiny", "-p", "two words"],
        ["run", "-f", str(path)],
    ):
        assert run_command_line(arguments) == 0
    asked = [(request.model, request.messages[-1].content) for request in client.record.asked]
    assert asked == [*[("tiny", "two words")] * 4, ("tiny", "from a file")]
