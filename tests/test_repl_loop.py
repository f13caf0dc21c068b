"""The loop of a chat: what a user sees and what is kept when things go wrong."""

from __future__ import annotations

import errno
import io
import os
import pty
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.data_structures import Size
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_input, create_pipe_input
from prompt_toolkit.output import DummyOutput
from prompt_toolkit.output.vt100 import Vt100_Output
from rich.console import Console
from scripted_client import Script, ScriptedClient, answer

from localgen.backends.errors import (
    ContextExceeded,
    EngineDied,
    LocalgenError,
    OutOfMemory,
    ServerUnavailable,
)
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message
from localgen.chat.conversation import Turn
from localgen.chat.parameters import ModelOptions
from localgen.chat.session import ChatSession
from localgen.client import ModelCard, TextDelta
from localgen.machine.busy_processes import BusyProgram
from localgen.repl.load_progress import LoadProgressLine
from localgen.repl.prompt import ChatCompleter, create_prompt_session, has_open_quotes, strip_quotes
from localgen.repl.repl import Repl, _create_line_reader
from localgen.repl.typed_ahead import hide_typed_ahead

Line = str | type[BaseException]
# what is stored with an answer of the script
SERVED = "tiny · 41.2 tok/s · first token 56 ms · 49 of 2,048"


class Chat:
    """A chat typed from a list, with its screen."""

    def __init__(self, client: ScriptedClient, state_dir: Path, options: ModelOptions) -> None:
        self.client = client
        self.screen = io.StringIO()
        self.session = ChatSession(client, state_dir, options)
        self.session.load(None, lambda _: None)
        self.console = Console(file=self.screen, width=200)

    def type(self, *lines: Line) -> str:
        """Type the lines, then leave; everything that was shown."""
        waiting = list(lines)

        def read(_prompt: str) -> str:
            line = waiting.pop(0) if waiting else EOFError
            if isinstance(line, str):
                return line
            raise line

        Repl(self.session, self.console, read).run()
        assert waiting == []
        return self.screen.getvalue()


@pytest.fixture
def chat(tmp_path: Path) -> Callable[..., Chat]:
    def make(*scripts: Script, **options: object) -> Chat:
        return Chat(ScriptedClient(*scripts), tmp_path, ModelOptions(**options))  # type: ignore[arg-type]

    return make


def test_a_chat(chat: Callable[..., Chat]) -> None:
    talk = chat(
        ("Hel", "lo **you**", answer()), params=SamplingParams(top_k=3), ctx=512, priority=2
    )
    screen = talk.type("hi", "", "   ", '"""two\nlines"""', "/bye")
    assert "tiny · 2,048 tokens of context · 130 MB of memory · 100% CPU" in screen
    assert "Hello you" in screen
    assert "49 of 2,048" in screen
    assert "re: two\nlines" in screen
    first, second = talk.client.record.asked
    assert (first.model, first.params.top_k, first.ctx, first.priority) == ("tiny", 3, 512, 2)
    assert [message.content for message in second.messages] == [
        "hi", "Hello you".replace("you", "**you**"), "two\nlines",
    ]  # fmt: skip


def test_ctrl_c_stops_the_answer_and_keeps_what_there_is(chat: Callable[..., Chat]) -> None:
    talk = chat(("half an", KeyboardInterrupt()))
    screen = talk.type("hi", "more")
    assert talk.session.conversation.turns[0] == Turn("hi", "half an", True, summary="stopped")
    assert "half an" in screen
    assert "stopped" in screen
    assert talk.client.record.asked[1].messages[1] == Message("assistant", "half an")


def test_ctrl_c_before_any_text_keeps_nothing(chat: Callable[..., Chat]) -> None:
    talk = chat((KeyboardInterrupt(),))
    assert "stopped" in talk.type("hi")
    assert talk.session.conversation.turns == ()


def test_ctrl_c_at_the_prompt_says_how_to_leave(chat: Callable[..., Chat]) -> None:
    assert "Ctrl+D or /bye leaves" in chat().type(KeyboardInterrupt)


@pytest.mark.parametrize("error", [ContextExceeded("9,214 of 8,192 tokens"), EngineDied("it died")])
def test_an_error_leaves_the_conversation_as_it_was(
    chat: Callable[..., Chat], error: Exception
) -> None:
    talk = chat(("fine", answer()), (error,), (error,))
    screen = talk.type("one", "two")
    assert str(error) in screen
    assert talk.session.conversation.turns == (Turn("one", "fine", summary=SERVED),)


@pytest.mark.parametrize("kind", [ServerUnavailable, EngineDied])
def test_what_dies_is_restarted_and_asked_once_more(
    chat: Callable[..., Chat], kind: type[LocalgenError]
) -> None:
    load = LoadOptions(threads=3)
    talk = chat(("bro", kind("it went away")), ("whole", answer()), load=load)
    screen = talk.type("hi")
    assert "it went away; restarting it and sending the prompt again" in screen
    assert talk.session.conversation.turns == (Turn("hi", "whole", summary=SERVED),)
    first, second = talk.client.record.asked
    assert first == second
    assert talk.client.record.connects == 2
    assert talk.client.record.loaded[-1] == (None, load)


@pytest.mark.parametrize("kind", [ServerUnavailable, EngineDied])
def test_what_dies_twice_is_an_error(chat: Callable[..., Chat], kind: type[LocalgenError]) -> None:
    gone = kind("it went away")
    talk = chat((gone,), (gone,))
    assert "it went away" in talk.type("hi").splitlines()
    assert len(talk.client.record.asked) == 2
    assert talk.session.conversation.turns == ()


@pytest.mark.parametrize("error", [OutOfMemory("no room"), EngineDied("it died")])
def test_an_error_keeps_what_there_is(chat: Callable[..., Chat], error: LocalgenError) -> None:
    talk = chat(("half", error), ("half an", error))
    screen = talk.type("hi")
    half = "half an" if isinstance(error, EngineDied) else "half"
    why = f"interrupted: {error.message}"
    assert talk.session.conversation.turns == (Turn("hi", half, True, summary=why),)
    assert error.message in screen.splitlines()


def test_the_half_is_kept_if_the_server_cannot_be_started_again(
    chat: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = chat(("half", ServerUnavailable("it died")))

    def fail() -> None:
        raise ServerUnavailable("no room on the disk")

    connects = iter([None, fail])
    monkeypatch.setattr(talk.client, "connect", lambda: (next(connects) or (lambda: None))())
    screen = talk.type("hi")
    assert talk.session.conversation.turns == (
        Turn("hi", "half", True, summary="interrupted: no room on the disk"),
    )
    assert "no room on the disk" in screen.splitlines()


def test_regen_replaces_the_last_answer(chat: Callable[..., Chat]) -> None:
    talk = chat(("first", answer()), ("second", answer()))
    talk.type("hi", "/regen")
    assert talk.session.conversation.turns == (Turn("hi", "second", summary=SERVED),)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), EngineDied("it died")])
def test_a_regen_that_fails_keeps_the_old_answer(
    chat: Callable[..., Chat], end: BaseException
) -> None:
    talk = chat(("first", answer()), (end,), (end,))
    talk.type("hi", "/regen")
    assert talk.session.conversation.turns == (Turn("hi", "first", summary=SERVED),)


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (SamplingParams(seed=1), "the seed is set, so"),
        (SamplingParams(temperature=0, seed=1), "temperature is 0, so"),
        (SamplingParams(), None),
    ],
)
def test_regen_says_when_it_changes_nothing(
    chat: Callable[..., Chat], params: SamplingParams, why: str | None
) -> None:
    screen = chat(params=params).type("hi", "/regen")
    assert (why in screen) if why else ("answer will be the same" not in screen)


def test_notes_and_verbose_reach_the_screen(chat: Callable[..., Chat]) -> None:
    talk = chat(("x", answer(notes=("preempted once",))), verbose=True)
    screen = talk.type("hi")
    assert "preempted once" in screen
    assert "load:" in screen
    assert "first token" in screen


def test_no_figures(chat: Callable[..., Chat]) -> None:
    assert "first token" not in chat(figures=False).type("hi")


@pytest.mark.parametrize(
    ("threads", "programs", "line"),
    [
        (
            1,
            (BusyProgram("cc1plus", 0.9), BusyProgram("ld", 0.2)),
            "1 of 2 cores busy with cc1plus",
        ),
        (1, (), "1 of 2 cores busy with other programs"),
        (2, (BusyProgram("cc1plus", 0.9),), None),
    ],
)
def test_what_takes_cores_from_an_answer(
    chat: Callable[..., Chat],
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    programs: tuple[BusyProgram, ...],
    line: str | None,
) -> None:
    talk = chat()
    stats = {"threads": threads, "threads_max": 2}
    reply = {"server": {}, "models": [{"name": "tiny", "stats": stats}]}
    monkeypatch.setattr(talk.client, "stats", lambda: reply)
    monkeypatch.setattr("localgen.repl.repl.busy_programs", lambda: programs)
    screen = talk.type("hi")
    assert (f"49 of 2,048 · {line}" in screen) if line else ("cores" not in screen)


def test_a_wrong_command_is_told_and_the_chat_goes_on(chat: Callable[..., Chat]) -> None:
    screen = chat().type("/hlep", "hi")
    assert "no command /hlep: did you mean /help?" in screen
    assert "re: hi" in screen


def test_what_the_model_writes_is_inert(chat: Callable[..., Chat]) -> None:
    hostile = answer(notes=("note \x1b[31m",))
    screen = chat(("\x1b]0;x\x07", hostile)).type("hi", "/set system \x1b[2J", "/show system")
    assert "\x1b" not in screen
    assert "\x07" not in screen


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
def test_three_quotes(text: str, waits: bool) -> None:
    assert has_open_quotes(text) is waits


def test_unquoted() -> None:
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
def test_keys(keys: str, line: str, tmp_path: Path) -> None:
    with create_pipe_input() as typed:
        typed.send_text(keys)
        editor = create_prompt_session(
            tmp_path / "history", ChatCompleter(list, list), input=typed, output=DummyOutput()
        )
        assert editor.prompt() == line


@pytest.mark.parametrize(
    ("command", "problem"),
    [("no-such-editor -w", "command not found"), ("vim '", "No closing quotation")],
)
def test_an_editor_that_does_not_open(
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
def test_keys_that_end(key: str, error: type[BaseException], tmp_path: Path) -> None:
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


def test_a_full_disk_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history"
    failures: list[OSError] = []

    def store(history: FileHistory, line: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileHistory, "store_string", store)
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
    assert [error.errno for error in failures] == [errno.ENOSPC]


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
    failures: list[OSError] = []
    with create_pipe_input() as typed:
        typed.send_text("one\rtwo\r")
        editor = create_prompt_session(
            tmp_path,
            ChatCompleter(list, list),
            on_failure=failures.append,
            input=typed,
            output=DummyOutput(),
        )
        assert [editor.prompt(), editor.prompt()] == ["one", "two"]
    assert [error.errno for error in failures] == [errno.EISDIR]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_loading_leaves_what_was_said_on_a_terminal_only(is_terminal: bool) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=is_terminal, width=60)
    with LoadProgressLine(console, "tiny") as loading:
        loading.notify("starting the server")
        loading.update(0.43)
    last = screen.getvalue().rpartition("starting the server")
    assert bool(last[1]) is is_terminal
    assert is_terminal or screen.getvalue() == ""
    assert ("loading tiny 43% · 0 s" in screen.getvalue()) is is_terminal


def test_where_nothing_loads_no_loading_shows() -> None:
    screen = io.StringIO()
    with LoadProgressLine(Console(file=screen, force_terminal=True, width=60), "tiny"):
        pass
    assert screen.getvalue() == ""


def test_models_are_looked_up_once_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ScriptedClient()
    seen: list[ChatCompleter] = []
    lookups = 0

    class Editor:
        def prompt(self, _text: str) -> str:
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
    read = _create_line_reader(ChatSession(client, tmp_path, ModelOptions()), Console())
    assert read(">>> ") == "m1 m1"
    assert read(">>> ") == "m2 m2"


def test_thoughts_are_shown_and_stay_out_of_the_next_turn(chat: Callable[..., Chat]) -> None:
    made = chat([TextDelta("", 1, "Let me see."), "Rome.", answer()])
    shown = made.type("Which city?", "And now?")
    assert "Let me see." in shown
    assert made.session.conversation.turns[0] == Turn(
        "Which city?", "Rome.", False, "Let me see.", SERVED
    )
    assert made.client.record.asked[1].messages == (
        Message("user", "Which city?"),
        Message("assistant", "Rome."),
        Message("user", "And now?"),
    )


def test_a_template_that_asks_for_thoughts_gets_them(chat: Callable[..., Chat]) -> None:
    made = chat([TextDelta("", 1, "Let me see."), "Rome.", answer()])
    wanting = replace(made.session.model, chat_template="{{ m.reasoning_content }}")
    made.client.load = lambda *_: wanting  # type: ignore[method-assign]
    made.type("Which city?", "And now?")
    assert made.client.record.asked[1].messages[1] == Message("assistant", "Rome.", "Let me see.")


def test_thoughts_that_were_stopped_are_a_turn(chat: Callable[..., Chat]) -> None:
    made = chat([TextDelta("", 1, "Let me"), KeyboardInterrupt()])
    made.type("Which city?")
    assert made.session.conversation.turns == (Turn("Which city?", "", True, "Let me", "stopped"),)


def test_thoughts_are_saved(chat: Callable[..., Chat]) -> None:
    made = chat([TextDelta("", 1, "Let me see."), "Rome.", answer()])
    made.type("Which city?", "/save x", "/clear", "/load x")
    assert made.session.conversation.turns == (Turn("Which city?", "Rome.", False, "Let me see."),)
