"""The line editor of a chat: keys, completion, and the history of prompts."""

from __future__ import annotations

import errno
import io
import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.data_structures import Size
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_input, create_pipe_input
from prompt_toolkit.output import DummyOutput
from prompt_toolkit.output.vt100 import Vt100_Output
from rich.console import Console
from scripted_client import ScriptedClient

from localgen.chat.parameters import ModelOptions
from localgen.chat.session import ChatSession
from localgen.client import ModelCard
from localgen.locked_file import LockedFile
from localgen.machine.python_process import python_environment
from localgen.repl.line_reader import create_line_reader
from localgen.repl.prompt import ChatCompleter, create_prompt_session, has_open_quotes, strip_quotes
from localgen.repl.typed_ahead import hide_typed_ahead


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        ("", False),
        ("hi", False),
        ('"""', True),
        ('"""one\ntwo', True),
        ('"""one"""', False),
        ('"""one\ntwo"""  ', False),
        ('""""', True),
        ('say """', False),
        ('/set system """be', True),
        ('/set system """be"""', False),
    ],
)
def test_open_quotes_are_detected(text: str, waits: bool) -> None:
    assert has_open_quotes(text) is waits


def test_quotes_are_stripped() -> None:
    assert strip_quotes('"""\na\n b\n"""') == "a\n b"
    assert strip_quotes(' "quoted" ') == ' "quoted" '


def complete(text: str, where: str = "") -> list[str]:
    completions = ChatCompleter(lambda: ["talk", "tale"], lambda: ["tiny"])
    document = Document(text + where)
    return [found.text for found in completions.get_completions(document, CompleteEvent())]


def test_completion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert complete("/s") == ["/set", "/show", "/save", "/switch", "/stats"]
    assert complete("/set p") == ["parameter"]
    assert complete("/set parameter temp") == ["temperature"]
    assert complete("/set parameter temperature ") == []
    assert complete("/show t") == ["template"]
    assert complete("/load ta") == ["talk", "tale"]
    assert complete("/model t") == ["tiny"]
    assert complete("hello /s") == []


def test_completion_of_file_names(tmp_path: Path) -> None:
    (tmp_path / "chat.json").touch()
    assert complete(f"/load {tmp_path}/ch") == ["at.json"]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("hello\r", "hello"),
        ("gone\x03kept\r", "kept"),
        # Ctrl+C and Ctrl+G leave a history search
        ("ab\x12\x03cd\r", "abcd"),
        ("ab\x12\x07cd\r", "abcd"),
        ("\x12stor\x03kept\r", "kept"),
        ('"""a\rb"""\r', '"""a\nb"""'),
        ("\x1b[200~a\nb\x1b[201~\r", "a\nb"),
    ],
)
def test_keys_edit_the_line(keys: str, line: str, tmp_path: Path) -> None:
    with create_pipe_input() as typed:
        typed.send_text(keys)
        editor = create_prompt_session(
            tmp_path / "history", ChatCompleter(list, list), input=typed, output=DummyOutput()
        )
        assert editor.prompt() == line


def test_completion_of_settings() -> None:
    assert complete("/set f") == ["format", "figures"]
    assert complete("/set format ") == ["json", "text"]
    assert complete("/set verbose o") == ["on", "off"]
    assert complete("/set ctx d") == complete("/set system ") == ["default"]
    assert complete("/set parameter temp") == ["temperature"]
    assert complete("/set parameter temperature ") == complete("/show info ") == []


def test_completion_of_mentioned_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("main.py", "my notes.md"):
        (tmp_path / name).write_text("")
    assert complete("explain @") == ["@main.py", '@"my notes.md"']
    assert complete("as in @mpy") == ["@main.py"]
    assert complete("me@") == complete("/set system as in @mpy") == complete("see @m\n") == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [("no-such-editor -w", "command not found"), ("vim '", "No closing quotation")],
)
def test_failing_editor_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    problem: str,
) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", command)
    with create_pipe_input() as typed:
        typed.send_text("ab\x07cd\r")
        editor = create_prompt_session(
            tmp_path / "history", ChatCompleter(list, list), input=typed, output=DummyOutput()
        )
        assert editor.prompt() == "abcd"
    assert capsys.readouterr().out == f"EDITOR={command}: {problem}\n"


def test_the_second_editor_opens_if_the_first_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "editor"
    program.write_text('#!/bin/sh\nprintf edited > "$1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("VISUAL", "no-such-editor")
    monkeypatch.setenv("EDITOR", str(program))
    with create_pipe_input() as typed:
        typed.send_text("ab\x07")
        editor = create_prompt_session(
            tmp_path / "history", ChatCompleter(list, list), input=typed, output=DummyOutput()
        )
        buffer = editor.default_buffer
        buffer.on_text_changed += lambda _: typed.send_text("\r" * (buffer.text == "edited"))
        assert editor.prompt() == "edited"


def test_a_pasted_tab_is_not_shown_as_a_control_character(tmp_path: Path) -> None:
    screen = io.StringIO()
    with create_pipe_input() as typed:
        typed.send_text("\x1b[200~left\tright\x1b[201~\r")
        editor = create_prompt_session(
            tmp_path / "history",
            ChatCompleter(list, list),
            input=typed,
            output=Vt100_Output(screen, lambda: Size(24, 80), enable_cpr=False),
        )
        assert editor.prompt() == "left\tright"
    assert "left" in screen.getvalue()
    assert "^I" not in screen.getvalue()


@pytest.mark.parametrize(("key", "error"), [("\x03", KeyboardInterrupt), ("\x04", EOFError)])
def test_keys_end_the_prompt(key: str, error: type[BaseException], tmp_path: Path) -> None:
    with create_pipe_input() as typed:
        typed.send_text(key)
        editor = create_prompt_session(
            tmp_path / "history", ChatCompleter(list, list), input=typed, output=DummyOutput()
        )
        with pytest.raises(error):
            editor.prompt()


def test_a_line_typed_ahead_is_the_next_prompt_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyboard, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with hide_typed_ahead():
            os.write(keyboard, b"next\r")
            os.write(terminal, b"answer")
            assert os.read(keyboard, 100) == b"answer"
            editor = create_prompt_session(
                tmp_path / "history",
                ChatCompleter(list, list),
                input=create_input(stdin),
                output=DummyOutput(),
            )
            assert editor.prompt() == "next"
        os.write(keyboard, b"x")
        assert os.read(keyboard, 100) == b"x"
    os.close(keyboard)


def test_the_terminal_keeps_a_line_typed_ahead_and_no_shell_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keyboard, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with hide_typed_ahead():
            os.write(keyboard, b"next\r\x03")
            assert stdin.readline() == "next\n"
            os.write(keyboard, b"rm -r answers\r")
            assert select.select([terminal], [], [], 10)[0], "it has arrived"
        os.write(keyboard, b"ls\r")
        assert stdin.readline() == "ls\n"
    os.close(keyboard)


def test_history_outlives_the_chat_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "history"
    for keys in ("hello\r", "\x1b[A\r"):
        with create_pipe_input() as typed:
            typed.send_text(keys)
            editor = create_prompt_session(
                path, ChatCompleter(list, list), input=typed, output=DummyOutput()
            )
            assert editor.prompt() == "hello"
    assert path.stat().st_mode & 0o777 == 0o600


def history_errors(path: Path) -> list[int | None]:
    """Read two prompts; returns the error numbers that the history reported."""
    failures: list[OSError] = []
    with create_pipe_input() as typed:
        typed.send_text("one\rtwo\r")
        editor = create_prompt_session(
            path,
            ChatCompleter(list, list),
            on_failure=failures.append,
            input=typed,
            output=DummyOutput(),
        )
        assert [editor.prompt(), editor.prompt()] == ["one", "two"]
    return [error.errno for error in failures]


def test_a_full_disk_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history"

    def write(file: LockedFile, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LockedFile, "write", write)
    assert history_errors(path) == [errno.ENOSPC]


def test_prompts_are_not_kept_without_history(tmp_path: Path) -> None:
    path = tmp_path / "history"
    with create_pipe_input() as typed:
        typed.send_text("secret\r")
        editor = create_prompt_session(
            path, ChatCompleter(list, list), can_write=False, input=typed, output=DummyOutput()
        )
        assert editor.prompt() == "secret"
    assert not path.exists()


def test_a_history_that_cannot_be_read_is_said_once(tmp_path: Path) -> None:
    assert history_errors(tmp_path) == [errno.EISDIR]


def test_a_history_that_fails_is_said_below_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()

    class Editor:
        def __init__(self, on_failure: Callable[[OSError], None]) -> None:
            self._on_failure = on_failure

        def prompt(self, text: str, default: str = "") -> str:
            assert default == ""
            self._on_failure(OSError(errno.ENOSPC, "No space left on device"))
            screen.write(f"{text}hi\n")
            return "hi"

    monkeypatch.setattr(
        "localgen.repl.prompt.create_prompt_session",
        lambda *_arguments, on_failure, **_named: Editor(on_failure),
    )
    session = ChatSession(ScriptedClient(), tmp_path, ModelOptions())
    read = create_line_reader(session, Console(file=screen, width=200)).read
    assert read(">>> ") == "hi"
    first, second = screen.getvalue().splitlines()
    assert first == ">>> hi"
    assert "No space left on device" in second


def test_models_are_looked_up_once_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ScriptedClient()
    seen: list[ChatCompleter] = []
    lookups = 0

    class Editor:
        def prompt(self, _text: str, default: str = "") -> str:
            assert default == ""
            typed = Document("/model ")
            found = [*seen[0].get_completions(typed, CompleteEvent())]
            found += seen[0].get_completions(typed, CompleteEvent())
            return " ".join(completion.text for completion in found)

    def editor(_history: Path, completions: ChatCompleter, **_options: object) -> Editor:
        seen.append(completions)
        return Editor()

    def models() -> list[ModelCard]:
        nonlocal lookups
        lookups += 1
        return [ModelCard(f"m{lookups}", "/m", 1, "loaded", "file")]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "models", models)
    monkeypatch.setattr("localgen.repl.prompt.create_prompt_session", editor)
    read = create_line_reader(ChatSession(client, tmp_path, ModelOptions()), Console()).read
    assert read(">>> ") == "m1 m1"
    assert read(">>> ") == "m2 m2"


def test_the_line_editor_is_not_imported_before_the_server_starts() -> None:
    code = "import sys, localgen.repl.repl; sys.exit('prompt_toolkit' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


WAITING = """
import fcntl, sys, termios, threading
from localgen.repl.answer_key import on_answer_now
from localgen.repl.typed_ahead import hide_typed_ahead

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
pressed = threading.Event()
with hide_typed_ahead():
    with on_answer_now(pressed.set):
        print("reasons", flush=True)
        # in steps, as the pieces of an answer come: Python runs no handler of a signal that arrives
        # just before the wait until the wait ends
        assert any(pressed.wait(0.1) for _ in range(300))
    print("answers", flush=True)
    assert sys.stdin.readline() == "typed before\\n"
    print("ends", flush=True)
"""


def test_the_key_that_ends_reasoning_keeps_what_was_typed_and_else_does_nothing() -> None:
    keyboard, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=python_environment(),
        start_new_session=True,
    )
    os.close(terminal)

    def await_word(word: bytes) -> None:
        shown = b""
        while word not in shown:
            assert select.select([keyboard], [], [], 60)[0], shown
            shown += os.read(keyboard, 1000)

    await_word(b"reasons")
    os.write(keyboard, b"typed before\x18")
    await_word(b"answers")
    os.write(keyboard, b"\x18\r")  # it ends no process later
    await_word(b"ends")
    assert process.wait(30) == 0
    os.close(keyboard)


PROMPTING = """
import sys
from pathlib import Path
from localgen.repl.prompt import ChatCompleter, create_prompt_session

editor = create_prompt_session(Path(sys.argv[1]), ChatCompleter(list, list))
print("read", editor.prompt(">>> "), flush=True)
"""


@pytest.mark.skipif(shutil.which("setsid") is None, reason="setsid gives a shell its terminal")
def test_ctrl_z_suspends_at_the_prompt_and_keeps_what_was_typed(tmp_path: Path) -> None:
    keyboard, terminal = pty.openpty()
    child = shlex.join([sys.executable, "-c", PROMPTING, str(tmp_path / "history")])
    shell = subprocess.Popen(
        ["setsid", "-c", "sh", "-c", f"set -m; {child}; echo suspended; fg; echo left"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=python_environment() | {"PROMPT_TOOLKIT_NO_CPR": "1"},
    )
    os.close(terminal)
    shown = b""

    def await_word(word: bytes) -> None:
        nonlocal shown
        while word not in shown:
            assert select.select([keyboard], [], [], 60)[0], shown
            shown += os.read(keyboard, 1000)
        shown = shown.partition(word)[2]

    await_word(b">>>")
    os.write(keyboard, b"half")
    await_word(b"half")
    os.write(keyboard, b"\x1a")
    await_word(b"suspended")
    await_word(b"half")
    os.write(keyboard, b" a line\r")
    await_word(b"read half a line")
    await_word(b"left")
    assert shell.wait(30) == 0
    os.close(keyboard)


@pytest.mark.parametrize(
    ("command", "is_alone"),
    [("exec {0}", True), ("{0}; exit $?", False), ("{0} | cat", False)],
    ids=["by itself", "in a script", "in a pipe"],
)
def test_the_key_is_there_only_if_no_other_program_gets_its_signal(
    command: str, is_alone: bool, tmp_path: Path
) -> None:
    found = tmp_path / "found"
    code = (
        "import pathlib, sys; from localgen.repl.answer_key import has_answer_key; "
        "pathlib.Path(sys.argv[1]).write_text(str(has_answer_key()))"
    )
    keyboard, terminal = pty.openpty()
    subprocess.run(
        ["sh", "-c", command.format(shlex.join([sys.executable, "-c", code, str(found)]))],
        stdin=terminal,
        stdout=terminal,
        env=python_environment(),
        start_new_session=True,
        check=True,
    )
    os.close(terminal)
    os.close(keyboard)
    assert found.read_text() == str(is_alone)
