"""`run`, and `chat` with piped input: prompts, answers, output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import Terminal, own_folders, pipe_in, scripted
from scripted_client import ScriptedClient, answer

from localgen.backends.errors import InvalidRequest
from localgen.backends.types import Message
from localgen.cli.arguments import split_model_and_prompt
from localgen.cli.main import run_command_line
from localgen.client import TextDelta

__all__ = ["own_folders", "scripted"]


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


def test_reasoning_is_in_json_and_not_in_piped_output(
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
def test_prompt_from_arguments_and_standard_input(
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


def test_arguments_are_split_into_model_and_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    ("arguments", "piped", "model", "texts"),
    [
        (["tiny", "a", "b c"], b"", "tiny", ("a", "b c")),
        (["tiny"], b"one\ntwo\n", "tiny", ("one", "two")),
        (["-m", "tiny", "a"], b"", "tiny", ("a",)),
        (["-m", "tiny", "a", "b c"], b"", "tiny", ("a", "b c")),
        (["-m", "tiny"], b"one", "tiny", ("one",)),
        (["two words"], b"", "other", ("two words",)),
        ([], b"one", "other", ("one",)),
    ],
)
def test_model_and_texts_of_embed(
    scripted: Callable[..., ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    piped: bytes,
    model: str,
    texts: tuple[str, ...],
) -> None:
    monkeypatch.setenv("LOCALGEN_MODEL", "other")
    client = scripted()
    pipe_in(monkeypatch, piped)
    assert run_command_line(["embed", *arguments]) == 0
    assert client.record.embedded == [(model, texts)]


def test_prompt_options_are_equivalent(
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


def test_a_model_is_looked_up_before_the_prompt_is_asked_for(
    scripted: Callable[..., ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = scripted()
    monkeypatch.setattr(sys, "stdin", Terminal(b"a prompt"))
    assert run_command_line(["run", "hello"]) == 6
    err = capsys.readouterr().err
    assert err.startswith("localgen: Model 'hello' not found")
    assert err.endswith("; `localgen run -p hello` asks the default model\n")
    assert run_command_line(["run", "tiny"]) == 0
    assert capsys.readouterr().err == "enter the prompt, then press Ctrl+D:\n"
    assert [asked.messages[-1].content for asked in client.record.asked] == ["a prompt"]


def test_broken_pipe_cancels_the_request(scripted: Callable[..., ScriptedClient]) -> None:
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


def test_a_file_taken_for_a_prompt_is_shown_as_one(
    scripted: Callable[..., ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    scripted()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", Terminal(b""))
    Path("note.txt").write_text("a prompt")
    assert run_command_line(["run", "note.txt"]) == 6
    err = capsys.readouterr().err
    assert err.endswith("; `localgen run -f note.txt` asks the default model what the file says\n")
    assert run_command_line(["run", "n" * 5000]) == 6
    assert f"; `localgen run -p {'n' * 5000}` asks the default" in capsys.readouterr().err
