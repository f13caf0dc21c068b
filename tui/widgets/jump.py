"""Jump mode: a letter on each part of the screen that can have the focus."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.errors import NoWidget
from textual.geometry import Region
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Label

# the home row first
_LETTERS = "asdfghjklqwertyuiopzxcvbnm"


class JumpOverlay(ModalScreen[Widget | None]):
    """Closes with the widget whose letter is pressed, or None. screen: the one below.

    targets: widgets by their letters, only those that are visible.
    """

    DEFAULT_CSS = """
    JumpOverlay Label {
        position: absolute; width: 3; padding: 0 1; background: $accent; color: $background;
        text-style: bold;
    }
    JumpOverlay:nocolor Label { text-style: bold reverse; }
    """

    def __init__(self, screen: Screen[object]) -> None:
        super().__init__()
        self._screen_size = screen.size
        visible = [each for each in screen.focus_chain if _is_on_screen(each)]
        self.targets = dict(zip(_LETTERS, visible, strict=False))

    def compose(self) -> ComposeResult:
        for letter, widget in self.targets.items():
            label = Label(letter, markup=False)
            label.styles.offset = _visible_region(widget).offset
            yield label

    def on_key(self, event: events.Key) -> None:
        event.stop()
        self.choose(event.key)

    def choose(self, key: str) -> None:
        """Close, and focus the widget whose letter it is. Every other key closes it too."""
        self._close(self.targets.get(key))

    def on_resize(self, event: events.Resize) -> None:
        """Close, as the letters would be in the wrong places."""
        if event.size != self._screen_size:
            self._close(None)

    def on_click(self) -> None:
        self._close(None)

    def _close(self, widget: Widget | None) -> None:
        """Close once: a second key would close the screen below."""
        if self.app.screen is self:
            self.dismiss(widget)


def _is_on_screen(widget: Widget) -> bool:
    try:
        return bool(_visible_region(widget).area)
    except NoWidget:  # hidden, or not laid out yet
        return False


def _visible_region(widget: Widget) -> Region:
    return widget.screen.find_widget(widget).visible_region
