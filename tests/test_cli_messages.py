"""Errors name an option by its flag or variable, and misspelt variables are noticed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from localgen.backends.errors import InvalidRequest, LocalgenError, ModelNotFound
from localgen.cli import messages
from localgen.cli.main import run_command_line

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALGEN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("LOCALGEN_RUNTIME_DIR", str(tmp_path / "run"))


def test_every_variable_of_the_program_is_known() -> None:
    code = "".join(path.read_text() for path in (ROOT / "localgen").rglob("*.py"))
    named = set(re.findall(r'"LOCALGEN_([A-Z_]+)"', code))
    assert named > {"MODEL", "STATE_DIR"}
    assert named - messages.known_variables() == set()


@pytest.mark.parametrize(
    ("variable", "lines"),
    [
        ("LOCALGEN_TEMPP", ["LOCALGEN_TEMPP is not known, did you mean LOCALGEN_TEMP?"]),
        ("LOCALGEN_STATEDIR", ["LOCALGEN_STATEDIR is not known, did you mean LOCALGEN_STATE_DIR?"]),
        ("LOCALGEN_HF_TOKEN", []),
        ("LOCALGEN_MY_SCRIPT", []),
        ("LOCALGENTEMPP", []),
    ],
)
def test_misspelt_variables_get_a_suggestion(variable: str, lines: list[str]) -> None:
    assert messages.misspelt_variables({variable: "1", "LOCALGEN_TEMP": "1"}) == lines


def test_a_misspelt_variable_does_not_end_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALGEN_TEMPP", "1")
    assert run_command_line(["ps"]) == 0
    assert capsys.readouterr().err.count("LOCALGEN_TEMPP") == 1


@pytest.mark.parametrize(
    ("variable", "value", "arguments", "complaint"),
    [
        ("CTX", "abc", [], "LOCALGEN_CTX: 'abc' is not a whole number (see localgen run --help)"),
        ("TEMP", "warm", [], "LOCALGEN_TEMP: 'warm' is not a number (see localgen run --help)"),
        ("MMAP", "perhaps", [], "LOCALGEN_MMAP: 'perhaps' is not true or false"),
        ("KEEP_ALIVE", "soon", [], "LOCALGEN_KEEP_ALIVE=soon: give a time such as 30s"),
        ("SYSTEM", "@none", [], "LOCALGEN_SYSTEM file none: No such file or directory"),
        ("URL", "://", [], "LOCALGEN_URL=://: '://' is not the URL of a server"),
        ("CTX", "-5", ["-ctk", "f16"], "LOCALGEN_CTX must be at least 1"),
        ("THREADS", "0", ["--temp", "warm"], "--temp: 'warm' is not a number"),
        ("CTX", "1", ["--ctx", "abc"], "--ctx: 'abc' is not a whole number"),
    ],
)
def test_bad_value_is_named_by_its_flag_or_variable(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.setenv(f"LOCALGEN_{variable}", value)
    status = run_command_line(["run", "tiny", "hi", *arguments])
    assert status == 12 if variable == "KEEP_ALIVE" else status
    assert capsys.readouterr().err.startswith(f"localgen: {complaint}")


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (InvalidRequest("threads is 0", param="threads"), ["-t", "0"], "--threads is 0"),
        (InvalidRequest("temperature is 9", param="temperature"), [], "--temp is 9"),
        (InvalidRequest("no top_k here", param="top_k"), [], "no top_k here"),
        (
            InvalidRequest("stop[0] must not be empty", param="stop[0]"),
            ["--stop", ""],
            "--stop must not be empty",
        ),
        (
            ModelNotFound("model 'nope' not found"),
            ["run", "hi"],
            "LOCALGEN_MODEL=nope: model 'nope' not found",
        ),
        (ModelNotFound("model 'nope' not found"), ["run", "nope"], "model 'nope' not found"),
        (ModelNotFound("model 'other' not found"), ["run"], "model 'other' not found"),
    ],
)
def test_server_errors_name_the_users_flag_or_variable(
    monkeypatch: pytest.MonkeyPatch, error: LocalgenError, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("LOCALGEN_MODEL", "nope")
    assert messages.error_message(error, arguments) == message
