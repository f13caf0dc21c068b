"""A chat with a model on another server: what is shown, and what is not available."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from plain_openai import PlainServer, answer, chunk, plain_server
from rich.console import Console
from scripted_client import answer as made_answer

from localgen.backends.types import PromptProgress, Timings
from localgen.chat import report
from localgen.chat.conversation import Turn
from localgen.chat.parameters import ModelOptions
from localgen.chat.session import ChatSession
from localgen.client import Client
from localgen.client.connection import EndpointConnection
from localgen.client.endpoints import Endpoint
from localgen.repl.repl import Repl


@pytest.fixture
def server() -> Iterator[PlainServer]:
    with plain_server({"id": "big", "max_model_len": 4096}, "small") as running:
        yield running


class Chat:
    """A chat with scripted input lines, and its screen."""

    def __init__(self, server: PlainServer, folder: Path) -> None:
        self.screen = io.StringIO()
        client = Client(EndpointConnection(Endpoint(server.url)))
        self.session = ChatSession(client, folder, ModelOptions())
        self.session.load("big", lambda _: None)

    def type(self, *lines: str) -> str:
        """Type the lines, then leave; returns the whole output."""
        waiting = list(lines)

        def read(_prompt: str) -> str:
            if not waiting:
                raise EOFError
            return waiting.pop(0)

        Repl(self.session, Console(file=self.screen, width=200), read).run()
        return self.screen.getvalue()


@pytest.fixture
def chat(server: PlainServer, tmp_path: Path) -> Chat:
    return Chat(server, tmp_path)


def test_chat_over_openais_protocol(chat: Chat, server: PlainServer) -> None:
    screen = chat.type("hello", "and you", "/undo", "/regen")
    assert f"big · at {server.url} · context 4,096\n" in screen
    assert "note: TTFT and tokens/s are measured here, the network included\n" in screen
    assert "re: and you" in screen
    assert " tok/s · first token " in screen
    assert " · 42 of 4,096" in screen
    spoken = [message["content"] for message in server.asked[1]["messages"]]
    assert spoken == ["hello", "re: hello ", "and you"]
    # the model list is requested once, not before each prompt
    assert [seen.path for seen in server.seen].count("/v1/models") == 1


def test_reasoning_shows_and_is_not_sent_back(chat: Chat, server: PlainServer) -> None:
    server.events = [chunk({"reasoning_content": "let me see"}), *answer("four")]
    screen = chat.type("2 + 2?", "sure?")
    assert "let me see" in screen
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "four"}


def test_commands_for_the_own_server_are_rejected(chat: Chat) -> None:
    screen = chat.type("/set ctx 100", "/show template", "/stats", "/show info", "/model")
    assert "ctx: this model is on a remote server" in screen
    assert "which does not report its chat template" in screen
    assert "does not report statistics" in screen
    assert "context   4,096\n" in screen
    assert "MB" not in screen
    assert "big\nsmall\n" in screen


def test_settings_are_the_users_or_unknown(chat: Chat) -> None:
    screen = chat.type("/set parameter temp 0.5", "/show parameters")
    assert "temp = 0.5" in screen
    rows = [line.split() for line in screen.splitlines()]
    assert ["temperature", "0.5", "yours"] in rows
    assert ["top_k", "-"] in rows


def test_model_command_selects_a_remote_model(chat: Chat, server: PlainServer) -> None:
    screen = chat.type("/model small", "hello", "/model nix")
    assert server.asked[0]["model"] == "small"
    assert "note: nix is not in the server's list: big, small" in screen


def test_an_answer_that_breaks_off_is_not_asked_again(chat: Chat, server: PlainServer) -> None:
    server.events = answer("half", "an answer")[:2]
    screen = chat.type("hello")
    assert "in the middle of the answer" in screen
    assert "sending the prompt again" not in screen
    assert len(server.asked) == 1
    (kept,) = chat.session.conversation.turns
    assert kept == Turn("hello", "half", stopped=True, summary=kept.summary)
    assert kept.summary.startswith("interrupted: ")


def test_a_server_that_goes_away_does_not_end_the_chat(chat: Chat, server: PlainServer) -> None:
    chat.type("hello")
    server.close()
    screen = chat.type("still there?", "/show system")
    assert "connection refused" in screen
    assert "no system prompt" in screen
    assert len(chat.session.conversation.turns) == 1


def test_the_line_of_figures_leaves_out_what_is_not_known() -> None:
    timings = Timings(ttft_ms=120, predicted_n=5, predicted_ms=400, predicted_per_second=10)
    known = made_answer(
        prompt_tokens=None,
        cached_tokens=None,
        completion_tokens=5,
        ctx=None,
        timings=timings,
        estimated=True,
        client_measured=True,
    )
    assert report.completion_line(known) == "~10.0 tok/s · first token 120 ms"


def test_the_live_line_marks_guesses() -> None:
    figures = report.LiveFigures(2.0, 1.0, 11, 50, None, "~")
    line = "TTFT 1.00 s · ~11 tokens at ~10.0/s · context ~50"
    assert report.live_stats_line(figures) == line
    assert report.stopped_line(figures) == "~10.0 tok/s · first token 1.00 s · ~50"


def test_the_live_line_has_the_progress_of_the_prompt() -> None:
    figures = report.LiveFigures(
        12.34, None, 0, 4100, 8192, prompt=PromptProgress(computed=1024, total=4012)
    )
    line = "waiting 12.3 s · prompt 1,024 of 4,012 tokens · context 4,012/8,192 · Ctrl+C stops"
    assert report.live_stats_line(figures) == line
    assert report.waiting_text(0.5, None) == "waiting 0.5 s"
    writing = replace(figures, ttft_s=12.0, num_tokens=1, context_tokens=4013, context_mark="")
    assert report.live_stats_line(writing) == "TTFT 12.00 s · 1 token · context 4,013/8,192"


def test_a_stopped_answer_has_the_line_of_a_finished_one() -> None:
    figures = report.LiveFigures(2.111, 0.111, 126, 1770, 8192)
    line = "62.5 tok/s · first token 111 ms · ~1,770 of 8,192"
    assert report.stopped_line(figures) == line


def test_a_limit_is_told_beside_other_notes() -> None:
    cut = made_answer(finish_reason="length", client_measured=True, notes=("something",))
    assert [line.split(":")[0] for line in report.completion_warnings(cut)] == [
        "cut at the token limit",
        "something",
    ]
