"""What an empty session shows: questions to begin with, keys, and models that fit."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localgen.backends import units
from localgen.backends.terminal_text import escape_name, one_line
from localgen.client.suggested_models import SuggestedModel

STARTERS = (
    "What is a KV cache, in three sentences?",
    "Tell me a short story about a lighthouse.",
)
_KEYS = (("Enter", "sends"), ("Ctrl+O", "models"), ("Ctrl+P", "commands"))


class StartView(VerticalScroll):
    """The welcome. Its links run the screen's action `submit` with the text of a prompt."""

    DEFAULT_CSS = """
    StartView { height: 1fr; align: center middle; scrollbar-size-vertical: 1; }
    StartView > Vertical { width: auto; max-width: 100%; height: auto; padding: 0 2; }
    StartView Static { width: auto; max-width: 100%; margin: 0 0 1 0; }
    StartView #welcome { text-style: bold; color: $primary; }
    StartView #suggested { text-wrap: nowrap; text-overflow: ellipsis; }
    StartView #hints, StartView #current { color: $muted; }
    """

    can_focus = False

    def __init__(self) -> None:
        super().__init__(id="start")
        self._current = Static(id="current", markup=False)
        self._models = Static(id="suggested", markup=False)
        self._models.display = False

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static("What shall we talk about?", id="welcome", markup=False)
            yield Static(_starters_content())
            yield Static(_keys_content(), id="hints", markup=False)
            yield self._current
            yield self._models

    def show_model(self, line: str) -> None:
        """Say which model answers."""
        if str(self._current.content) != line:
            self._current.update(Content(line))

    def show_suggested(self, models: Sequence[SuggestedModel], current: str) -> None:
        """List models that fit in this machine. current: the name of the one in use."""
        self._models.display = bool(models)
        self._models.update(_models_content(models, current))


def _starters_content() -> Content:
    lines = []
    for at, text in enumerate(STARTERS):
        key = "Tab" if at == 0 else "   "
        lines.append(f"[bold $accent]{key}[/]  [@click=screen.submit({text!r})]{text}[/]")
    return Content.from_markup("\n".join(lines))


def _keys_content() -> Content:
    pairs = [Content.assemble((key, "bold $accent"), f" {says}") for key, says in _KEYS]
    return Content("   ").join(pairs)


def _models_content(models: Sequence[SuggestedModel], current: str) -> Content:
    """A heading and a row for each model."""
    widest = max((len(each.name) for each in models), default=0)
    rows = [Content.styled("Models that fit in this machine's memory now", "$muted")]
    for model in models:
        limit = model.most_tokens_per_s
        speed = f"at most {limit:,.0f} tok/s" if limit is not None else ""
        if model.name == current:
            state = "in use"
        else:
            state = "installed" if model.is_installed else "to download"
        link = f"screen.submit({f'/model {model.name}'!r})"
        name = Content.from_markup(f"[@click={link}]$name[/]", name=escape_name(model.name))
        rows.append(
            Content.assemble(
                name,
                " " * (widest - len(model.name) + 2),
                (f"{units.format_size(model.size_bytes):>8}  {speed:<18}", "$foreground"),
                (f"{state:<12}{one_line(model.title)}", "$muted"),
            )
        )
    return Content("\n").join(rows)
