"""Errors and interruptions of commands: one line, an exit status, never a traceback."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import own_folders, pipe_in, scripted
from scripted_client import ScriptedClient

from localgen.backends.errors import EngineDied, LocalgenError, ModelNotFound
from localgen.cli import errors
from localgen.cli.main import run_command_line

__all__ = ["own_folders", "scripted"]
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "piped", "status", "complaint"),
    [
        (["run"], b"", 3, "no prompt"),
        (["run", ""], b"", 3, "no prompt: give it as an argument or on standard input\n"),
        (["run", "tiny"], b" \n", 3, "no prompt: give it as an argument or on standard input\n"),
        (
            ["run", "--url", "http://gpu:1/v1", "--api-key-env", "KEY", "hi"],
            b"",
            3,
            "; `localgen run --url http://gpu:1/v1 --api-key-env KEY -p hi` asks the default",
        ),
        (
            ["run", "hello"],
            b"",
            3,
            "no prompt, and 'hello' is no model; `localgen run -p hello` asks the default model\n",
        ),
        (["run"], b"\xff\xfe", 3, "not UTF-8"),
        (["run", "hello"], b"\xff\xfe", 3, "standard input is not UTF-8 text at byte 0\n"),
        (["run", "gone", "x"], b"", 6, "Model 'gone' not found"),
        (["run", "What", "is", "it"], b"", 6, "`localgen run -p 'What is it'` asks the default"),
        (["run", "tiny", "-p", "x", "-f", "y"], b"", 3, "exclude each other"),
        (["run", "tiny", "-f", "/no/file"], b"", 3, "--file /no/file: No such file"),
        (["run", "tiny", "x", "--temp", "warm"], b"", 2, "--temp"),
        (["run", "tiny", "x", "--nope"], b"", 2, "localgen run --help"),
        (
            ["embed", "What", "is it"],
            b"",
            6,
            "; `localgen embed -m smollm2 What 'is it'` asks the default model\n",
        ),
        (
            ["embed", "hello"],
            b"",
            3,
            "no text, and 'hello' is no model; `localgen embed -m smollm2 hello` asks the default",
        ),
        (["embed", "tiny"], b"", 3, "no text for the model tiny: give one as an argument"),
        (["embed"], b"", 3, "no text: give one as an argument or on standard input"),
        (["rnu"], b"", 2, "Did you mean 'run'"),
        (["verison"], b"", 2, "No such command 'verison'. Did you mean 'version'?"),
        (["quit"], b"", 2, "'quit': Ctrl+D leaves a chat, `localgen stop` stops the server (see"),
        (["download", "tiny"], b"", 2, "No such command 'download'. Did you mean 'pull'? (see"),
        (["create"], b"", 2, "'create': `localgen preset add NAME MODEL` gives a model a name"),
        (
            ["run", "tiny", "--image", "a.png"],
            b"",
            2,
            "No such option: --image; localgen reads text only, no images (see",
        ),
        (["run", "--tmep", "1"], b"", 2, "(Possible options: --temp, --tp)"),
        (["chat", "two words"], b"", 3, "localgen run"),
        (["stop", "other"], b"", 6, "other is not loaded; loaded models: tiny"),
        (["serve", "--keep-alive", "soon"], b"", 2, "--keep-alive=soon"),
        (["serve", "--record-trace", "/no/file"], b"", 3, "--record-trace /no/file: No such"),
        (["run", "tiny", "x", "--keep-alive", "soon"], b"", 2, "--keep-alive=soon"),
        (["run", "tiny", "x", "--temp", "nan"], b"", 3, "--temp nan"),
        (["run", "-p", "hi", "--format", "yaml"], b"", 3, "--format yaml is not JSON (line 1, "),
        (["run", "-p", "x", "--format", "y"], b"", 3, "give json, a JSON schema or @FILE"),
        (["run", "-p", "x", "--json-schema=y"], b"", 3, "--json-schema y is not JSON"),
        (["run", "-p", "x", "-j", "y"], b"", 3, "--json-schema y is not JSON"),
        (["run", "-p", "x", "--format", "@/no/file"], b"", 3, "--format file /no/file: No such"),
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
    monkeypatch.setattr("localgen.hub.packaged.default_model", lambda: "smollm2")
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
def test_exit_status_when_an_answer_is_interrupted(
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


def test_internal_error_is_written_to_the_crash_log(
    scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scripted((ZeroDivisionError("odd"),))
    run_command_line(["run", "tiny", "x"])
    log = tmp_path / "state" / "crash.log"
    assert str(log) in capsys.readouterr().err
    assert "ZeroDivisionError: odd" in log.read_text()


def test_only_the_user_can_read_the_crash_log(tmp_path: Path) -> None:
    """Also one that an older version has created; it keeps what it has."""
    (tmp_path / "state").mkdir(mode=0o700)
    log = tmp_path / "state" / "crash.log"
    log.write_text("before\n")
    log.chmod(0o644)
    assert errors.log_crash(ValueError("\udce9")) == log
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.read_text().startswith("before\n")
    log.unlink()
    errors.log_crash(ValueError("odd\x1b[2J\rline"))
    assert log.read_text().endswith("ValueError: odd\\x1b[2J\\rline\n\n")
    assert log.stat().st_mode & 0o777 == 0o600


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


def test_closed_pipe_is_not_an_error() -> None:
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
        ("1</dev/null", errors.OTHER_ERROR, "standard output: Bad file descriptor"),
        (">&- 2>&-", errors.OTHER_ERROR, ""),
    ],
)
def test_unwritable_output_is_reported(redirection: str, status: int, complaint: str) -> None:
    command = f'"{sys.executable}" -m localgen --help {redirection}'
    done = subprocess.run(
        command, shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert done.returncode == status
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == bool(complaint)


def test_unwritable_file_is_one_line(
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
