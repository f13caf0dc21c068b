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
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, ProgressBar, Static
from textual.widgets.option_list import Option

from localgen.backends.errors import LocalgenError, ModelNotFound
from localgen.chats import report
from localgen.chats.inert import one_line
from localgen.client import ModelCard
from localgen.client.pulling import Offer


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


class ModelPicker(ModalScreen[str | None]):
    """Closes with the name of the model that was loaded."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Stop, or close"),
        Binding("down", "move(1)", "Next", show=False),
        Binding("up", "move(-1)", "Before", show=False),
    ]
    DEFAULT_CSS = """
    ModelPicker { align: center middle; background: $background 60%; }
    ModelPicker > Vertical {
        width: 90%; max-width: 90; height: 80%; padding: 0 1;
        border: round $primary; background: $surface; border-title-color: $primary;
    }
    ModelPicker Input { margin: 0 0 1 0; }
    ModelPicker OptionList { height: 1fr; border: none; background: $surface; padding: 0; }
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
        self._shown: list[Choice] = []
        self._cancelled = threading.Event()
        self._is_busy = False
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
            yield Static("looking", id="told", markup=False)
            yield ProgressBar(total=1.0, show_eta=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).can_focus = False
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
        self._choices = [*_here(cards), *_elsewhere(cards, offers)]
        if not self._is_busy:
            self._tell("")
        self._fill(self.query_one(Input).value)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        typed = event.value.strip()
        at = self.query_one(OptionList).highlighted
        exact = any(choice.name == typed for choice in self._choices)
        if at is not None and self._shown and not exact:
            self.take(self._shown[at].name)
        elif typed:
            self.take(typed)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.take(self._shown[event.option_index].name)

    def action_move(self, by: int) -> None:
        found = self.query_one(OptionList)
        if by > 0:
            found.action_cursor_down()
        else:
            found.action_cursor_up()

    def action_leave(self) -> None:
        if self._is_busy:
            self._cancelled.set()
            self._shelf.stop_loading()
        else:
            self.dismiss(None)

    def take(self, name: str) -> None:
        """Load a model, fetched first where it is in the list as one to be fetched."""
        if self._is_busy:
            return
        offered = next((each for each in self._choices if each.name == name), None)
        is_sure = self._asked_to_pull == name or (offered is not None and not offered.is_here)
        self._is_busy = True
        self.add_class("-busy")
        self._cancelled.clear()
        self._fetch_and_load(name, is_sure)

    @work(exclusive=True, group="take")
    async def _fetch_and_load(self, name: str, pull: bool) -> None:
        try:
            await asyncio.to_thread(self._get, name, pull)
        except Cancelled:
            self._tell(f"stopped: {one_line(name)} goes on from there when it is fetched again")
        except ModelNotFound as error:
            await self._offer(name, error)
        except LocalgenError as error:
            said = "stopped" if self._cancelled.is_set() else error.message
            self._tell(said, fault=not self._cancelled.is_set())
        else:
            self.dismiss(name)
        finally:
            self._is_busy = False
            self.remove_class("-busy")

    async def _offer(self, name: str, error: ModelNotFound) -> None:
        if await asyncio.to_thread(self._shelf.can_pull, name):
            self._asked_to_pull = name
            self._tell(f"{one_line(name)} is not here: Enter again fetches it")
        else:
            self._tell(error.message, fault=True)

    def _get(self, name: str, pull: bool) -> None:
        """In a thread."""
        if pull and self._shelf.can_pull(name):
            self.app.call_from_thread(self._tell, f"asking the hub for {one_line(name)}")
            self._shelf.pull(name, lambda here, total: self._on_bytes(name, here, total))
        self.app.call_from_thread(self._tell, f"loading {one_line(name)}")
        self._shelf.load(name, self._on_share)

    def _on_bytes(self, name: str, here: int, total: int) -> None:
        if self._cancelled.is_set():
            raise Cancelled
        share = here / total if total else 1.0
        line = f"fetching {one_line(name)}: {report.size(here)} of {report.size(total)}"
        self.app.call_from_thread(self._progress, share, line)

    def _on_share(self, share: float) -> None:
        self.app.call_from_thread(self._progress, share, None)

    def _progress(self, share: float, line: str | None) -> None:
        self.query_one(ProgressBar).update(progress=share)
        if line is not None:
            self._tell(line)

    def _fill(self, text: str) -> None:
        wanted = text.casefold().split()
        self._shown = [
            choice
            for choice in self._choices
            if all(part in f"{choice.name} {choice.about}".casefold() for part in wanted)
        ]
        found = self.query_one(OptionList)
        found.clear_options()
        found.add_options([Option(self._drawn(choice)) for choice in self._shown])
        names = [choice.name for choice in self._shown]
        at = names.index(self._current) if self._current in names else 0
        found.highlighted = at if self._shown else None

    def _drawn(self, choice: Choice) -> Content:
        mark = "● " if choice.name == self._current else "  "
        style = "bold" if choice.is_here else "dim"
        return Content.assemble(mark, (one_line(choice.name), style), (f"  {choice.about}", "dim"))

    def _tell(self, message: str, *, fault: bool = False) -> None:
        told = self.query_one("#told", Static)
        told.update(Content(one_line(message)))
        told.set_class(fault, "-fault")


def _here(cards: list[ModelCard]) -> Iterator[Choice]:
    for card in cards:
        size = report.size(card.size_bytes) if card.size_bytes else ""
        parts = (size, card.state, card.source)
        yield Choice(card.name, " · ".join(part for part in parts if part), is_here=True)


def _elsewhere(cards: list[ModelCard], offers: list[Offer]) -> Iterator[Choice]:
    names = {card.name for card in cards}
    for offer in offers:
        if offer.name not in names:
            size = f" · {report.size(offer.size_bytes)}" if offer.size_bytes else ""
            yield Choice(offer.name, f"{offer.title}{size} · to be fetched", is_here=False)
