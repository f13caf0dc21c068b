"""The log shows control characters from outside escaped, so that nothing can forge a line."""

from __future__ import annotations

import importlib
import json
import logging
import pkgutil
import re
import subprocess
import sys
from typing import Any

import pytest
from serving import server_harness, settings_in, short_folder

import localgen.server
from localgen.machine.python_process import python_environment
from localgen.server.stats.request_log import LogFormat, create_log_formatter

FORGED = "2026-01-01 00:00:00,000 INFO forged"
HOSTILE = (
    f"a\x1b[31mb\x1b]0;title\x07c\r\n{FORGED}\x00\x08\x7f\x85\x9b2J\u202ed\u2066e\u200bf\u2028g"
    f"\x0b\x0c\ti\ud800h\U000e0041\n{FORGED}"
)
RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ ")


def loggers() -> list[logging.Logger]:
    """Every logger that the server's modules and libraries have."""
    for module in pkgutil.walk_packages(localgen.server.__path__, "localgen.server."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    names = {*logging.root.manager.loggerDict, "py.warnings", "uvicorn.error", "asyncio"}
    assert {"localgen.server", "localgen.engine", "localgen.requests"} <= names
    return [logging.getLogger(name) for name in sorted(names)]


def failure(depth: int = 0) -> Any:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        try:
            raise KeyError(HOSTILE) from error
        except KeyError:
            return sys.exc_info()


RECORDS: dict[str, dict[str, Any]] = {
    "argument": {"msg": "cannot load %s", "args": (HOSTILE,)},
    "message": {"msg": HOSTILE, "args": ()},
    "object": {"msg": "%s", "args": (ValueError(HOSTILE),)},
    "field": {"msg": "request", "args": (), "extra": {"fields": {"model": HOSTILE, "id": "x"}}},
    "error": {"msg": "it failed", "args": (), "exc_info": failure()},
    "stack": {"msg": "it failed", "args": (), "sinfo": f"Stack:\n{HOSTILE}"},
}


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_records_of_every_logger(kind: str, log_format: LogFormat) -> None:
    formatter = create_log_formatter(log_format)
    for logger in loggers():
        fields = {"exc_info": None} | RECORDS[kind]
        record = logger.makeRecord(logger.name, logging.ERROR, "file", 1, **fields)
        text = formatter.format(record)
        assert text.encode()
        first, *others = text.split("\n")
        if log_format == "json":
            assert json.loads(first)["logger"] == logger.name
            assert not others
        assert all(line.isprintable() for line in (first, *others)), text
        assert RECORD.match(first) or log_format == "json"
        assert not [line for line in others if not line.startswith("  ")]
        assert (kind in ("error", "stack") and log_format == "text") or not others


def test_a_traceback_keeps_its_lines() -> None:
    record = logging.makeLogRecord({"msg": "it failed", "exc_info": failure()})
    lines = create_log_formatter().format(record).split("\n")
    assert "  Traceback (most recent call last):" in lines
    assert any(line.startswith("  ValueError: a\\x1b[31mb") for line in lines)


def test_plain_text_is_unchanged() -> None:
    text = "tiny: 中文 é 🙂 llama_model_loader"
    record = logging.makeLogRecord({"msg": text, "levelname": "INFO"})
    assert create_log_formatter().format(record).endswith(f"INFO {text}")


def test_server_log_of_hostile_names_and_output() -> None:
    """File names, model names, request fields and the output of an engine."""
    spoiled = "evil\x1b[31m\n" + FORGED + "\u202e"
    with server_harness() as served:
        served.start()
        says = served.model("says", say=[HOSTILE, f"x\n{FORGED}"])
        assert served.chat(says, "hello", user=spoiled).status_code == 200
        assert served.chat(served.model(spoiled), "hello").status_code == 200
        served.chat(served.model(f"{spoiled}2", fail=HOSTILE.replace("\ud800", "")), "hello")
        served.chat(served.model(f"{spoiled}3"), "hello !die")
        served.chat(HOSTILE.replace("\ud800", ""), "hello")
        served.http.get("/nothing", params={"a": spoiled}, headers={"X-Localgen-Session": "a\x1b"})
        served.http.post("/v1/models/load", json={"model": spoiled})
        content = served.settings.log_path.read_bytes()
    assert b"evil\\x1b[31m\\n2026-01-01" in content
    assert b"a\\x1b[31mb" in content
    assert b"\\u001b" not in content
    lines = content.decode().removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in lines), content
    assert [line for line in lines if not RECORD.match(line) and not line.startswith("  ")] == []
    # the engine's lines are records, each with its name in front
    forged = [line for line in lines if FORGED in line]
    assert forged
    assert not [line for line in forged if line.startswith(FORGED)]


UNCAUGHT = f"""
import sys, threading, warnings
from localgen.server import lifecycle
HOSTILE = {HOSTILE!r}
def fail(*_: object, **__: object) -> None:
    warnings.warn(HOSTILE)
    thread = threading.Thread(target=lambda: [][HOSTILE])
    thread.start()
    thread.join()
    raise {{error}}
lifecycle.run_server = fail
sys.exit(lifecycle.main())
"""


@pytest.mark.parametrize(
    ("error", "last"),
    [
        ("ValueError(HOSTILE)", "  ValueError: a\\x1b[31mb"),
        ("OSError(28, 'No space left', '/run/a\\nb\\x1b')", r"error: /run/a\nb\x1b: No space left"),
    ],
)
def test_uncaught_errors_of_the_server_are_logged_like_others(error: str, last: str) -> None:
    with short_folder() as folder:
        settings = settings_in(folder)
        settings.create_dirs()
        with settings.log_path.open("ab") as log:  # as a client starts the server
            done = subprocess.run(
                [sys.executable, "-c", UNCAUGHT.replace("{error}", error)],
                env=python_environment() | settings.to_environment(),
                stdout=log,
                stderr=log,
                timeout=60,
                check=False,
            )
        lines = settings.log_path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    assert done.returncode == 1
    assert all(line.isprintable() for line in lines), lines
    marked = (line for line in lines if not line.startswith(("  ", "error: ")))
    assert not [line for line in marked if not RECORD.match(line)]
    assert any(line.startswith(last) for line in lines)
    assert any("WARNING" in line and "a\\x1b[31mb" in line for line in lines)
    assert any(line.startswith("  TypeError: list indices") for line in lines)
