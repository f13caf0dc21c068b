"""What both programs are: themes, palette, key help, a word where there is no room."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.theme import BUILTIN_THEMES
from textual.widgets import Static

from localgen.tui.themes import NAMES, THEMES, ThemeChoice

LEAST_COLUMNS, LEAST_ROWS = 60, 20
_KEY_COLUMNS = 16


class TooSmall(ModalScreen[None]):
    """Stands before everything while the terminal is smaller than the screens can be."""

    DEFAULT_CSS = """
    TooSmall { align: center middle; background: $background; }
    TooSmall Static { width: auto; text-align: center; color: $warning; }
    """

    def compose(self) -> ComposeResult:
        yield Static(self._text(self.app.size.width, self.app.size.height), markup=False)

    def on_resize(self, event: events.Resize) -> None:
        self.query_one(Static).update(self._text(event.size.width, event.size.height))

    def _text(self, columns: int, rows: int) -> str:
        return f"{columns}×{rows} is too small\n{LEAST_COLUMNS}×{LEAST_ROWS} is enough"


class KeyHelp(ModalScreen[None]):
    """Every key that does something where it was asked for, with what it does."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,f1,q,enter", "dismiss", "Close", show=False)
    ]
    DEFAULT_CSS = """
    KeyHelp { align: center middle; background: $background 60%; }
    KeyHelp VerticalScroll {
        width: 60; max-width: 90%; height: auto; max-height: 90%; padding: 1 2;
        border: round $primary; background: $surface; border-title-color: $primary;
    }
    """

    def __init__(self, keys: list[tuple[str, str]], notes: str = "") -> None:
        super().__init__()
        self._keys = keys
        self._notes = notes

    def compose(self) -> ComposeResult:
        lines = [
            Content.assemble((f"{key:<{_KEY_COLUMNS}}", "bold $accent"), says)
            for key, says in self._keys
        ]
        if self._notes:
            lines += [Content(""), Content.styled(self._notes, "$muted")]
        with VerticalScroll() as box:
            box.border_title = "Keys"
            box.border_subtitle = "Esc closes"
            yield Static(Content("\n").join(lines))

    def on_click(self, event: events.Click) -> None:
        if event.widget is self:
            self.dismiss()


class Shell(App[None]):
    """Base of both programs. choice: which theme to begin with, and where to keep the next one.

    HELP_NOTES: shown below the keys. A key is told of in the help and in the palette when its
    binding has a description.
    """

    HELP_NOTES: ClassVar[str] = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark,f1", "keys", "Keys", key_display="?"),
        Binding("f2", "next_theme", "Next theme", show=False),
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True),
    ]
    CSS = """
    Screen { background: $background; color: $foreground; }
    """

    def __init__(self, choice: ThemeChoice | None = None) -> None:
        self._choice = choice or ThemeChoice(None)
        first = self._choice.read()  # App takes NO_COLOR out of the environment
        super().__init__()
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = first
        for name in BUILTIN_THEMES:
            self.unregister_theme(name)

    def on_mount(self) -> None:
        """From now on what is chosen is kept."""
        self.theme_changed_signal.subscribe(self, lambda theme: self._choice.keep(theme.name))

    @staticmethod
    def theme_file(state_dir: Path) -> Path:
        """Where the theme that was chosen last is kept."""
        return state_dir / "tui.json"

    def on_resize(self, event: events.Resize) -> None:
        """Hide everything behind TooSmall while there is no room for it."""
        small = event.size.width < LEAST_COLUMNS or event.size.height < LEAST_ROWS
        shown = isinstance(self.screen, TooSmall)
        if small and not shown:
            self.push_screen(TooSmall())
        elif shown and not small:
            self.pop_screen()

    def action_keys(self) -> None:
        """Show the keys of the screen and of what has the focus."""
        if not isinstance(self.screen, KeyHelp | TooSmall):
            self.push_screen(KeyHelp(self._known_keys(self.screen), self.HELP_NOTES))

    def action_next_theme(self) -> None:
        """Take the next of the themes."""
        self.theme = NAMES[(NAMES.index(self.theme) + 1) % len(NAMES)]

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What the palette offers: every binding that has a description, and each theme."""
        offered = set()
        for active in screen.active_bindings.values():
            says = active.binding.description
            if says and says not in offered and active.binding.action != "command_palette":
                offered.add(says)
                yield SystemCommand(says, f"Key: {self._key_of(active)}", self._run_of(active))
        for name in NAMES:
            yield SystemCommand(f"Theme: {name}", "Colours of the screen", self._theme_of(name))

    def _known_keys(self, screen: Screen[object]) -> list[tuple[str, str]]:
        """Keys and what they do, several for the same in one line; those of the footer first."""
        keys: dict[str, list[str]] = {}
        known = sorted(screen.active_bindings.values(), key=lambda active: not active.binding.show)
        for active in known:
            is_palette = active.binding.action == "command_palette"
            says = "Everything by its name" if is_palette else active.binding.description
            if says:
                shown = keys.setdefault(says, [])
                if self._key_of(active) not in shown:
                    shown.append(self._key_of(active))
        return [(" ".join(shown), says) for says, shown in keys.items()]

    def _key_of(self, active: ActiveBinding) -> str:
        return self.get_key_display(active.binding)

    def _run_of(self, active: ActiveBinding) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            await self.run_action(active.binding.action, active.node)

        return run

    def _theme_of(self, name: str) -> Callable[[], None]:
        def take() -> None:
            self.theme = name

        return take
