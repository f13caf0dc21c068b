"""Choosing a model: those that are here, those that can be fetched, and the wait for either."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, ProgressBar, Static

from localgen.backends import units
from localgen.backends.errors import InvalidRequest, LocalgenError, ModelNotFound
from localgen.backends.terminal_text import one_line
from localgen.chat.session import BUILT_IN
from localgen.client import ModelCard, pullable_models
from localgen.client.pullable_models import Offer
from localgen.tui.chat.active_session import OpenSession, Stopped
from localgen.tui.widgets.picker import Picker, has_words, named_row

_LOOKING, _NONE_SO = "looking", "None of the list is called so."


class Cancelled(Exception):
    """The user has stopped a download; what is here stays here."""


class Shelf(Protocol):
    """Where models come from. Methods take their time and raise LocalgenError."""

    def cards(self) -> list[ModelCard]:
        """What can be named."""

    def offers(self) -> list[Offer]:
        """What can be fetched."""

    def can_pull(self, name: str) -> bool:
        """Whether a name means something that can be fetched and is not here."""

    def pull(self, name: str, on_bytes: Callable[[int, int], None]) -> str:
        """Fetch it; what it is called then."""

    def load(self, name: str, on_progress: Callable[[float], None]) -> None:
        """Take it for the session."""

    def stop_loading(self) -> None:
        """End load() from another thread."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of the list. is_here: it need not be fetched."""

    name: str
    about: str
    is_here: bool


class ModelPicker(Picker[str]):
    """Closes with the name of the model that was loaded. is_busy: one is loaded or fetched."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Stop, or close")]
    DEFAULT_CSS = """
    ModelPicker > Vertical { max-width: 90; }
    ModelPicker #told { height: auto; color: $text-muted; }
    ModelPicker #told.-fault { color: $error; }
    ModelPicker ProgressBar { display: none; width: 1fr; }
    ModelPicker.-busy ProgressBar { display: block; }
    ModelPicker Bar { width: 1fr; }
    """

    def __init__(self, shelf: Shelf, wanted: str = "", current: str = "") -> None:
        super().__init__()
        self._shelf, self._wanted, self._current = shelf, wanted, current
        self._choices: list[Choice] = []
        self._cancelled = threading.Event()
        self.is_busy = False
        self._loaded: str | None = None
        self._asked_to_pull = ""

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Models"
            box.border_subtitle = "Enter takes one, Esc closes"
            yield Input(
                self._wanted,
                placeholder="part of a name, a path, or user/repo[:QUANT]",
                compact=True,
                select_on_focus=False,
            )
            yield OptionList(markup=False)
            yield Static(_LOOKING, id="told", markup=False)
            yield ProgressBar(total=1.0, show_eta=False)

    def on_mount(self) -> None:
        self.look()
        if self._wanted:
            self.take(self._wanted)

    @work(exclusive=True, group="look")
    async def look(self) -> None:
        """Fill the list."""
        try:
            cards = await asyncio.to_thread(self._shelf.cards)
            offers = await asyncio.to_thread(self._shelf.offers)
        except LocalgenError as error:
            self._tell(error.message, fault=True)
            return
        if not self.is_open:
            return
        self._choices = [*_here(cards), *_elsewhere(cards, offers)]
        # why the model that was wanted cannot be had is not to be wiped away
        if str(self.query_one("#told", Static).content) == _LOOKING:
            self._tell("")
        self._fill(self.query_one(Input).value)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        typed = event.value.strip()
        exact = any(choice.name == typed for choice in self._choices)
        if self.highlighted is not None and not exact:
            self.take(self.highlighted)
        elif typed:
            self.take(typed)

    def on_screen_resume(self) -> None:
        """What stood before it is gone."""
        if self._loaded is not None:
            self.dismiss(self._loaded)

    def action_leave(self) -> None:
        if self.is_busy:
            self._stop()
        else:
            self.dismiss(None)

    def take(self, chosen: str) -> None:
        """Load a model, fetched first where it is in the list as one to be fetched."""
        if self.is_busy:
            return
        offered = next((each for each in self._choices if each.name == chosen), None)
        is_sure = self._asked_to_pull == chosen or (offered is not None and not offered.is_here)
        self.is_busy = True
        self.add_class("-busy")
        self._cancelled.clear()
        self._fetch_and_load(chosen, is_sure)

    @work(exclusive=True, group="take")
    async def _fetch_and_load(self, name: str, pull: bool) -> None:
        try:
            await asyncio.to_thread(self._get, name, pull)
        except asyncio.CancelledError:  # the program ends, and would wait for the thread
            self._stop()
            raise
        except Cancelled:
            self._tell(f"stopped: {one_line(name)} goes on from there when it is fetched again")
        except ModelNotFound as error:
            await self._offer(name, error)
        except LocalgenError as error:
            said = "stopped" if self._cancelled.is_set() else error.message
            self._tell(said, fault=not self._cancelled.is_set())
        else:
            self._loaded = name
        finally:
            self.is_busy = False
            self.remove_class("-busy")
        # only what stands before everything can be closed
        if self._loaded is not None and self.app.screen is self:
            self.dismiss(self._loaded)

    def _stop(self) -> None:
        self._cancelled.set()
        self._shelf.stop_loading()

    async def _offer(self, name: str, error: ModelNotFound) -> None:
        if await asyncio.to_thread(self._shelf.can_pull, name):
            self._asked_to_pull = name
            self._tell(f"{one_line(name)} is not here: Enter again fetches it")
        else:
            self._tell(error.message, fault=True)

    def _get(self, name: str, pull: bool) -> None:
        """In a thread."""
        if pull and self._shelf.can_pull(name):
            self.call_later(self._tell, f"asking the hub for {one_line(name)}")
            self._shelf.pull(name, lambda here, total: self._on_bytes(name, here, total))
        if self._cancelled.is_set():
            raise Cancelled
        self.call_later(self._tell, f"loading {one_line(name)}")
        self._shelf.load(name, self._on_share)

    def _on_bytes(self, name: str, here: int, total: int) -> None:
        if self._cancelled.is_set():
            raise Cancelled
        share = here / total if total else 1.0
        line = f"fetching {one_line(name)}: {units.size(here)} of {units.size(total)}"
        self.call_later(self._progress, share, line)

    def _on_share(self, share: float) -> None:
        self.call_later(self._progress, share, None)

    def _progress(self, share: float, line: str | None) -> None:
        if not self.is_busy:  # it was on its way when the work ended
            return
        self.query_one(ProgressBar).update(progress=share)
        if line is not None:
            self._tell(line)

    def _fill(self, typed: str) -> None:
        found = [
            choice for choice in self._choices if has_words(f"{choice.name} {choice.about}", typed)
        ]
        self.show(((choice.name, self._drawn(choice)) for choice in found), self._current)
        told = str(self.query_one("#told", Static).content)
        if self._choices and (not told or told.startswith(_NONE_SO)):
            self._tell("" if found else f"{_NONE_SO} Enter looks for {one_line(typed.strip())}")

    def _drawn(self, choice: Choice) -> Content:
        style = "bold" if choice.is_here else "dim"
        is_current = choice.name == self._current
        return named_row(choice.name, choice.about, is_current=is_current, style=style)

    def _tell(self, message: str, *, fault: bool = False) -> None:
        told = self.query_one("#told", Static)
        told.update(Content(one_line(message)))
        told.set_class(fault, "-fault")


def _here(cards: list[ModelCard]) -> Iterator[Choice]:
    for card in cards:
        size = units.size(card.size_bytes) if card.size_bytes else ""
        parts = (size, card.state, card.source)
        yield Choice(card.name, " · ".join(part for part in parts if part), is_here=True)


def _elsewhere(cards: list[ModelCard], offers: list[Offer]) -> Iterator[Choice]:
    names = {card.name for card in cards}
    for offer in offers:
        if offer.name not in names:
            size = f" · {units.size(offer.size_bytes)}" if offer.size_bytes else ""
            yield Choice(offer.name, f"{offer.title}{size} · to be fetched", is_here=False)


class SessionShelf:
    """Another server fetches its models itself."""

    def __init__(self, opened: OpenSession) -> None:
        self._opened = opened
        self._is_elsewhere = opened.session.is_elsewhere

    def cards(self) -> list[ModelCard]:
        return self._opened.session.client.models()

    def offers(self) -> list[Offer]:
        return [] if self._is_elsewhere else pullable_models.offers()

    def can_pull(self, name: str) -> bool:
        return not self._is_elsewhere and pullable_models.can_pull(name)

    def pull(self, name: str, on_bytes: Callable[[int, int], None]) -> str:
        if self._is_elsewhere:
            raise InvalidRequest("another server fetches its models itself")
        return pullable_models.pull(name, on_bytes)

    def load(self, name: str, on_progress: Callable[[float], None]) -> None:
        """InvalidRequest: the user has ended it."""
        built_in = name == BUILT_IN and not self._is_elsewhere
        try:
            self._opened.use_model(None if built_in else name, on_progress)
        except Stopped as stopped:
            raise InvalidRequest("stopped") from stopped

    def stop_loading(self) -> None:
        self._opened.stop_command()
