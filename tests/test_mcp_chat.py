"""Tool calls in chats and `localgen run`: asked for, refused, stopped, stored."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import own_folders, scripted
from rich.console import Console
from scripted_client import Script, ScriptedClient, answer

from localgen.backends.errors import ContextExceeded, InvalidRequest
from localgen.backends.sampling_params import SamplingParams
from localgen.backends.types import Message, ToolCall
from localgen.chat import commands
from localgen.chat.conversation import Conversation, ToolStep, Turn
from localgen.chat.database import WriterLock
from localgen.chat.parameters import ModelOptions
from localgen.chat.saved_chats import SavedChat, encode_chat, load_chat, save_chat
from localgen.chat.session import ChatSession
from localgen.chat.session_store import SessionRecord, SessionStore
from localgen.chat.transcript import transcript_markdown
from localgen.cli import tool_calls
from localgen.cli.main import run_command_line
from localgen.mcp_tools.call_arguments import shown_arguments, whole_arguments
from localgen.mcp_tools.call_question import parse_decision
from localgen.mcp_tools.chat_tools import MAX_ROUNDS, ChatTools
from localgen.mcp_tools.connections import McpConnections
from localgen.mcp_tools.server_file import McpServer, add_server, remove_server
from localgen.mcp_tools.server_tools import ServerTool, ServerTools
from localgen.repl.repl import Repl

__all__ = ["own_folders", "scripted"]
PROGRAM = str(Path(__file__).parent / "mcp_server.py")
SERVER = McpServer("test", (sys.executable, PROGRAM, "stdio"))
Line = str | type[BaseException]


@pytest.fixture(autouse=True)
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").mkdir(mode=0o700)
    monkeypatch.setenv("LOCALGEN_CONFIG_DIR", str(tmp_path / "config"))
    add_server(SERVER)


@pytest.fixture(scope="module")
def connections() -> Iterator[McpConnections]:
    with contextlib.closing(McpConnections()) as made:
        yield made


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(f"id_{name}", f"test__{name}", json.dumps(arguments))


def calling(*calls: ToolCall, text: str = "") -> Script:
    """A part of an answer that ends with calls."""
    end = answer(finish_reason="tool_calls", tool_calls=calls)
    return (text, end) if text else (end,)


class Chat:
    """A chat with scripted input, answers to questions included, and its screen."""

    def __init__(
        self, connections: McpConnections, folder: Path, *scripts: Script, allowed: str = ""
    ) -> None:
        self.client = ScriptedClient(*scripts)
        self.tools = ChatTools(connections, [allowed] if allowed else [])
        self.tools.add("test")
        self.session = ChatSession(self.client, folder, ModelOptions(), self.tools)
        self.session.load(None, lambda _: None)
        self.asked: list[str] = []

    def type(self, *lines: Line, answers: tuple[Line, ...] = ()) -> str:
        """Type lines, answer questions, then leave; returns the whole output."""
        typed, replies, screen = list(lines), list(answers), io.StringIO()

        def read_from(waiting: list[Line]) -> str:
            line = waiting.pop(0) if waiting else EOFError
            if isinstance(line, str):
                return line
            raise line

        def ask(question: str) -> str:
            self.asked.append(question)
            return read_from(replies)

        console = Console(file=screen, width=200)
        Repl(self.session, console, lambda _: read_from(typed), ask=ask).run()
        assert typed == replies == []
        return screen.getvalue()

    @property
    def questions(self) -> int:
        return len(self.asked)

    @property
    def last_turn(self) -> Turn:
        return self.session.conversation.turns[-1]


@pytest.fixture
def chat(connections: McpConnections, tmp_path: Path) -> Callable[..., Chat]:
    return lambda *scripts, **options: Chat(connections, tmp_path, *scripts, **options)


def test_a_call_is_asked_for_run_and_answered(chat: Callable[..., Chat]) -> None:
    adds = call("add", a=17, b=25)
    talk = chat(calling(adds, text="Let me see."), ("It is 42.", answer()))
    screen = talk.type("17 + 25?", answers=("what?", "y"))
    assert talk.questions == 2  # the first was answered with neither yes nor no
    assert "tools of test (10); /mcp lists them" in screen
    assert '▸ test.add {"a": 17, "b": 25}' in screen
    assert "\n  42\n" in screen
    step = ToolStep("Let me see.", "", (adds,), ("42",))
    assert (talk.last_turn.answer, talk.last_turn.steps) == ("It is 42.", (step,))
    first, second = talk.client.record.asked
    assert [tool.name for tool in first.tools][:2] == ["test__echo", "test__add"]
    assert second.messages == (
        Message("user", "17 + 25?"),
        Message("assistant", "Let me see.", tool_calls=(adds,)),
        Message("tool", "42", tool_call_id="id_add", name="test__add"),
    )


def test_yes_is_for_once_and_always_for_the_chat(chat: Callable[..., Chat]) -> None:
    one = calling(call("add", a=1, b=2))
    other = calling(call("echo", text="x"))
    done = ("ok", answer())
    talk = chat(one, done, one, done, one, other, done)
    talk.type("1", "2", "3", answers=("y", "a", "n"))
    assert talk.questions == 3  # echo needs a question of its own
    added, refused = talk.last_turn.steps
    assert added.results == ("3",)
    assert refused.results == ("[not run: the user refused this call]",)


@pytest.mark.parametrize(
    ("lines", "is_asked"),
    [
        (["/clear"], True),
        (["/load kept"], True),
        (["/mcp off test", "/mcp test"], True),
        (["/fork"], True),
        (["/fork", "/switch main"], True),
        (["/switch", "/switch main"], False),
        (["/undo"], False),
        (["/regen"], False),
    ],
    ids=str,
)
def test_always_ends_with_the_chat(
    chat: Callable[..., Chat], lines: list[str], is_asked: bool
) -> None:
    one, done = calling(call("add", a=1, b=2)), ("ok", answer())
    talk = chat(one, done, one, done)
    prompt = [] if lines == ["/regen"] else ["2"]
    answers = ("a", "n") if is_asked else ("a",)
    screen = talk.type("/save kept", "1", "/mcp", *lines, *prompt, answers=answers)
    assert "test.add (runs without a question): Add two numbers" in screen
    assert "test.echo: Echo the input text" in screen
    assert talk.questions == len(answers)


def test_an_allowed_tool_is_not_asked_for(chat: Callable[..., Chat]) -> None:
    talk = chat(calling(call("add", a=1, b=2)), ("3", answer()), allowed="test.a*")
    talk.type("1 + 2")
    assert (talk.questions, talk.last_turn.steps[0].results) == (0, ("3",))


def test_a_refusal_runs_nothing(chat: Callable[..., Chat], tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    talk = chat(calling(call("sleep", seconds=0, begun=str(begun))), ("Well.", answer()))
    assert "not run: refused" in talk.type("hi", answers=("n",))
    assert not begun.exists()
    assert talk.last_turn.answer == "Well."


@pytest.mark.parametrize("key", [KeyboardInterrupt, EOFError])
def test_leaving_the_question_stops_the_answer(chat: Callable[..., Chat], key: Line) -> None:
    adds = call("add", a=1, b=2)
    talk = chat(calling(adds, adds))
    assert "stopped" in talk.type("hi", "more", answers=(key,))
    stopped, last = talk.session.conversation.turns
    assert stopped.stopped
    assert stopped.steps[0].results == ("[not run: the user stopped the answer]",) * 2
    assert last.answer == "re: more"
    assert [each.role for each in talk.client.record.asked[-1].messages] == [
        *("user", "assistant", "tool", "tool", "assistant"),
        "user",
    ]


def test_ctrl_c_ends_the_call_and_keeps_the_chat(chat: Callable[..., Chat], tmp_path: Path) -> None:
    begun, cancelled = tmp_path / "begun", tmp_path / "cancelled"

    def press() -> None:
        while not begun.exists():
            time.sleep(0.01)
        time.sleep(0.3)  # until it is waited for
        os.kill(os.getpid(), signal.SIGINT)

    talk = chat(calling(call("wait", begun=str(begun), cancelled=str(cancelled))))
    threading.Thread(target=press).start()
    screen = talk.type("hi", "more", answers=("y",))
    assert "no longer waited for: the server may still carry it out" in screen
    stopped, last = talk.session.conversation.turns
    (result,) = stopped.steps[0].results
    assert result == ("[the user stopped waiting for this call: the server may still carry it out]")
    while not cancelled.exists():  # the server is told
        time.sleep(0.01)
    assert (stopped.stopped, last.stopped) == (True, False)


def test_what_models_get_wrong_is_told_to_them(chat: Callable[..., Chat]) -> None:
    calls = (
        ToolCall("1", "test__nothing", "{}"),
        ToolCall("2", "test__add", '{"a": '),
        ToolCall("3", "test__add", "[1]"),
        call("fail"),
    )
    talk = chat(calling(*calls), ("ok", answer()), allowed="*")
    screen = talk.type("hi")
    assert talk.last_turn.steps[0].results == (
        "[not run: there is no tool of this name]",
        '[not run: the arguments are not a JSON object, but: {"a": ]',
        "[not run: the arguments are not a JSON object, but: [1]]",
        "[failed] Error executing tool fail",
    )
    assert "failed: Error executing tool fail" in screen
    assert screen.count("not run: the arguments are not a JSON object\n") == 2


def test_a_call_that_was_cut_is_not_run(chat: Callable[..., Chat]) -> None:
    cut = answer(finish_reason="length", tool_calls=(call("add", a=1, b=2),))
    talk = chat(("Wait", cut), allowed="*")
    talk.type("hi")
    assert (talk.last_turn.answer, talk.last_turn.steps) == ("Wait", ())


def test_results_are_cut_and_that_is_said(chat: Callable[..., Chat]) -> None:
    talk = chat(calling(call("repeat", text="abc", times=4_000)), ("ok", answer()), allowed="*")
    # half of a context of 2,048 tokens
    assert "12,000 characters, of which the model gets the first 4,096" in talk.type("hi")
    (result,) = talk.last_turn.steps[0].results
    assert result.startswith("abcabc")
    assert result.endswith("\n[cut: the first 4,096 of 12,000 characters]")
    assert len(result) < 4_200


def test_the_first_line_of_a_result_is_shown(chat: Callable[..., Chat]) -> None:
    talk = chat(calling(call("echo", text="a\tb\nmore")), ("ok", answer()), allowed="*")
    assert "\n  a\\tb … (8 characters)\n" in talk.type("hi")


def test_the_tools_and_calls_of_a_continued_chat_are_shown(
    chat: Callable[..., Chat], tmp_path: Path
) -> None:
    step = ToolStep("", "", (call("add", a=1, b=2),), ("3",))
    record = SessionRecord(
        1, name="trip", conversation=Conversation(None, (Turn("1 + 2?", "3", steps=(step,)),))
    )
    talk, screen = chat(), io.StringIO()
    repl = Repl(talk.session, Console(file=screen, width=200), lambda _: "")
    repl._introduce(record)
    assert '>>> 1 + 2?\n▸ test.add {"a": 1, "b": 2}\n3\n' in screen.getvalue()
    assert "tools     test (10) · /mcp lists them" in talk.type("/show info")


def test_escapes_have_no_effect(chat: Callable[..., Chat]) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\u202e"
    talk = chat(calling(call("echo", text=evil)), ("ok", answer()))
    screen = talk.type("hi", answers=("y",))
    assert not {"\x1b", "\x07", "\u202e"} & set(screen)
    assert talk.last_turn.steps[0].results == (r"\x1b]0;title\x07\x1b[2J\u202e",)


def test_long_arguments_name_what_is_not_shown(chat: Callable[..., Chat]) -> None:
    talk = chat(calling(call("echo", text="x" * 5_000)), ("ok", answer()))
    assert "[4,400 more characters]" in talk.type("hi", answers=("n",)).replace("\n", "")


def test_long_arguments_are_shown_as_a_whole(chat: Callable[..., Chat]) -> None:
    text = f"{'x' * 500}\x1b[2J\n{' ' * 300}rm -rf ~ {'y' * 500}"
    talk = chat(calling(call("echo", text=text)), ("ok", answer()))
    screen = talk.type("hi", answers=("s", "n"))
    whole = whole_arguments(json.dumps({"text": text}))
    assert screen.count(f"\n{whole}\n") == 1
    assert whole == f'{{"text": "{"x" * 500}\\u001b[2J\\n{" " * 300}rm -rf ~ {"y" * 500}"}}'
    assert talk.asked == ["run it? [y]es, [a]lways in this chat, [n]o, [s]how all: "] * 2
    assert talk.last_turn.steps[0].results == ("[not run: the user refused this call]",)


def test_short_arguments_have_nothing_more_to_show(chat: Callable[..., Chat]) -> None:
    talk = chat(calling(call("add", a=1, b=2)), ("ok", answer()))
    assert "that is no answer" in talk.type("hi", answers=("s", "n"))
    assert talk.asked == ["run it? [y]es, [a]lways in this chat, [n]o: "] * 2


def test_no_argument_is_hidden_behind_another_or_behind_blanks() -> None:
    hidden = {"content": "x" * 9_000, "cmd": "ls" + " " * 3_000 + "; rm -rf ~", "path": "/etc/x"}
    shown = shown_arguments(json.dumps(hidden))
    assert "; rm -rf ~" in shown
    assert "/etc/x" in shown
    assert "[3,000 blanks]" in shown
    assert len(shown) < 1_000
    alike = json.loads(shown_arguments(json.dumps({"a    b": 1, "a\t\t\t\tb": 2, "c": 3})))
    assert list(alike.values()) == [1, 2, 3]


def test_deeply_nested_arguments_are_shown() -> None:
    nested = '{"a": ' + "[" * 700 + "]" * 700 + "}"
    assert shown_arguments(nested).startswith('{"a": [[[')


@pytest.mark.parametrize("typed", ["abort", "are you sure?", "yikes", "nope", ""])
def test_another_word_is_no_decision(typed: str) -> None:
    assert parse_decision(typed) is None


def test_arguments_that_cannot_be_sent_are_not_run(chat: Callable[..., Chat]) -> None:
    broken = ToolCall("c", "test__echo", '{"text": "\\ud800"}')
    talk = chat(calling(broken), ("ok", answer()), allowed="*")
    assert "not run: the arguments are not a JSON object" in talk.type("hi")


def test_a_model_that_only_calls_has_to_answer(chat: Callable[..., Chat]) -> None:
    again = calling(call("add", a=1, b=2))
    talk = chat(*[again] * MAX_ROUNDS, ("At last.", answer()), allowed="*")
    assert f"{MAX_ROUNDS} rounds of tool calls: the model has to answer now" in talk.type("hi")
    assert talk.last_turn.answer == "At last."
    choices = [asked.tool_choice for asked in talk.client.record.asked]
    assert choices == ["auto"] * MAX_ROUNDS + ["none"]


def test_a_server_that_calls_though_it_may_not_is_not_asked_again(
    chat: Callable[..., Chat],
) -> None:
    again = calling(call("add", a=1, b=2))
    talk = chat(*[again] * (MAX_ROUNDS + 1), allowed="*")
    talk.type("hi")
    assert len(talk.client.record.asked) == MAX_ROUNDS + 1
    assert len(talk.last_turn.steps) == MAX_ROUNDS


def test_mcp_command(chat: Callable[..., Chat]) -> None:
    def run(line: str) -> str:
        done = commands.run_command(talk.session, line, lambda _: None)
        assert isinstance(done, commands.CommandOutput)
        return done.text

    add_server(McpServer("other", ("ls",)))
    talk = chat()
    assert "test.echo: Echo the input text" in run("/mcp")
    assert run("/mcp").endswith("not in use: other; /mcp NAME offers the tools of one")
    run("/mcp off test")
    assert talk.tools.offered == ()
    assert run("/mcp test").startswith("test offers:\ntest.echo: Echo the input text\n")
    assert len(talk.tools.offered) == 10
    for line in ("/mcp none", "/mcp off other", "/mcp test x"):
        with pytest.raises(InvalidRequest):
            run(line)
    with pytest.raises(InvalidRequest, match=r"^usage: /mcp \[NAME \| off NAME\]$"):
        run("/mcp off")
    assert "starting MCP server test; Ctrl+C stops it" in talk.type("/mcp test")
    remove_server("test")
    assert "test is not in mcp.toml any more: /mcp off test" in run("/mcp")


def test_a_full_context_says_how_to_offer_fewer_tools(
    chat: Callable[..., Chat],
    scripted: Callable[..., ScriptedClient],
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = (ContextExceeded("the prompt is too long: shorten the prompt"),)
    hint = 'shorten the prompt; tools = ["NAME", …] in mcp.toml offers fewer of test\n'
    talk = chat(full, full)
    assert hint in talk.type("hi")
    assert "mcp.toml" not in talk.type("/mcp off test", "hi")
    scripted(full)
    run_command_line(["run", "--mcp", "test", "tiny", "hi"])
    assert capsys.readouterr().err.endswith(hint)


def test_a_regex_and_tools_are_not_sent(chat: Callable[..., Chat]) -> None:
    talk = chat()
    screen = talk.type("/set parameter regex a+", "1", "/mcp off test", "2", "/mcp test")
    assert (
        "regex excludes tools, and those of test are offered: /set parameter regex default, or "
        "/mcp off NAME" in screen
    )
    assert [asked.messages[-1].content for asked in talk.client.record.asked] == ["2"]


def test_names_are_valid_and_differ(connections: McpConnections, tmp_path: Path) -> None:
    odd = ("a.b", "a_b", "a b", "é" * 80, "é" * 81)
    tools = ChatTools(_Listing(odd))  # type: ignore[arg-type]
    offered = tools.add("test")
    names = [each.name for each in offered]
    assert len(set(names)) == len(odd)
    assert all(len(name) <= 64 and name.replace("_", "a").isalnum() for name in names)
    assert [each.title for each in offered[:3]] == ["test.a.b", "test.a_b", "test.a b"]
    with pytest.raises(InvalidRequest, match="has 300 tools, of all servers 256 may be offered"):
        ChatTools(_Listing([str(at) for at in range(300)])).add("test")  # type: ignore[arg-type]


class _Listing:
    """Connections whose servers have tools of these names."""

    def __init__(self, names: tuple[str, ...] | list[str]) -> None:
        self._names = names

    def begin_start(self, server: McpServer) -> Future[ServerTools]:
        started: Future[ServerTools] = Future()
        tools = (ServerTool(server.name, name, "", "{}") for name in self._names)
        started.set_result(ServerTools(tuple(tools)))
        return started


def test_calls_are_stored_and_continued(tmp_path: Path, connections: McpConnections) -> None:
    odd = ToolCall("1", "test__echo", '{"text": "\\ud800 é"}')
    step = ToolStep("So:", "hm", (odd, call("add", a=1, b=2)), ("\ud800 é", "3"))
    turn = Turn("q", "a", reasoning="r", steps=(step,))
    kept = replace(step, results=("\N{REPLACEMENT CHARACTER} é", "3"))
    with (
        contextlib.closing(WriterLock(tmp_path / "writers")) as writer,
        contextlib.closing(SessionStore(tmp_path / "sessions.db", writer)) as store,
    ):
        made = store.create(SessionRecord(0, conversation=Conversation(None, (turn,))))
        begun = store.begin_turn(made, "next")
        store.update_turn(begun, Turn("next", "", stopped=True, steps=(step,)))
        assert store.turns(made.id)[1].steps == (kept,)
        store.finish_turn(begun, Turn("next", "done", steps=(step,)))
        conversation = store.read(made.id).conversation
    assert conversation.turns == (
        replace(turn, steps=(kept,)),
        Turn("next", "done", steps=(kept,)),
    )
    path = tmp_path / "chat.json"
    save_chat(path, SavedChat("tiny", SamplingParams(), conversation))
    assert load_chat(path).conversation == conversation
    assert "test.add {" in transcript_markdown("x", conversation)
    session = ChatSession(ScriptedClient(), tmp_path, ModelOptions())
    session.load(None, lambda _: None)
    session.set_conversation(conversation)
    list(session.stream("more"))
    (asked,) = session.client.record.asked  # type: ignore[attr-defined]
    assert [message.role for message in asked.messages] == [
        *("user", "assistant", "tool", "tool", "assistant") * 2,
        "user",
    ]
    assert asked.tools == ()


@pytest.mark.parametrize("arguments", ["", "null", '"x"', "[]", "3", '{"a": ', '{"a": NaN}'])
def test_a_stored_call_with_wrong_arguments_is_sent_with_valid_ones(
    arguments: str, tmp_path: Path
) -> None:
    from localgen.server.openai.tools import parse_arguments

    step = ToolStep("", "", (ToolCall("1", "test__add", arguments),), ("[not run]",))
    path = tmp_path / "chat.json"
    stored = Conversation(None, (Turn("q", "a", steps=(step,)),))
    save_chat(path, SavedChat("tiny", SamplingParams(), stored))
    conversation = load_chat(path).conversation
    assert conversation == stored
    (sent,) = conversation.messages()[1].tool_calls
    assert (sent.name, parse_arguments(sent.arguments, "")) == ("test__add", "{}")


def test_the_arguments_of_calls_count(chat: Callable[..., Chat]) -> None:
    long = call("echo", text="x" * 4000)
    made = chat(calling(long), ("ok", answer()), allowed="test.echo")
    made.type("hi")
    assert made.last_turn.num_chars >= len(long.arguments) + 4000  # and the result
    made.session.set_conversation(made.session.conversation)  # forgets what the server counted
    assert 2000 <= made.session.estimate_used_tokens() < 2100


def test_a_chat_of_an_older_version_has_no_calls(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    saved = SavedChat("tiny", SamplingParams(), Conversation(None, (Turn("q", "a"),)))
    record = json.loads(encode_chat(saved))
    for message in record["messages"]:
        del message["steps"]
    path.write_text(json.dumps(record))
    assert load_chat(path) == saved


# --- localgen run ---


def test_run_refuses_without_a_terminal(
    scripted: Callable[..., ScriptedClient],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tool_calls, "_TERMINAL", "/dev/null")
    client = scripted(calling(call("add", a=1, b=2)), ("I may not.", answer()))
    assert run_command_line(["run", "--mcp", "test", "tiny", "1 + 2"]) == 0
    out, err = capsys.readouterr()
    assert out == "I may not.\n"
    assert '▸ test.add {"a": 1, "b": 2}' in err
    assert "not allowed without a terminal: --mcp-allow test.add allows it" in err
    assert client.record.asked[-1].messages[-1].content == (
        "[not run: it is not allowed, and there was no terminal to ask the user on]"
    )


@pytest.mark.parametrize("stderr", [None, subprocess.DEVNULL], ids=["terminal", "null"])
def test_run_asks_on_the_terminal_if_the_prompt_is_piped(stderr: int | None) -> None:
    code = """
import sys
from localgen.cli.tool_calls import one_shot_handlers
from localgen.mcp_tools.call_question import CallQuestion
handlers, question = one_shot_handlers(), CallQuestion("test.add", "{}", '{"a": 1}')
handlers.on_call(question.title, question.arguments)
print(handlers.ask(question), sys.stdin.read())
"""
    main, other = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=other if stderr is None else stderr,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(other, termios.TIOCSCTTY, 0),
        text=True,
    ) as process:
        screen = ""
        for keys, until in ((b"s\n", "[s]how all: "), (b"y\n", '{"a": 1}\r\n  run it? ')):
            while until not in screen:
                screen += os.read(main, 1024).decode()
            os.write(main, keys)
        out, _ = process.communicate("the prompt")
    os.close(main)
    os.close(other)
    assert out == "Decision.ONCE the prompt\n"
    assert screen.count("▸ test.add {}") == 1


def test_run_with_allowed_tools(
    scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(calling(call("add", a=1, b=2), text="So:"), ("It is 3.", answer()))
    allowed = ["run", "--mcp", "test", "--mcp-allow", "test.a*", "tiny", "1 + 2"]
    assert run_command_line(allowed) == 0
    assert capsys.readouterr().out == "So:\nIt is 3.\n"
    scripted(calling(call("add", a=1, b=2), text="So:"), ("It is 3.", answer()))
    assert run_command_line([*allowed, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] == "It is 3."
    assert record["steps"][0]["results"] == ["3"]
    assert record["steps"][0]["calls"][0]["name"] == "test__add"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mcp", "nope"], "no MCP server nope: servers are test"),
        (["--mcp-allow", "test.add"], "--mcp-allow needs --mcp NAME"),
        (["--mcp", "test", "--mcp-allow", "test.nope"], "--mcp-allow test.nope: no such tool"),
        (["--mcp", "test", "--regex", "a"], "give only one of --mcp and --regex: "),
        (["--mcp", "test", "--grammar", "a"], "give only one of --mcp and --grammar: "),
        (["--mcp", "test", "--regex", "a", "--url", "http://h/v1"], "give only one of --mcp and"),
        (["--mcp", "test", "--batch", "x", "--out", "y"], "--mcp does not apply to --batch"),
    ],
)
def test_run_with_wrong_options(
    options: list[str],
    message: str,
    scripted: Callable[..., ScriptedClient],
    capsys: pytest.CaptureFixture[str],
) -> None:
    scripted()
    prompt = [] if "--batch" in options else ["hi"]
    assert run_command_line(["run", *options, "-m", "tiny", *prompt]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"localgen: {message}")
    assert err.count("\n") == 1


def test_a_server_that_fails_is_an_error_of_its_own(
    scripted: Callable[..., ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    add_server(McpServer("bad", (sys.executable, PROGRAM, "die")))
    client = scripted()
    assert run_command_line(["run", "--mcp", "bad", "tiny", "hi"]) == 21
    assert capsys.readouterr().err.startswith("localgen: MCP server bad ")
    assert client.record.asked == []


def test_steps_of_another_version_of_the_answer(chat: Callable[..., Chat]) -> None:
    add = call("add", a=1, b=2)
    talk = chat(calling(add), ("3", answer()), calling(add), ("three", answer()), allowed="*")
    talk.type("1 + 2", "/regen")
    (turn,) = talk.session.conversation.turns
    assert turn == replace(turn, answer="three", steps=(ToolStep("", "", (add,), ("3",)),))
