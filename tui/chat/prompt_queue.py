"""Prompts on their way to a session: each waits until the answer before it has ended."""

from __future__ import annotations

from asyncio import Lock

from localgen.tui.chat.active_session import ActiveSession
from localgen.tui.chat.main_screen import MainScreen
from localgen.tui.chat.session_actions import SessionActions
from localgen.tui.chat.session_manager import SessionManager


class PromptQueue:
    """Sends the queued prompts of the sessions.

    lock: held while a session is asked, which may load a model first.
    """

    def __init__(
        self, main_screen: MainScreen, manager: SessionManager, actions: SessionActions
    ) -> None:
        self.lock = Lock()
        self._main_screen, self._manager, self._actions = main_screen, manager, actions

    def add(self, typed: str) -> None:
        """Queue a prompt for the current session, and send it if nothing waits."""
        opened = self._actions.current_session
        if not opened.is_busy:  # one that is queued leaves the view where it is
            self._main_screen.action_show_latest()
        opened.queued_prompts.append(typed)
        self._ask_in_worker(opened)

    def ask_waiting(self) -> None:
        """Send what waited for an answer that has ended; after a failure, give it back."""
        for opened in self._manager.active_by_id.values():
            if opened.queued_prompts and not opened.is_busy and not self.lock.locked():
                last = opened.last_stream
                if last is not None and last.error:
                    self.give_back(opened)
                else:
                    self._ask_in_worker(opened)

    def give_back(self, opened: ActiveSession) -> None:
        """Put the queued prompts of a session back into its prompt."""
        if opened.queued_prompts:
            self._main_screen.put_before(opened, "\n".join(opened.queued_prompts))
            opened.queued_prompts.clear()

    def _ask_in_worker(self, opened: ActiveSession) -> None:
        self._main_screen.app.run_worker(self._ask_next(opened), group="ask")

    async def _ask_next(self, opened: ActiveSession) -> None:
        """Send the first queued prompt, unless the session is busy: then it waits."""
        async with self.lock:
            if opened.is_busy or not opened.queued_prompts:
                return
            text = opened.queued_prompts.popleft()
            if not await self._actions.require_model(opened) or not await self._actions.ask(
                opened, text
            ):
                opened.queued_prompts.appendleft(text)
                self.give_back(opened)
                return
        await self._actions.run_in_thread(self._manager.reload_summaries)
        if self._main_screen.is_shown:
            self._main_screen.sync()
