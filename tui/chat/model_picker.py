"""The model picker: installed and downloadable models, with download and load progress."""

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
from localgen.backends.terminal_text import escape_name, one_line
from localgen.client import ModelCard, pullable_models
from localgen.client.pullable_models import PullableModel
from localgen.tui.chat.active_session import ActiveSession, CommandStopped
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

    def load(self, name: str, on_progress: Callable[[float], None]) -> None:
        """Load a model for the session."""

    def stop_loading(self) -> None:
        """Abort load() from another thread."""


@dataclass(frozen=True, slots=True)
class ModelPickerRow:
    """A row of the list. is_installed: no download needed."""

    name: str
    description: str
    is_installed: bool


class ModelPicker(Picker[str]):
    """Closes with the name of the loaded model. is_busy: a model is being downloaded or loaded."""

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
        self._loaded_model: str | None = None
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
        """Close if a model was loaded while another screen was on top."""
        if self._loaded_model is not None:
            self.dismiss(self._loaded_model)

    def action_cancel(self) -> None:
        if self.is_busy:
            self._stop()
        else:
            self.dismiss(None)

    def select_item(self, item: str) -> None:
        """Load a model; download it first if it is listed as downloadable."""
        if self.is_busy:
            return
        offered = next((each for each in self._rows if each.name == item), None)
        is_sure = self._offered_pull == item or (offered is not None and not offered.is_installed)
        self.is_busy = True
        self.add_class("-busy")
        self._cancelled.clear()
        self._pull_and_load(item, is_sure)

    @work(exclusive=True, group="pull")
    async def _pull_and_load(self, name: str, pull: bool) -> None:
        try:
            await asyncio.to_thread(self._pull_and_load_in_thread, name, pull)
        except asyncio.CancelledError:  # the app is quitting and would wait for the thread
            self._stop()
            raise
        except PullCancelled:
            self._show_message(f"stopped: downloading {escape_name(name)} again resumes it")
        except ModelNotFound as error:
            await self._offer_pull(name, error)
        except LocalgenError as error:
            reason = "stopped" if self._cancelled.is_set() else error.message
            self._show_message(reason, is_error=not self._cancelled.is_set())
        else:
            self._loaded_model = name
        finally:
            self.is_busy = False
            self.remove_class("-busy")
        # only the topmost screen can be dismissed
        if self._loaded_model is not None and self.app.screen is self:
            self.dismiss(self._loaded_model)

    def _stop(self) -> None:
        self._cancelled.set()
        self._model_service.stop_loading()

    async def _offer_pull(self, name: str, error: ModelNotFound) -> None:
        if await asyncio.to_thread(self._model_service.can_pull, name):
            self._offered_pull = name
            self._show_message(f"{escape_name(name)} is not installed: Enter again downloads it")
        else:
            self._show_message(error.message, is_error=True)

    def _pull_and_load_in_thread(self, name: str, pull: bool) -> None:
        """Download a model if necessary, then load it; runs in a thread."""
        if pull and self._model_service.can_pull(name):
            self.call_later(self._show_message, f"looking up {escape_name(name)} on the hub")
            self._model_service.pull(
                name, lambda here, total: self._on_pull_progress(name, here, total)
            )
        if self._cancelled.is_set():
            raise PullCancelled
        self.call_later(self._show_message, f"loading {escape_name(name)}")
        self._model_service.load(name, self._on_load_progress)

    def _on_pull_progress(self, name: str, downloaded_bytes: int, total_bytes: int) -> None:
        if self._cancelled.is_set():
            raise PullCancelled
        share = downloaded_bytes / total_bytes if total_bytes else 1.0
        size = f"{units.format_size(downloaded_bytes)} of {units.format_size(total_bytes)}"
        self.call_later(self._show_progress, share, f"downloading {escape_name(name)}: {size}")

    def _on_load_progress(self, fraction: float) -> None:
        self.call_later(self._show_progress, fraction, None)

    def _show_progress(self, fraction: float, line: str | None) -> None:
        if not self.is_busy:  # a late update, after the work has ended
            return
        self.query_one(ProgressBar).update(progress=fraction)
        if line is not None:
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
            size = f" · {units.format_size(offer.size_bytes)}" if offer.size_bytes else ""
            yield ModelPickerRow(
                offer.name, f"{offer.title}{size} · not downloaded", is_installed=False
            )


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

    def load(self, name: str, on_progress: Callable[[float], None]) -> None:
        """Load a model into the session. Raises InvalidRequest if the user stops it."""
        try:
            self._active.load_model(name, on_progress)
        except CommandStopped as stopped:
            raise InvalidRequest("stopped") from stopped

    def stop_loading(self) -> None:
        self._active.stop_command()
