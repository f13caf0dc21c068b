"""A TUI over clients that answer from a script."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from scripted_client import ScriptedClient
from textual.pilot import Pilot
from textual.widgets import Static

from localgen.backends.errors import ServerUnavailable
from localgen.backends.model_info import LoadOptions, ModelInfo
from localgen.chat.conversation import Turn
from localgen.chat.database import WriterLock
from localgen.chat.parameters import ModelOptions
from localgen.chat.session import OnProgress
from localgen.chat.session_store import SessionStore
from localgen.client import ModelCard, TextDelta
from localgen.client.snapshot import ServerSnapshot
from localgen.client.suggested_models import SuggestedModel
from localgen.tui.chat.active_session import ActiveSession
from localgen.tui.chat.app import ChatApp
from localgen.tui.chat.app_context import AppContext
from localgen.tui.chat.main_screen import MainScreen
from localgen.tui.chat.prompt import Prompt
from localgen.tui.chat.session_manager import SessionManager
from localgen.tui.feed import ServerMonitor

SUGGESTED = (
    SuggestedModel("smollm2", "SmolLM2 135M Instruct", 98_362_432, True, 180.0),
    SuggestedModel("big-8b", "Big 8B Instruct", 4_900_000_000, False),
)
Say = str | TextDelta | BaseException | threading.Event

Play = Callable[["Tui", Pilot[None]], Awaitable[None]]
MakeTui = Callable[..., "Tui"]


class PacedClient(ScriptedClient):
    """A scripted client. An Event in its script waits until it is set or the client is aborted."""

    def __init__(
        self, scripts: Sequence[Sequence[object]] = (), say: Callable[[str], None] = print
    ) -> None:
        super().__init__()
        self.scripts = list(scripts)  # type: ignore[arg-type]
        self.say = say
        self.was_cut = threading.Event()
        self.closed = False
        self.load_gate: threading.Event | None = None

    def load(
        self,
        model: str | None,
        options: LoadOptions,
        on_progress: OnProgress = print,
        keep_alive: str | None = None,
    ) -> ModelInfo:
        """Loading stops at 50 % until `load_gate` is set, if there is one."""
        info = super().load(model, options, on_progress, keep_alive)
        self._wait(self.load_gate)
        return info

    def _wait(self, gate: threading.Event | None) -> None:
        while gate is not None and not gate.wait(0.01):
            if self.was_cut.is_set():
                raise ServerUnavailable("the connection was cut")

    def _play(self, script):  # type: ignore[no-untyped-def]
        for tokens, step in enumerate(script, 1):
            if isinstance(step, threading.Event):
                self._wait(step)
                continue
            if self.was_cut.is_set():
                raise ServerUnavailable("the connection was cut")
            if isinstance(step, BaseException):
                raise step
            yield TextDelta(step, tokens) if isinstance(step, str) else step

    def abort(self) -> None:
        self.was_cut.set()

    def close(self) -> None:
        self.closed = True

    def models(self) -> list[ModelCard]:
        return [
            ModelCard("tiny", "/models/tiny.gguf", 11_500_000, "loaded", "built-in"),
            ModelCard("other", "/models/other.gguf", 4_900_000_000, "available", "cache"),
        ]


class NoServerMonitor:
    """A server that is never found."""

    def snapshots(self) -> Iterator[ServerSnapshot]:
        raise ServerUnavailable("no server")

    def close(self) -> None:
        pass


class Tui:
    """A TUI with a store. scripts: the answers in order, whichever session asks."""

    def __init__(
        self,
        folder: Path,
        *scripts: Sequence[object],
        model: str | None = None,
        options: ModelOptions | None = None,
        watch: Callable[[], ServerMonitor] = NoServerMonitor,
        url: str = "",
        notice: str = "",
    ) -> None:
        self.scripts: list[Sequence[object]] = list(scripts)
        self.clients: list[PacedClient] = []
        self.load_gate: threading.Event | None = None
        self._s = 1000.0
        self.writer = WriterLock(folder / "writers")
        self.store = SessionStore(folder / "sessions.db", self.writer, clock=self._now)
        self.context = AppContext(
            store=self.store,
            make_client=self._client,
            options=options or ModelOptions(),
            state_dir=folder,
            server_url=url,
            model=model,
            notice=notice,
            suggest_models=lambda: SUGGESTED,
            clock=lambda: 0.0,
            now_s=lambda: 1000.0 + 7 * 60.0,
        )
        self.manager = SessionManager(self.context)
        self.app = ChatApp(self.manager, watch, "this machine", first_retry_s=1000.0)

    @property
    def main(self) -> MainScreen:
        return self.app.main_screen

    @property
    def opened(self) -> ActiveSession:
        assert self.main.current_session is not None
        return self.main.current_session

    @property
    def prompt(self) -> Prompt:
        return self.app.screen.query_one(Prompt)

    @property
    def prompt_text(self) -> str:
        """The text of the prompt on the main screen."""
        return self.main.query_one(Prompt).text

    @property
    def asked(self) -> list[str]:
        """The prompts sent, in the order of the clients."""
        return [asked.messages[-1].content for each in self.clients for asked in each.record.asked]

    def close(self) -> None:
        self.manager.close()
        self.store.close()
        self.writer.close()

    @asynccontextmanager
    async def running(self, size: tuple[int, int] = (120, 40)) -> AsyncIterator[Pilot[None]]:
        async with self.app.run_test(size=size) as pilot:
            await self.until(lambda: self.main.current_session is not None)
            await pilot.pause()
            yield pilot

    def gate_loads(self) -> threading.Event:
        """Hold all loads at 50 % until the returned event is set."""
        self.load_gate = threading.Event()
        for client in self.clients:
            client.load_gate = self.load_gate
        return self.load_gate

    async def until(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Wait for a condition; fails the test after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not come to that"
            await asyncio.sleep(0.01)

    async def ask(self, pilot: Pilot[None], text: str) -> None:
        """Type a prompt, send it and wait for the complete answer."""
        await self.type(pilot, text)
        await pilot.press("enter")
        await self.wait_until_idle(pilot)

    async def open_new(self, pilot: Pilot[None]) -> None:
        """Open a new, empty session."""
        before = self.opened
        await pilot.press("ctrl+n")
        await self.until(lambda: self.opened is not before)
        await pilot.pause()

    async def type(self, pilot: Pilot[None], text: str) -> None:
        self.prompt.insert(text)
        await pilot.pause()

    async def wait_until_idle(self, pilot: Pilot[None]) -> None:
        """Wait until no worker runs and no session answers."""
        await pilot.pause()
        await self.until(lambda: not self.app.workers._workers or self._only_waits())
        await self.until(lambda: not self.manager.answering_sessions)
        self.app.tick()
        await pilot.pause()

    def screen_text(self) -> str:
        """The lines of the screen."""
        return "\n".join(
            "".join(segment.text for segment in strip)
            for strip in self.app.screen._compositor.render_strips()
        )

    def _only_waits(self) -> bool:
        # a worker that waits for a dialog does not end before the dialog is answered
        return len(self.app.screen_stack) > 1

    def _client(self, say: Callable[[str], None]) -> PacedClient:
        client = PacedClient(say=say)
        client.url, client.load_gate = self.context.server_url, self.load_gate
        client.scripts = self.scripts  # type: ignore[assignment]
        self.clients.append(client)
        return client

    def _now(self) -> float:
        self._s += 1.0
        return self._s


def play(tui: Tui, scene: Play, size: tuple[int, int] = (120, 40)) -> None:
    async def run() -> None:
        try:
            async with tui.running(size) as pilot:
                await scene(tui, pilot)
        finally:
            tui.close()

    asyncio.run(run())


def notice_text(tui: Tui) -> str:
    return str(tui.main.query_one("#message", Static).content)


def turns(tui: Tui) -> list[Turn]:
    return list(tui.opened.chat.conversation.turns)


async def press(tui: Tui, pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await tui.wait_until_idle(pilot)


def wait(condition: Callable[[], object]) -> None:
    """Wait for a condition in a test without a screen."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_answer(tui: Tui, opened: ActiveSession) -> Turn:
    """Wait until the session's current answer has ended; returns its turn."""
    assert opened.last_stream is not None
    assert opened.last_stream.ended.wait(10)
    tui.manager.finalize_answers()
    assert opened.answer_stream is None
    return opened.chat.conversation.turns[-1]
