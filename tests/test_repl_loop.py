"""The chat loop: what a user sees, and what is stored when something fails."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from scripted_client import TIMINGS, Script, ScriptedClient, answer
from serving import wait_until

from localgen.backends.errors import (
    ContextExceeded,
    EngineDied,
    InvalidRequest,
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
from localgen.client import Completion, TextDelta
from localgen.machine.busy_processes import BusyProgram
from localgen.repl.load_progress import LoadProgressLine
from localgen.repl.repl import Repl

Line = str | type[BaseException]
# summary stored with a scripted answer
SERVED = "tiny · 41.2 tok/s · first token 56 ms · 49 of 2,048"


class Chat:
    """A chat with scripted input lines, and its screen."""

    def __init__(self, client: ScriptedClient, state_dir: Path, options: ModelOptions) -> None:
        self.client = client
        self.screen = io.StringIO()
        self.session = ChatSession(client, state_dir, options)
        self.session.load(None, lambda _: None)
        self.console = Console(file=self.screen, width=200)

    def type(self, *lines: Line) -> str:
        """Type the lines, then leave; returns the whole output."""
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
    assert "tiny · 512 tokens of context · 130 MB of memory · 100% CPU" in screen
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


def test_the_answer_key_asks_the_server_to_end_the_reasoning(chat: Callable[..., Chat]) -> None:
    talk = chat()

    def thinking() -> Generator[TextDelta | Completion, None, None]:
        yield TextDelta("", 1, "hm")
        os.kill(os.getpid(), signal.SIGQUIT)
        wait_until(lambda: talk.client.record.answers_now)
        yield TextDelta("Yes.", 2)
        yield answer()

    talk.client.scripts = [thinking()]  # type: ignore[list-item]
    assert "Yes." in talk.type("hi")
    assert talk.client.record.answers_now == 1


def test_ctrl_c_before_any_text_keeps_nothing(chat: Callable[..., Chat]) -> None:
    talk = chat((KeyboardInterrupt(),))
    assert "stopped" in talk.type("hi")
    assert talk.session.conversation.turns == ()


def test_ctrl_c_discards_a_line_typed_ahead(
    chat: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    keyboard, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)

        def stopped() -> Generator[TextDelta | Completion, None, None]:
            yield TextDelta("half", 1)
            os.write(keyboard, b"next\r")
            assert select.select([terminal], [], [], 10)[0], "it has arrived"
            raise KeyboardInterrupt

        talk = chat()
        talk.client.scripts = [stopped()]  # type: ignore[list-item]
        assert "stopped" in talk.type("hi")
        os.write(keyboard, b"later\r")
        assert stdin.readline() == "later\n"
    os.close(keyboard)


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


def test_error_of_a_set_parameter_says_how_to_reset_it(chat: Callable[..., Chat]) -> None:
    wrong = InvalidRequest("json_schema: Invalid type: foo", param="json_schema")
    limit = InvalidRequest("top_k: too large", param="top_k")
    messages = InvalidRequest("messages: too many", param="messages")
    talk = chat((wrong,), (limit,), (messages,), ("fine", answer()))
    talk.type('/set format {"type": "object"}', "one")
    screen = talk.type("/set parameter top_k 5", "two", "three")
    assert "Invalid type: foo; /set format text ends it" in screen
    assert "top_k: too large; /set parameter top_k default ends it" in screen
    assert "messages: too many\n" in screen
    assert "fine" in talk.type("/set format text", "four")


@pytest.mark.parametrize("kind", [ServerUnavailable, EngineDied])
def test_request_is_repeated_once_after_a_crash(
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
def test_second_crash_is_an_error(chat: Callable[..., Chat], kind: type[LocalgenError]) -> None:
    gone = kind("it went away")
    talk = chat((gone,), (gone,))
    assert "it went away" in talk.type("hi").splitlines()
    assert len(talk.client.record.asked) == 2
    assert talk.session.conversation.turns == ()


@pytest.mark.parametrize("error", [OutOfMemory("no room"), EngineDied("it died")])
def test_error_keeps_the_partial_answer(chat: Callable[..., Chat], error: LocalgenError) -> None:
    talk = chat(("half", error), ("half an", error))
    screen = talk.type("hi")
    half = "half an" if isinstance(error, EngineDied) else "half"
    why = f"interrupted: {error.message}"
    assert talk.session.conversation.turns == (Turn("hi", half, True, summary=why),)
    assert error.message in screen.splitlines()
    assert "interrupted: /regen sends the prompt again" in screen.splitlines()
    assert "stopped" not in screen


def test_partial_answer_is_kept_if_the_server_cannot_be_restarted(
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


def test_a_stopped_regen_is_added_below_the_old_answer(chat: Callable[..., Chat]) -> None:
    talk = chat(("first", answer()), ("half", KeyboardInterrupt()), ("second", answer()))
    screen = talk.type("hi", "/regen")
    old, half = Turn("hi", "first", summary=SERVED), Turn("hi", "half", True, summary="stopped")
    assert talk.session.conversation.turns == (old, half)
    assert "the answer before is kept: /undo removes the stopped one" in screen
    talk.type("/regen")
    assert talk.session.conversation.turns == (old, Turn("hi", "second", summary=SERVED))
    assert [len(asked.messages) for asked in talk.client.record.asked] == [1, 1, 3]


def test_mentioned_files_are_sent(
    chat: Callable[..., Chat], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text\n")
    (tmp_path / "b.bin").write_bytes(b"\0")
    talk = chat()
    assert "attached a.txt (1 line)" in talk.type("sum up @a.txt")
    talk.type("/regen")
    sent = [asked.messages[-1].content for asked in talk.client.record.asked]
    assert sent == ["sum up @a.txt\n\na.txt:\n```txt\ntext\n```"] * 2
    assert "b.bin is not a text file" in talk.type("sum up @b.bin")
    assert len(talk.client.record.asked) == 2


def test_ctrl_c_in_the_figures_keeps_the_new_answer(
    chat: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = chat(("first", answer()), ("second", answer()))
    talk.type("hi")

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(talk.client, "stats", interrupt)
    repl = Repl(talk.session, talk.console, lambda _: "")
    assert repl.handle_line("/regen")
    assert talk.session.conversation.turns == (Turn("hi", "second", summary=SERVED),)


def test_the_figures_are_those_of_the_model_at_this_path(
    chat: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = chat()
    models = [
        {"name": "tiny", "path": f"/{folder}/tiny.gguf", "memory_bytes": size}
        for folder, size in (("elsewhere", 5 << 30), ("models", 130_000_000))
    ]
    monkeypatch.setattr(talk.client, "stats", lambda: {"server": {}, "models": models})
    assert "130 MB of memory" in talk.type()


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (SamplingParams(seed=1), "the seed is set, so the same settings usually"),
        (SamplingParams(temperature=0, seed=1), "temperature is 0, so the same settings usually"),
        (SamplingParams(), None),
    ],
)
def test_regen_says_when_it_changes_nothing(
    chat: Callable[..., Chat], params: SamplingParams, why: str | None
) -> None:
    screen = chat(params=params).type("hi", "/regen")
    assert (why in screen) if why else ("same settings" not in screen)


def test_notes_and_verbose_reach_the_screen(chat: Callable[..., Chat]) -> None:
    talk = chat(("x", answer(notes=("preempted once",))), verbose=True)
    screen = talk.type("hi")
    assert "preempted once" in screen
    assert "load:" in screen
    assert "first token" in screen


def test_statistics_can_be_turned_off(chat: Callable[..., Chat]) -> None:
    assert "first token" not in chat(figures=False).type("hi")


def test_no_figures_of_a_stopped_answer(chat: Callable[..., Chat]) -> None:
    screen = chat(("half an", KeyboardInterrupt()), figures=False).type("hi")
    assert "stopped" in screen
    assert not any(word in screen for word in ("TTFT", "first token", "~", "2,048\n"))


def test_a_stopped_answer_ends_with_the_line_of_a_finished_one(chat: Callable[..., Chat]) -> None:
    lines = chat(("half an", KeyboardInterrupt())).type("hi").splitlines()
    assert re.fullmatch(r"first token .+ · ~1 of 2,048", lines[lines.index("stopped") + 1])
    assert lines[lines.index("stopped") + 2] == ""
    verbose = chat(("half an", KeyboardInterrupt()), verbose=True).type("hi")
    assert re.search(r"\nTTFT .+ · 1 token · context ~1/2,048\n", verbose)


def test_the_context_of_a_stopped_answer_is_what_the_server_counted(
    chat: Callable[..., Chat],
) -> None:
    talk = chat((TextDelta("half", 3, prompt_tokens=40), KeyboardInterrupt()))
    screen = talk.type("hi")
    assert " · 43 of 2,048" in screen
    assert talk.session.used_tokens == talk.session.estimate_used_tokens() == 43
    talk.type("/undo")
    assert talk.session.used_tokens is None


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
def test_programs_that_took_cores_are_named(
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


def test_what_busy_cores_cost_is_shown_once_it_is_known(
    chat: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = answer(timings=replace(TIMINGS, predicted_per_second=9.0))
    talk = chat(("a", slow), ("b", answer()), ("c", slow))
    threads = iter((2, 1, 2, 1))  # at the start, and after each answer

    def stats() -> dict[str, object]:
        shown = {"threads": next(threads), "threads_max": 2}
        return {"server": {}, "models": [{"name": "tiny", "stats": shown}]}

    monkeypatch.setattr(talk.client, "stats", stats)
    monkeypatch.setattr(
        "localgen.repl.repl.busy_programs", lambda: (BusyProgram("python3.11", 0.9),)
    )
    first, _, rest = talk.type("x", "y", "z").partition("41.2 tok/s")
    assert "1 of 2 cores busy with another python3.11\n" in first
    assert "another python3.11: 9.0 instead of 41.2 tokens/s" in rest


def test_a_wrong_command_is_told_and_the_chat_goes_on(chat: Callable[..., Chat]) -> None:
    screen = chat().type("/hlep", "hi")
    assert "no command /hlep: did you mean /help?" in screen
    assert "re: hi" in screen


def test_what_the_model_writes_is_inert(chat: Callable[..., Chat]) -> None:
    hostile = answer(notes=("note \x1b[31m",))
    screen = chat(("\x1b]0;x\x07", hostile)).type("hi", "/set system \x1b[2J", "/show system")
    assert "\x1b" not in screen
    assert "\x07" not in screen


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


@pytest.mark.parametrize("is_terminal", [True, False])
def test_notices_break_between_words_on_a_terminal_only(is_terminal: bool) -> None:
    screen = io.StringIO()
    words = [
        "context",
        "8,192",
        "of",
        "131,072;",
        "change",
        "it",
        "with",
        "--ctx",
        "or",
        "/set",
        "ctx",
    ]
    line = LoadProgressLine(Console(file=screen, force_terminal=is_terminal, width=20), "tiny")
    line.print_notice(" ".join(words))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()
    assert (len(lines) > 1) is is_terminal
    assert " ".join(lines).split() == words


def test_no_load_progress_without_a_load() -> None:
    screen = io.StringIO()
    with LoadProgressLine(Console(file=screen, force_terminal=True, width=60), "tiny"):
        pass
    assert screen.getvalue() == ""


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


def test_stopped_reasoning_is_a_turn(chat: Callable[..., Chat]) -> None:
    made = chat([TextDelta("", 1, "Let me"), KeyboardInterrupt()])
    made.type("Which city?")
    assert made.session.conversation.turns == (Turn("Which city?", "", True, "Let me", "stopped"),)


def test_thoughts_are_saved(chat: Callable[..., Chat]) -> None:
    made = chat([TextDelta("", 1, "Let me see."), "Rome.", answer()])
    made.type("Which city?", "/save x", "/clear", "/load x")
    assert made.session.conversation.turns == (Turn("Which city?", "Rome.", False, "Let me see."),)
