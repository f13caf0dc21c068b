"""No control character of a name, file or server reaches the terminal: commands on a pty."""

from __future__ import annotations

import json
import os
import pty
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import pytest
from gguf_files import STRING, rewrite
from hf_folders import TINY, edit
from plain_openai import PlainServer, answer, error, plain_server
from serving import ServerHarness, server_harness

from localgen.backends.terminal_text import one_line
from localgen.chat.conversation import Conversation, Turn
from localgen.chat.session_store import SessionRecord
from localgen.chat.stored_sessions import open_store

ROOT = Path(__file__).parents[1]
# what a terminal would obey, and what would disguise a name
HOSTILE = "e\x1b[5;41mv\x1b]0;title\x07\x9b2J\x08\x7f\r\u202ei\u2066l\u200b\ufeff\u200dx\n\tforged"
# cursor, colours, and modes that the program itself sets
OWN = re.compile(r"\x1b\[(\?\d+[hl]|\d*[A-HJKG]|[0-9;]*m)")
STYLED = {"doctor", "run"}


# runs the command lines of a pipe, one after the other: starting a process takes most of the time
PROGRAM = """
import json, os, sys
from localgen.cli.main import main

for line in os.fdopen(int(sys.argv[1])):
    sys.argv[1:] = json.loads(line)
    try:
        main()
    except SystemExit as ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(1, b"\\0%d\\0" % (ended.code or 0))
"""


class Terminal:
    """Runs commands in a process whose output is a terminal."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._leader, follower = pty.openpty()
        lines, writer = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(lines)],
            pass_fds=[lines],
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=follower,
            stderr=follower,
        )
        os.close(follower)
        os.close(lines)
        self._commands = os.fdopen(writer, "w")

    def run(self, *arguments: str) -> str:
        """Return what a command shows. Fails the test if it ends in an internal error."""
        print(json.dumps(arguments), file=self._commands, flush=True)
        shown = b""
        while not (ended := re.search(rb"\0(\d+)\0$", shown)):
            block = _read(self._leader)
            assert block, shown
            shown += block
        assert int(ended[1]) != 70, shown
        return shown[: ended.start()].decode()

    def close(self) -> None:
        self._commands.close()
        assert self._process.wait(60) == 0
        os.close(self._leader)


@dataclass
class Scene:
    """A server, models, a cache and a remote server with hostile names, and a terminal."""

    served: ServerHarness
    remote: PlainServer
    terminal: Terminal


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 1 << 16)
    except OSError:  # the other end is closed
        return b""


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with server_harness() as served, plain_server(HOSTILE) as remote:
        folder, text = served.folder, (HOSTILE, STRING)
        changes = {f"general.{key}": text for key in ("name", "license", "sampling.a")}
        rewrite(folder / "spoiled.gguf", changes | {"tokenizer.chat_template": text})
        _write_header(folder / "odd.gguf", HOSTILE)
        edit(_copy(folder / "hf") / "config.json", dtype=HOSTILE, architectures=[HOSTILE])
        cache = folder / "hub" / f"models--owner--{HOSTILE}" / "snapshots" / ("a" * 40)
        cache.mkdir(parents=True)
        (cache / "model-Q4_K_M.gguf").write_bytes((folder / "spoiled.gguf").read_bytes())
        with (served.settings.state_dir / "models.toml").open("w") as names:
            names.write(f'"{_toml(HOSTILE)}" = "{_toml("owner/" + HOSTILE)}"\n')
        with (served.settings.state_dir / "endpoints.toml").open("w") as names:
            names.write(f'"{_toml(HOSTILE)}" = {{ url = "http://x/v1", model = "y" }}\n')
        stored = served.settings.kv_dir / ("0" * 32)
        stored.mkdir(mode=0o700, parents=True)
        facts = ("model", "path", "build", "cache_type_k")
        (stored / "model.json").write_text(json.dumps(dict.fromkeys(facts, HOSTILE)))
        (stored / f"{'1' * 32}-{'2' * 32}.kv").touch()
        remote.events = answer(HOSTILE)
        env = os.environ | served.settings.to_environment()
        env |= {"TERM": "xterm", "COLUMNS": "2000", "HF_HUB_OFFLINE": "1"}
        env |= {"HF_HUB_CACHE": str(folder / "hub")}
        env |= {"LOCALGEN_CONFIG_DIR": str(served.settings.state_dir), "PYTHONPATH": str(ROOT)}
        served.start()
        model = served.model(HOSTILE, fail="")
        Path(model).write_text("{}")
        assert served.chat(model, "hello").status_code == 200
        terminal = Terminal(folder, env)
        yield Scene(served, remote, terminal)
        terminal.close()


def _copy(folder: Path) -> Path:
    folder.mkdir()
    for path in TINY.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def _toml(text: str) -> str:
    return "".join(f"\\u{ord(char):04x}" for char in text)


def _write_header(path: Path, text: str) -> None:
    """A GGUF file whose key has control characters."""
    key, raw = text.encode(), b"llama"
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path.write_bytes(content + struct.pack("<IQ", gguf.GGUFValueType.STRING, len(raw)) + raw)


COMMANDS = [
    ("list",),
    ("list", "--json"),
    ("ps",),
    ("ps", "--json"),
    ("search", HOSTILE),
    ("show", "spoiled.gguf"),
    ("show", "spoiled.gguf", "--json"),
    ("show", "spoiled.gguf", "--template"),
    ("show", "odd.gguf"),
    ("show", "./hf"),
    ("show", HOSTILE),
    ("show", f"owner/{HOSTILE}"),
    ("plan", "spoiled.gguf"),
    ("plan", f"owner/{HOSTILE}"),
    ("plan", HOSTILE),
    ("doctor",),
    ("endpoint", "list"),
    ("kv", "list"),
    ("kv", "list", "--json"),
    ("kv", "rm", f"nothing{HOSTILE}"),
    ("kv", "verify"),
    ("kv", "rm", "-y", HOSTILE),
    ("endpoint", "rm", f"x{HOSTILE}"),
    ("cp", "tiny", HOSTILE),
    ("cp", HOSTILE, "other"),
    ("rm", f"nothing{HOSTILE}"),
    ("rm", "-y", f"owner/{HOSTILE}"),
    ("stop", f"nothing{HOSTILE}"),
    ("run", f"./{HOSTILE}.gguf", "hello"),
    ("run", HOSTILE, "hello"),
    ("run", "tiny", "hello", "--backend", HOSTILE),
    ("pull", f"owner/{HOSTILE}"),
    ("history", "search", HOSTILE),
    (HOSTILE,),
]


def inert(shown: str, *, styled: bool, prose: bool = False) -> str:
    """The text of a terminal's output; fails if it holds a control character that is not ours.

    All others are written as Python does. prose: an answer or a template, which keeps newlines,
    tabs, joiners and marks.
    """
    assert "\x1b[5;41m" not in shown
    # a progress line begins with \r
    text = OWN.sub("", shown).replace("\r", "") if styled else shown.replace("\r\n", "\n")
    text = re.sub("[\u200b\ufeff\u200d\t]", "", text) if prose else text
    bad = [char for char in text if not char.isprintable() and char != "\n"]
    assert not bad, (bad, text)
    assert prose or not re.search(r"(?<!\\n\\t)forged", text), text
    return text


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: one_line(words[0]))
def test_commands(scene: Scene, arguments: tuple[str, ...]) -> None:
    shown = scene.terminal.run(*arguments)
    inert(shown, styled=arguments[0] in STYLED, prose="--template" in arguments)


def test_names_are_shown(scene: Scene) -> None:
    """The walk would pass if nothing was printed."""
    for arguments in (("ps",), ("list",), ("show", "spoiled.gguf"), ("stop", HOSTILE)):
        shown = scene.terminal.run(*arguments)
        assert r"e\x1b[5;41mv\x1b]0;title\x07\x9b2J\x08\x7f\r\u202ei" in shown
        assert r"x\n\tforged" in shown


def test_a_backslash_in_a_name_is_no_escape(scene: Scene) -> None:
    """`\\x1b` as four characters differs from ESC."""
    for name in ("twin\x1b", r"twin\x1b"):
        model = scene.served.model(name)
        assert scene.served.chat(model, "hello").status_code == 200
    shown = scene.terminal.run("ps")
    assert r"twin\x1b" in shown
    assert r"twin\\x1b" in shown
    with open_store(scene.served.settings.state_dir) as store:
        for name in ("chat\x1b", r"chat\x1b"):
            record = SessionRecord(0, name, model=name)
            store.create(replace(record, conversation=Conversation(turns=(Turn("q", "a"),))))
    shown = scene.terminal.run("history")
    assert shown.count(r"chat\x1b") == 2
    assert shown.count(r"chat\\x1b") == 2


@pytest.mark.parametrize("status", [200, 400, 401, 404, 429, 500])
def test_answers_and_errors_of_a_server(scene: Scene, status: int) -> None:
    scene.remote.first = [] if status == 200 else [error(status, HOSTILE, code=HOSTILE)] * 9
    shown = scene.terminal.run("run", "--url", scene.remote.url, HOSTILE, "hello")
    assert r"\x1b[5;41mv" in inert(shown, styled=True, prose=status == 200)
    assert ("\n\tforged" if status == 200 else r"\n\tforged") in shown.replace("\r\n", "\n")


def test_invisible_characters_of_names() -> None:
    for char in "\u00ad\u061c\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\U000e0041\u2028":
        assert one_line(f"ti{char}ny").isprintable(), hex(ord(char))
    # joiners of emoji and of scripts that need them
    for text in ("👩\u200d👩\u200d👧", "می\u200cخواهم", "क्\u200dष"):
        assert one_line(text) == text
