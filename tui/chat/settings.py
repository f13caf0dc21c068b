"""Settings of a session at the side: system prompt, context, and every sampling parameter."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, Label, Static, TextArea

from localgen.chats import parameters
from localgen.chats.inert import inert

SYSTEM, CTX = "system", "ctx"


class Setting(Horizontal):
    """A name and its field. The field is empty where nothing of the user's is set."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "app.focus_next", "Next setting", show=False),
        Binding("up", "app.focus_previous", "Setting before", show=False),
    ]
    DEFAULT_CSS = """
    Setting { height: 1; }
    Setting Label { width: 20; color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis; }
    Setting Input { width: 1fr; }
    Setting.-yours Label { color: $foreground; text-style: bold; }
    """

    def __init__(self, name: str) -> None:
        super().__init__(id=f"set-{name}")
        self.setting = name

    def compose(self) -> ComposeResult:
        yield Label(self.setting, markup=False)
        yield Input(compact=True, select_on_focus=False)

    def show(self, value: str, usual: str) -> None:
        """value: the user's; usual: what holds without."""
        field = self.query_one(Input)
        field.placeholder = usual
        if not field.has_focus:
            field.value = value
        self.set_class(bool(value), "-yours")


class SettingsPanel(Widget):
    """Posts Changed for each field that is left with another value."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Close the settings", show=False),
    ]
    DEFAULT_CSS = """
    SettingsPanel {
        width: 44; height: 1fr; border: round $border; padding: 0 1; background: $background;
        border-title-color: $primary; border-title-style: bold; border-subtitle-color: $text-muted;
    }
    SettingsPanel:focus-within { border: round $primary; }
    SettingsPanel VerticalScroll { height: 1fr; scrollbar-size-vertical: 1; }
    SettingsPanel TextArea {
        height: 5; border: none; padding: 0; background: $panel; margin-bottom: 1;
    }
    SettingsPanel #fault { height: auto; color: $error; display: none; }
    SettingsPanel #fault.-shown { display: block; }
    """

    class Changed(Message):
        """A setting and the text for it; `default`: as if nothing were set."""

        def __init__(self, setting: str, text: str) -> None:
            super().__init__()
            self.setting = setting
            self.text = text

    class Closed(Message):
        """The user has done."""

    def __init__(self) -> None:
        super().__init__(id="settings")
        self.border_title = "Settings of this session"
        self.border_subtitle = "empty: as the model does"
        self._system = ""
        self._values: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="fault", markup=False)
        with VerticalScroll(can_focus=False):
            yield Label("system prompt", markup=False)
            yield TextArea(id="system", show_line_numbers=False, compact=True)
            yield Setting(CTX)
            for name in parameters.NAMES:
                yield Setting(name)

    def show(self, system: str, ctx: str, rows: list[tuple[str, str, str]]) -> None:
        """System prompt, context, and rows of parameters.rows()."""
        area = self.query_one("#system", TextArea)
        if not area.has_focus and area.text != inert(system):
            area.text = inert(system)
        self._system = system
        shown = {CTX: (ctx, "as large as the model has")}
        for name, value, whose in rows:
            usual = f"{value}, {whose or 'localgen'}" if value != "-" else ""
            shown[name] = (value, "") if whose == "yours" else ("", usual)
        for name, (value, usual) in shown.items():
            self._values[name] = value
            self.query_one(f"#set-{name}", Setting).show(value, usual)

    def refuse(self, message: str) -> None:
        """Say why a value does not do; nothing: it does."""
        fault = self.query_one("#fault", Static)
        fault.update(Content(message))
        fault.set_class(bool(message), "-shown")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._leave(event.input)

    def on_input_blurred(self, event: Input.Blurred) -> None:
        event.stop()
        self._leave(event.input)

    def on_descendant_blur(self, event: events.DescendantBlur) -> None:
        area = self.query_one("#system", TextArea)
        if event.widget is area and area.text != inert(self._system):
            self._system = area.text
            self.post_message(self.Changed(SYSTEM, area.text))

    def action_close(self) -> None:
        self.post_message(self.Closed())

    def _leave(self, field: Input) -> None:
        setting = field.parent
        assert isinstance(setting, Setting)
        if field.value.strip() == self._values.get(setting.setting, ""):
            return
        self._values[setting.setting] = field.value.strip()
        self.post_message(self.Changed(setting.setting, field.value.strip() or "default"))
