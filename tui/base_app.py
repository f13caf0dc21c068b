"""Base class of both Textual apps: themes, command palette, key help, minimum terminal size."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ClassVar

from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.content import Content
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Size
from textual.screen import ModalScreen, Screen
from textual.theme import BUILTIN_THEMES
from textual.widget import Widget
from textual.widgets import Input, Static, TextArea

from localgen.backends.terminal_text import escape_control_chars, one_line
from localgen.tui.key_file import names_of, read_key_file, with_names
from localgen.tui.preferences import Preferences
from localgen.tui.terminal import InlineTerminalDriver, TerminalDriver
from localgen.tui.terminal_signals import TerminalSignals
from localgen.tui.themes import THEME_NAMES, THEMES
from localgen.tui.widgets.command_palette import Command, CommandPalette
from localgen.tui.widgets.dialog import ScrollableTextDialog
from localgen.tui.widgets.jump import JumpOverlay

MIN_COLUMNS, MIN_ROWS = 60, 20
_KEY_COLUMNS, _NUM_RECENT = 19, 5


class TerminalTooSmall(ModalScreen[None]):
    """Covers the screen while the terminal is smaller than MIN_COLUMNS × MIN_ROWS."""

    DEFAULT_CSS = """
    TerminalTooSmall { align: center middle; background: $background; }
    TerminalTooSmall Static { width: auto; text-align: center; color: $warning; }
    """

    def compose(self) -> ComposeResult:
        yield Static(self._text(self.app.size.width, self.app.size.height), markup=False)

    def on_screen_resume(self) -> None:
        """Close if the terminal was enlarged while another screen was on top."""
        if not is_terminal_too_small(self.app.size):
            self.dismiss()

    def on_resize(self, event: events.Resize) -> None:
        self.query_one(Static).update(self._text(event.size.width, event.size.height))

    def _text(self, columns: int, rows: int) -> str:
        return f"{columns}×{rows} is too small\n{MIN_COLUMNS}×{MIN_ROWS} is enough"


def is_terminal_too_small(size: Size) -> bool:
    return size.width < MIN_COLUMNS or size.height < MIN_ROWS


class KeyHelp(ScrollableTextDialog):
    """Lists the key bindings that are active on the current screen."""

    DEFAULT_CSS = """
    KeyHelp VerticalScroll { width: 60; max-width: 90%; padding: 1 2; }
    """

    def __init__(self, keys: list[tuple[str, str]], notes: str = "") -> None:
        lines = [
            Content.assemble((f"{key:<{_KEY_COLUMNS}}", "bold $accent"), says) for key, says in keys
        ]
        if notes:
            lines += [Content(""), Content.styled(notes, "$muted")]
        super().__init__("Keys", Content("\n").join(lines))


def _is_textual_default(active: ActiveBinding) -> bool:
    """Return True if Textual itself defines the binding (cursor keys, text editing, …)."""
    common = {
        (binding.action, binding.description)
        for kind in type(active.node).__mro__
        if kind.__module__.startswith("textual.")
        for binding in vars(kind).get("BINDINGS", ())
        if isinstance(binding, Binding)
    }
    return (active.binding.action, active.binding.description) in common


class BaseApp(App[None]):
    """Base of `localgen tui` and `localgen top`.

    preferences: what the user has chosen before; it is kept there.

    KEY_TABLE: the app's table in the user's key file. KEY_OWNERS: lists of bindings with names,
    whose keys can be set there; UNAVAILABLE_KEYS: not these. HELP_NOTES: text below the key list.
    Bindings with a description are shown in the key help and in the command palette.
    """

    HELP_NOTES: ClassVar[str] = ""
    KEY_TABLE: ClassVar[str] = ""
    KEY_OWNERS: ClassVar[tuple[Sequence[BindingType], ...]] = ()
    UNAVAILABLE_KEYS: ClassVar[frozenset[str]] = frozenset()
    BINDINGS: ClassVar[list[BindingType]] = with_names(
        # F1 has priority and works everywhere; in a text field `?` is an ordinary character
        Binding("f1", "keys", "Keys", key_display="F1", priority=True),
        Binding("question_mark", "keys", "Keys"),
        Binding("f2", "next_theme", "Next theme", show=False),
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True),
        Binding("alt+j", "jump", "Jump to a part of the screen", show=False),
        Binding("alt+m", "toggle_mouse", "Leave the mouse to the terminal, or not", show=False),
    )
    CSS = """
    Screen { background: $background; color: $foreground; }
    Dialog { background: $background 60%; }
    Dialog:ansi, JumpOverlay { background: transparent; }
    Screen:inline { height: 80vh; border: none; }
    ToastRack { dock: top; align: right top; margin: 1 0 0 0; }
    Footer.-compact FooterKey.-command-palette { margin-right: 0; padding-right: 1; }
    OptionList:nocolor > .option-list--option-highlighted { text-style: bold underline; }
    Button:ansi, Button:ansi:hover, Button:ansi:focus, Button:ansi.-active { border: none; }
    DataTable:nocolor > .datatable--cursor { text-style: reverse; }
    Input:nocolor > .input--cursor, Input:nocolor > .input--selection { text-style: reverse; }
    TextArea:nocolor > .text-area--cursor, TextArea:nocolor > .text-area--selection {
        text-style: reverse;
    }
    Button:nocolor:focus { text-style: reverse; }
    Screen:nocolor > .screen--selection { text-style: reverse; }
    """

    def __init__(self, preferences: Preferences | None = None) -> None:
        self.preferences = preferences or Preferences(None)
        first = self.preferences.theme()
        # with NO_COLOR the terminal's own two colours are drawn; else as the theme has it
        super().__init__(ansi_color=True if self.preferences.no_color else None)
        self._recent_commands: list[str] = []
        self._has_mouse = True
        self.signals = TerminalSignals(self._write_to_terminal)
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = first
        for name in BUILTIN_THEMES:
            self.unregister_theme(name)

    async def on_event(self, event: events.Event) -> None:
        """Escape control characters in text pasted into an Input, which would draw them raw."""
        if isinstance(event, events.Paste) and isinstance(self.focused, Input):
            # it inserts one line; a terminal sends \r for a line end
            first, _, _ = event.text.replace("\r", "\n").partition("\n")
            event.text = escape_control_chars(first)
        await super().on_event(event)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy with control characters escaped: model output must not control other terminals."""
        super().copy_to_clipboard(escape_control_chars(text))

    def on_mount(self) -> None:
        """Set the user's keys; save theme changes; collect garbage after the first paint."""
        found = read_key_file(
            self.KEY_TABLE, names_of(BaseApp.BINDINGS, *self.KEY_OWNERS), self.UNAVAILABLE_KEYS
        )
        self.set_keymap(found.keys)
        if found.problem:
            self.notify(one_line(found.problem), severity="error", timeout=15, markup=False)
        self.theme_changed_signal.subscribe(
            self, lambda theme: self.preferences.save_theme(theme.name)
        )
        if not gc.isenabled():  # the CLI disables it for a faster start
            self.call_after_refresh(self._after_first_paint)

    def warm_up(self) -> None:
        """Load what the first screen does not need; in a thread, after the first paint."""

    @work(thread=True)
    def _after_first_paint(self) -> None:
        self.warm_up()
        gc.freeze()  # what exists after the imports is not scanned
        gc.enable()

    def _write_to_terminal(self, sequence: str) -> None:
        if self._driver is not None and not self.is_headless:
            self._driver.write(sequence)
            self._driver.flush()

    def on_unmount(self) -> None:
        self.signals.restore_title()

    @staticmethod
    def preferences_file(state_dir: Path) -> Path:
        """Path of the file of Preferences."""
        return state_dir / "tui.json"

    def get_driver_class(self) -> type[Driver]:
        """Replace Textual's Linux driver with TerminalDriver."""
        found = super().get_driver_class()
        return TerminalDriver if found is LinuxDriver else found

    def _build_driver(
        self, headless: bool, inline: bool, mouse: bool, size: tuple[int, int] | None
    ) -> Driver:
        """Replace Textual's inline driver, for which it has no public way."""
        if headless or not inline:
            return super()._build_driver(headless, inline, mouse, size)
        self._driver = InlineTerminalDriver(self, mouse=mouse, size=size)
        return self._driver

    def on_resize(self, event: events.Resize) -> None:
        """Show TerminalTooSmall while the terminal is too small."""
        small, shown = is_terminal_too_small(event.size), isinstance(self.screen, TerminalTooSmall)
        if small and not shown:
            self.push_screen(TerminalTooSmall())
        elif shown and not small:
            self.pop_screen()

    def action_keys(self) -> None:
        """Open or close the key help of the current screen and focused widget."""
        if isinstance(self.screen, KeyHelp):
            self.screen.dismiss()
        elif not isinstance(self.screen, TerminalTooSmall | CommandPalette):
            notes = "" if self.screen.is_modal else self.HELP_NOTES
            self.push_screen(KeyHelp(self._key_help_rows(self.screen), notes))

    def action_jump(self) -> None:
        """Show a letter on each part of the screen; the one that is pressed gets the focus."""

        def jump(widget: Widget | None) -> None:
            if widget is not None and widget.is_attached:
                widget.focus()

        if not isinstance(self.screen, JumpOverlay | TerminalTooSmall):
            overlay = JumpOverlay(self.screen)
            if overlay.targets:
                self.push_screen(overlay, jump)

    def action_toggle_mouse(self) -> None:
        """Leave the mouse to the terminal, whose selection then works, or take it back."""
        driver = self._driver
        if isinstance(driver, TerminalDriver | InlineTerminalDriver):
            self._has_mouse = not self._has_mouse
            driver.set_mouse(is_ours=self._has_mouse)
            self.notify(
                "The mouse is the program's." if self._has_mouse else "The mouse is the terminal's."
            )

    def action_next_theme(self) -> None:
        self.theme = THEME_NAMES[(THEME_NAMES.index(self.theme) + 1) % len(THEME_NAMES)]

    def action_command_palette(self) -> None:
        """Open the palette and run what is chosen there."""
        if isinstance(self.screen, CommandPalette):
            return

        def run(command: Command | None) -> None:
            if command is not None:
                names = [name for name in self._recent_commands if name != command.name]
                self._recent_commands = [command.name, *names][:_NUM_RECENT]
                self.call_later(command.run)

        self.push_screen(CommandPalette(self._palette_commands(self.screen)), run)

    def _palette_commands(self, screen: Screen[object]) -> list[Command]:
        """The bindings with a description and the themes; used last, then in the footer, first."""
        offered: dict[str, Command] = {}
        for active in sorted(
            self._described_bindings(screen), key=lambda active: not active.binding.show
        ):
            says = active.binding.description
            # keys that edit a text are for the hand alone
            is_editing = isinstance(active.node, TextArea) and "." not in active.binding.action
            if not is_editing and active.binding.action != "command_palette":
                offered[says] = Command(says, self._key_label(active), self._callback(active))
        for name in THEME_NAMES:
            says = f"Theme: {name}"
            offered[says] = Command(says, "", self._theme_setter(name))
        recent = [offered.pop(says) for says in self._recent_commands if says in offered]
        return [*recent, *offered.values()]

    def _key_help_rows(self, screen: Screen[object]) -> list[tuple[str, str]]:
        """Rows of (keys, description); footer keys first, one row per description."""
        keys: dict[str, list[str]] = {}
        for active in sorted(
            self._described_bindings(screen), key=lambda active: not active.binding.show
        ):
            is_palette = active.binding.action == "command_palette"
            says = "Command palette" if is_palette else active.binding.description
            shown = keys.setdefault(says, [])
            if self._key_label(active) not in shown:
                shown.append(self._key_label(active))
        return [(" ".join(shown), says) for says, shown in keys.items()]

    def _described_bindings(self, screen: Screen[object]) -> list[ActiveBinding]:
        """Bindings with a description, without Textual's own."""
        return [
            active
            for active in screen.active_bindings.values()
            if active.binding.description
            and (active.node is self or not _is_textual_default(active))
        ]

    def _key_label(self, active: ActiveBinding) -> str:
        return self.get_key_display(active.binding)

    def _callback(self, active: ActiveBinding) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            await self.run_action(active.binding.action, active.node)

        return run

    def _theme_setter(self, name: str) -> Callable[[], None]:
        def take() -> None:
            self.theme = name

        return take
