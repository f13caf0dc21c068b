"""Settings of a session at the side: system prompt, context, and every sampling parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, Label, Static, TextArea

from localgen.chat import parameters
from localgen.tui.chat.active_session import CTX, SYSTEM
from localgen.tui.widgets.text_field import TextField


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
        self.query_one(Input).placeholder = usual
        self.set_class(bool(value), "-yours")


@dataclass(frozen=True, slots=True)
class Typed:
    """What stands in the field of a setting of a session."""

    session: int
    setting: str
    text: str


class SettingsPanel(Widget):
    """Posts Changed for each field that is left with another value than is in force.

    What was refused stays in its field, whatever is shown meanwhile.
    """

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
        """A setting that is to be taken over; then call taken() or refused()."""

        def __init__(self, typed: Typed) -> None:
            super().__init__()
            self.typed = typed

    class Closed(Message):
        """The user has done."""

    def __init__(self) -> None:
        super().__init__(id="settings")
        self.border_title = "Settings of this session"
        self.border_subtitle = "empty: as the model does"
        self._session = 0
        self._values: dict[str, str] = {}
        self._refused: dict[tuple[int, str], tuple[str, str]] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="fault", markup=False)
        with VerticalScroll(can_focus=False):
            yield Label("system prompt", markup=False)
            yield TextField(id="system", show_line_numbers=False, compact=True)
            yield Setting(CTX)
            for name in parameters.NAMES:
                yield Setting(name)

    def show(
        self, session: int, system: str, ctx: str | None, rows: list[tuple[str, str, str]]
    ) -> None:
        """System prompt, context (None: it is not ours to say), and rows of parameters.rows()."""
        edited = {typed.setting for typed in self.changed()} if session == self._session else ()
        self._session = session
        self.query_one(f"#set-{CTX}").display = ctx is not None
        shown = {CTX: (ctx or "", "as the model has")}
        for name, value, whose in rows:
            usual = f"{value}, {whose or 'localgen'}" if value != "-" else ""
            shown[name] = (value, "") if whose == "yours" else ("", usual)
        self._values = {SYSTEM: system} | {name: value for name, (value, _) in shown.items()}
        for name, value_and_usual in shown.items():
            self.query_one(f"#set-{name}", Setting).show(*value_and_usual)
        for name in self._values:
            if name not in edited:
                self._fill(name)
        self._tell()

    def changed(self) -> list[Typed]:
        """Every field whose text is not in force."""
        fields = ((name, self._text(name)) for name in self._values)
        return [
            Typed(self._session, name, text) for name, text in fields if text != self._values[name]
        ]

    def leave(self) -> None:
        """Have what stands in the fields taken over before they show something else."""
        for typed in self.changed():
            self.post_message(self.Changed(typed))

    def taken(self, typed: Typed) -> None:
        """The setting is in force."""
        if typed.session == self._session:
            self._values[typed.setting] = typed.text
        self._refused.pop((typed.session, typed.setting), None)
        self._tell()

    def refused(self, typed: Typed, why: str) -> None:
        """It is not, and its text stays in the field."""
        self._refused[typed.session, typed.setting] = (typed.text, why)
        self._tell()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._left(event.input)

    def on_input_blurred(self, event: Input.Blurred) -> None:
        event.stop()
        self._left(event.input)

    def on_descendant_blur(self, event: events.DescendantBlur) -> None:
        if isinstance(event.widget, TextArea):
            self._left(event.widget)

    def action_close(self) -> None:
        self.post_message(self.Closed())

    def _field(self, setting: str) -> TextArea | Input:
        if setting == SYSTEM:
            return self.query_one(f"#{SYSTEM}", TextArea)
        return self.query_one(f"#set-{setting} Input", Input)

    def _text(self, setting: str) -> str:
        field = self._field(setting)
        return field.text if isinstance(field, TextArea) else field.value.strip()

    def _fill(self, setting: str) -> None:
        value = self._values[setting]
        text, _ = self._refused.get((self._session, setting), (value, ""))
        field = self._field(setting)
        if isinstance(field, Input):
            field.value = text
        elif field.text != text:
            field.text = text
        if text == value:
            self._values[setting] = self._text(setting)  # a field may spell it in its own way

    def _left(self, field: TextArea | Input) -> None:
        setting = field.parent.setting if isinstance(field.parent, Setting) else SYSTEM
        typed = Typed(self._session, setting, self._text(setting))
        if typed.text != self._values.get(setting, typed.text):
            self.post_message(self.Changed(typed))
        else:  # as it was: nothing is refused any more
            self.taken(typed)

    def _tell(self) -> None:
        whys = [why for (session, _), (_, why) in self._refused.items() if session == self._session]
        fault = self.query_one("#fault", Static)
        fault.update(Content("\n".join(whys)))
        fault.set_class(bool(whys), "-shown")
