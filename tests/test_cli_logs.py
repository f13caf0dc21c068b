"""`localgen logs`: the last lines, new lines, and the path of the log."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import settings_in

from localgen.cli import logs
from localgen.cli.logs import new_text
from localgen.cli.main import run_command_line
from localgen.config import ServerSettings
from localgen.machine.python_process import python_environment


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerSettings:
    made = settings_in(tmp_path)
    made.create_dirs()
    for name, value in made.to_environment().items():
        monkeypatch.setenv(name, value)
    return made


def test_last_lines_span_both_files(
    settings: ServerSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.log_path.with_name("server.log.1").write_text("one\ntwo\n")
    settings.log_path.write_bytes(b"three \xff\n")
    assert run_command_line(["logs"]) == 0
    out, err = capsys.readouterr()
    assert out == "one\ntwo\nthree \ufffd\n"
    assert err == f"log: {settings.log_path}.1 and {settings.log_path}\n"
    assert run_command_line(["logs", "-n", "2"]) == 0
    assert capsys.readouterr().out == "two\nthree \ufffd\n"


def test_the_log_of_an_earlier_server_is_named(
    settings: ServerSettings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.log_path.write_text("server 12 listens on x\nserver 34 listens on x\n")
    for running, said in ((None, False), (34, False), (56, True)):
        monkeypatch.setattr(logs, "read_server_pid", lambda _, pid=running: pid)
        assert run_command_line(["logs"]) == 0
        err = capsys.readouterr().err
        assert ("(pid 56) logs to its own terminal: this is the log of an earlier" in err) is said


def test_missing_log_is_reported(
    settings: ServerSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["logs"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert f"no log at {settings.log_path}" in err


@pytest.fixture
def following(settings: ServerSettings) -> Iterator[subprocess.Popen[str]]:
    settings.log_path.write_text("old\nlast\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "localgen.cli.main", "logs", "-f", "-n", "1"],
        env=python_environment() | settings.to_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_no_text_is_lost_when_the_log_is_rotated(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("old\n")
    with path.open("rb") as log:
        log.seek(0, os.SEEK_END)
        texts = new_text(path, log, codecs.getincrementaldecoder("utf-8")("replace"))
        with path.open("ab") as server:
            server.write("é".encode()[:1])
        assert next(texts) == ""
        with path.open("ab") as server:
            server.write("é".encode()[1:] + b" unread\n")
        path.rename(tmp_path / "server.log.1")
        path.write_text("a file longer than the old one\n")
        assert [next(texts), next(texts)] == ["é unread\n", "a file longer than the old one\n"]
        path.write_text("emptied\n")
        assert next(texts) == "emptied\n"
        texts.close()


def test_follow_prints_new_lines_until_ctrl_c(
    settings: ServerSettings, following: subprocess.Popen[str]
) -> None:
    assert following.stdout is not None
    assert following.stderr is not None
    assert following.stdout.readline() == "last\n"
    with settings.log_path.open("a") as log:
        log.write("new\n")
    assert following.stdout.readline() == "new\n"
    settings.log_path.rename(settings.log_path.with_name("server.log.1"))
    settings.log_path.write_text("next\n")
    assert following.stdout.readline() == "next\n"
    following.send_signal(signal.SIGINT)
    assert following.wait(20) == 130
    assert following.stderr.read() == f"log: {settings.log_path}\n"
