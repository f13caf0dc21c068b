"""The key bindings at the bottom of a screen."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.widgets import Footer
from textual.widgets._footer import FooterKey

_PALETTE = "-command-palette"


class KeyFooter(Footer):
    """Textual's footer with only the keys that fit completely, and that have an effect now.

    The command palette, at the right, lists all of them. has_effect: tells of an action whether
    it would do anything at this moment; after a change call the screen's refresh_bindings().
    """

    _composed: object = None

    def __init__(
        self, *, compact: bool = False, has_effect: Callable[[str], bool] = lambda _: True
    ) -> None:
        super().__init__(compact=compact)
        self._has_effect = has_effect

    def compose(self) -> ComposeResult:
        self._composed = self._composed_from()
        every = [key for key in super().compose() if isinstance(key, FooterKey)]
        keys = [key for key in every if self._has_effect(key.action)]
        fixed = [key for key in keys if key.has_class(_PALETTE)]
        for key in keys:
            # otherwise set after mounting, which styles the key a second time
            key.set_class(self.compact or key in fixed, "-compact", update=False)
        # a docked key has a left border, and spaces between and after its two texts
        left = self.app.size.width - sum(_label_width(key) + 3 for key in fixed)
        for key in keys:
            columns = self._key_width(key)
            # its trailing space may overlap that border
            if key not in fixed and columns - 1 <= left:
                left -= columns
                yield key
        yield from fixed

    async def recompose(self) -> None:
        """Compose again if that gives other keys: the screen calls this whenever focus moves."""
        if not self.is_attached or self._composed != self._composed_from():
            await super().recompose()

    def on_resize(self, event: events.Resize) -> None:
        if self.query(FooterKey):
            self.call_after_refresh(self.recompose)

    def _composed_from(self) -> object:
        """All that the composed keys depend on."""
        bindings = self.screen.active_bindings
        keys = [
            active[1:]
            for active in bindings.values()
            if active.binding.show and self._has_effect(active.binding.action)
        ]
        palette = bindings.get(self.app.COMMAND_PALETTE_BINDING)
        return self._bindings_ready, self.app.size.width, keys, palette and palette[1:]

    def _key_width(self, key: FooterKey) -> int:
        """Columns of its two texts and the spaces between and after them."""
        return _label_width(key) + (2 if self.compact else 3)


def _label_width(key: FooterKey) -> int:
    return cell_len(key.key_display) + cell_len(key.description)
