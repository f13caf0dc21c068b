"""The model picker: installed and downloadable models, with download progress."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, ProgressBar, Static

from localgen.backends import units
from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.terminal_text import escape_name, one_line
from localgen.client import ModelCard, pullable_models
from localgen.client.pullable_models import PullableModel
from localgen.tui.chat.active_session import ActiveSession
from localgen.tui.widgets.picker import Picker, matches_query, name_row

_LOADING_TEXT, _NO_MATCH_TEXT = "loading the list", "No match in the list."


class PullCancelled(Exception):
    """The user has stopped a download; the part already downloaded is kept."""


class ModelService(Protocol):
    """Source of models. Methods block and raise LocalgenError."""

    def list_models(self) -> list[ModelCard]:
        """Models that can be loaded."""

    def pullable_models(self) -> list[PullableModel]:
        """Models that can be downloaded."""

    def can_pull(self, name: str) -> bool:
        """Return True if the name is of a model that can be downloaded and is not installed."""

    def pull(self, name: str, on_progress: Callable[[int, int], None]) -> str:
        """Download a model; returns its installed name. on_progress: downloaded and total bytes."""


@dataclass(frozen=True, slots=True)
class ModelPickerRow:
    """A row of the list. is_installed: no download needed."""

    name: str
    description: str
    is_installed: bool


class ModelPicker(Picker[str]):
    """Closes with the name of a model to load. is_busy: one is being looked up or downloaded."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "Stop, or close")]
    DEFAULT_CSS = """
    ModelPicker > Vertical { max-width: 90; }
    ModelPicker #message { height: auto; color: $text-muted; }
    ModelPicker #message.-error { color: $error; }
    ModelPicker ProgressBar { display: none; width: 1fr; }
    ModelPicker.-busy ProgressBar { display: block; }
    ModelPicker Bar { width: 1fr; }
    """

    def __init__(self, model_service: ModelService, requested: str = "", current: str = "") -> None:
        super().__init__()
        self._model_service, self._requested, self._current = model_service, requested, current
        self._rows: list[ModelPickerRow] = []
        self._cancelled = threading.Event()
        self.is_busy = False
        self._chosen: str | None = None
        self._offered_pull = ""

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Models"
            box.border_subtitle = "Enter selects, Esc closes"
            yield Input(
                self._requested,
                placeholder="part of a name, a path, or user/repo[:QUANT]",
                compact=True,
                select_on_focus=False,
            )
            yield OptionList(markup=False)
            yield Static(_LOADING_TEXT, id="message", markup=False)
            yield ProgressBar(total=1.0, show_eta=False)

    def on_mount(self) -> None:
        self.refresh_models()
        if self._requested:
            self.select_item(self._requested)

    @work(exclusive=True, group="refresh")
    async def refresh_models(self) -> None:
        """Load the list of models."""
        try:
            cards = await asyncio.to_thread(self._model_service.list_models)
            offers = await asyncio.to_thread(self._model_service.pullable_models)
        except LocalgenError as error:
            self._show_message(error.message, is_error=True)
            return
        if not self.is_open:
            return
        self._rows = [*_installed_rows(cards), *_pullable_rows(cards, offers)]
        # keep the error about the requested model
        if str(self.query_one("#message", Static).content) == _LOADING_TEXT:
            self._show_message("")
        self._filter_rows(self.query_one(Input).value)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter_rows(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        typed = event.value.strip()
        exact = any(choice.name == typed for choice in self._rows)
        if self.highlighted is not None and not exact:
            self.select_item(self.highlighted)
        elif typed:
            self.select_item(typed)

    def on_screen_resume(self) -> None:
        """Close if a model was downloaded while another screen was on top."""
        if self._chosen is not None:
            self.dismiss(self._chosen)

    def action_cancel(self) -> None:
        if self.is_busy:
            self._cancelled.set()
        else:
            self.dismiss(None)

    def select_item(self, item: str) -> None:
        """Close with an installed model; download one that is listed as downloadable first."""
        if self.is_busy:
            return
        offered = next((each for each in self._rows if each.name == item), None)
        if offered is not None and offered.is_installed:
            self.dismiss(item)
            return
        is_sure = self._offered_pull == item or offered is not None
        self.is_busy = True
        self.add_class("-busy")
        self._cancelled.clear()
        self._choose(item, is_sure)

    @work(exclusive=True, group="pull")
    async def _choose(self, name: str, pull: bool) -> None:
        """Download a model if it is not installed; without `pull`, offer to."""
        try:
            can_pull = await asyncio.to_thread(self._model_service.can_pull, name)
            if can_pull and not pull:
                self._offered_pull = name
                self._show_message(
                    f"{escape_name(name)} is not installed: Enter again downloads it"
                )
            else:
                if can_pull:
                    self._show_message(f"looking up {escape_name(name)} on the hub")
                    progress = partial(self._on_pull_progress, name)
                    await asyncio.to_thread(self._model_service.pull, name, progress)
                self._chosen = name
        except asyncio.CancelledError:  # the app is quitting and would wait for the thread
            self._cancelled.set()
            raise
        except PullCancelled:
            self._show_message(f"stopped: downloading {escape_name(name)} again resumes it")
        except LocalgenError as error:
            self._show_message(error.message, is_error=True)
        finally:
            self.is_busy = False
            self.remove_class("-busy")
        # only the topmost screen can be dismissed
        if self._chosen is not None and self.app.screen is self:
            self.dismiss(self._chosen)

    def _on_pull_progress(self, name: str, downloaded_bytes: int, total_bytes: int) -> None:
        if self._cancelled.is_set():
            raise PullCancelled
        share = downloaded_bytes / total_bytes if total_bytes else 1.0
        size = f"{units.format_size(downloaded_bytes)} of {units.format_size(total_bytes)}"
        self.call_later(self._show_progress, share, f"downloading {escape_name(name)}: {size}")

    def _show_progress(self, fraction: float, line: str) -> None:
        if not self.is_busy:  # a late update, after the work has ended
            return
        self.query_one(ProgressBar).update(progress=fraction)
        self._show_message(line)

    def _filter_rows(self, query: str) -> None:
        found = [
            choice
            for choice in self._rows
            if matches_query(f"{choice.name} {choice.description}", query)
        ]
        self.show_rows(
            ((choice.name, self._row_content(choice)) for choice in found), self._current
        )
        line = str(self.query_one("#message", Static).content)
        if self._rows and (not line or line.startswith(_NO_MATCH_TEXT)):
            self._show_message(
                "" if found else f"{_NO_MATCH_TEXT} Enter tries {one_line(query.strip())}"
            )

    def _row_content(self, row: ModelPickerRow) -> Content:
        style = "bold" if row.is_installed else "dim"
        is_current = row.name == self._current
        return name_row(row.name, row.description, is_current=is_current, style=style)

    def _show_message(self, message: str, *, is_error: bool = False) -> None:
        line = self.query_one("#message", Static)
        line.update(Content(one_line(message)))
        line.set_class(is_error, "-error")


def _installed_rows(cards: list[ModelCard]) -> Iterator[ModelPickerRow]:
    for card in cards:
        size = units.format_size(card.size_bytes) if card.size_bytes else ""
        parts = (size, card.state, card.source)
        yield ModelPickerRow(
            card.name, " · ".join(part for part in parts if part), is_installed=True
        )


def _pullable_rows(cards: list[ModelCard], offers: list[PullableModel]) -> Iterator[ModelPickerRow]:
    names = {card.name for card in cards}
    for offer in offers:
        if offer.name not in names:
            parts = (
                offer.title,
                units.format_size(offer.size_bytes) if offer.size_bytes else "",
                {True: "fits here", False: "does not fit here", None: ""}[offer.fits],
                "not downloaded",
            )
            description = " · ".join(part for part in parts if part)
            yield ModelPickerRow(offer.name, description, is_installed=False)


class SessionModelService:
    """ModelService of a session. Models are downloaded only for the local server."""

    def __init__(self, active: ActiveSession) -> None:
        self._active = active
        self._is_remote = active.chat.is_remote

    def list_models(self) -> list[ModelCard]:
        return self._active.chat.client.models()

    def pullable_models(self) -> list[PullableModel]:
        return [] if self._is_remote else pullable_models.pullable_models()

    def can_pull(self, name: str) -> bool:
        return not self._is_remote and pullable_models.can_pull(name)

    def pull(self, name: str, on_progress: Callable[[int, int], None]) -> str:
        if self._is_remote:
            raise InvalidRequest("a remote server downloads its own models")
        return pullable_models.pull_model(name, on_progress)
