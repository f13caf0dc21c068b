"""The settings panel of a session: system prompt, context length, sampling parameters."""

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
from textual.widgets import Collapsible, Input, Label, Static, TextArea

from localgen.chat import parameters
from localgen.tui.chat.active_session import CTX_SETTING, SYSTEM_SETTING
from localgen.tui.widgets.text_field import TextField

_FOLDED_GROUPS = {
    "more samplers": parameters.MORE_SAMPLERS,
    "rarely needed": parameters.RARE_PARAMETERS,
}
_NEXT_KEYS, _PREVIOUS_KEYS = "down,tab", "up,shift+tab"


class SettingInput(Input):
    """Moves the focus at once, and passes on the keys of a burst that are for the next field."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(_NEXT_KEYS, "app.focus_next", "Next setting", show=False),
        Binding(_PREVIOUS_KEYS, "app.focus_previous", "Previous setting", show=False),
    ]

    async def _on_key(self, event: events.Key) -> None:
        focused = self.screen.focused
        if focused is not None and focused is not self:
            event.prevent_default().stop()
            focused.post_message(events.Key(event.key, event.character))
        elif event.key in _NEXT_KEYS.split(","):
            event.prevent_default().stop()
            self.screen.focus_next()
        elif event.key in _PREVIOUS_KEYS.split(","):
            event.prevent_default().stop()
            self.screen.focus_previous()
        else:
            await super()._on_key(event)


class SettingField(Horizontal):
    """A label and an input, which is empty unless the user has set a value."""

    DEFAULT_CSS = """
    SettingField { height: 1; }
    SettingField Label {
        width: 20; color: $text-muted; text-wrap: nowrap; text-overflow: ellipsis;
    }
    SettingField SettingInput { width: 1fr; }
    SettingField.-set Label { color: $foreground; text-style: bold; }
    """

    def __init__(self, name: str) -> None:
        super().__init__(id=f"set-{name}")
        self.setting = name

    def compose(self) -> ComposeResult:
        yield Label(self.setting, markup=False)
        yield SettingInput(compact=True, select_on_focus=False)

    def show_value(self, value: str, default: str) -> None:
        """value: the user's; default: the value in effect without it."""
        self.query_one(Input).placeholder = default
        self.set_class(bool(value), "-set")


@dataclass(frozen=True, slots=True)
class SettingEdit:
    """The text entered for a setting of a session."""

    session_id: int
    setting: str
    text: str


class SettingsPanel(Widget):
    """Posts Changed for each field that is left with a new value.

    A rejected value stays in its field, even after switching sessions.
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
    SettingsPanel Collapsible {
        border: none; padding: 0; background: $background; height: auto;
    }
    SettingsPanel Collapsible > Contents { padding: 0; }
    SettingsPanel CollapsibleTitle { padding: 0; color: $text-muted; }
    SettingsPanel #hint { height: 2; color: $text-muted; }
    SettingsPanel .error { height: auto; padding-left: 1; color: $error; }
    """

    class Changed(Message):
        """A setting to be applied; the receiver calls mark_applied() or mark_rejected()."""

        def __init__(self, edit: SettingEdit) -> None:
            super().__init__()
            self.edit = edit

    class Closed(Message):
        """The user has closed the panel."""

    def __init__(self) -> None:
        super().__init__(id="settings")
        self.border_title = "Settings of this session"
        self.border_subtitle = "empty: model default"
        self._session_id = 0
        self._is_shown = False
        self._values: dict[str, str] = {}
        self._rejected_edits: dict[tuple[int, str], tuple[str, str]] = {}
        self._shown_errors: dict[str, str] = {}  # by setting

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False):
            yield Label("system prompt", markup=False)
            yield TextField(id="system", show_line_numbers=False, compact=True)
            yield SettingField(CTX_SETTING)
            for name in parameters.USUAL_PARAMETERS:
                yield SettingField(name)
            for title, names in _FOLDED_GROUPS.items():
                with Collapsible(title=title):
                    for name in names:
                        yield SettingField(name)
        yield Static(id="hint", markup=False)

    def show_settings(
        self, session_id: int, system: str, ctx: str | None, rows: list[tuple[str, str, str]]
    ) -> None:
        """Show system prompt, context length (None: hidden), and effective_parameter_rows()."""
        is_another = session_id != self._session_id
        edited = (
            {typed.setting for typed in self.pending_edits()}
            if session_id == self._session_id
            else ()
        )
        self._session_id = session_id
        self.query_one(f"#set-{CTX_SETTING}").display = ctx is not None
        shown = {CTX_SETTING: (ctx or "", "model default")}
        for name, value, origin in rows:
            default = f"{value}, {origin or 'localgen'}" if value != "-" else ""
            shown[name] = (value, "") if origin == "yours" else ("", default)
        self._values = {SYSTEM_SETTING: system} | {
            name: value for name, (value, _) in shown.items()
        }
        for name, value_and_usual in shown.items():
            self.query_one(f"#set-{name}", SettingField).show_value(*value_and_usual)
        if is_another or not self._is_shown:
            for group in self.query(Collapsible):
                if any(self._values[field.setting] for field in group.query(SettingField)):
                    group.collapsed = False
        self._is_shown = True
        for name in self._values:
            if name not in edited:
                self._fill_field(name)
        self._show_errors()

    def on_hide(self) -> None:
        self._is_shown = False

    def pending_edits(self) -> list[SettingEdit]:
        """Fields whose text differs from the applied value."""
        fields = ((name, self._text(name)) for name in self._values)
        return [
            SettingEdit(self._session_id, name, text)
            for name, text in fields
            if text != self._values[name]
        ]

    def submit_edits(self) -> None:
        """Post all pending edits before the fields show another session."""
        for typed in self.pending_edits():
            self.post_message(self.Changed(typed))

    def mark_applied(self, edit: SettingEdit) -> None:
        """Record that a setting was applied."""
        if edit.session_id == self._session_id:
            self._values[edit.setting] = edit.text
        self._rejected_edits.pop((edit.session_id, edit.setting), None)
        self._show_errors()

    def mark_rejected(self, edit: SettingEdit, reason: str) -> None:
        """Show why a setting was rejected; its text stays in the field."""
        self._rejected_edits[edit.session_id, edit.setting] = (edit.text, reason)
        self._show_errors()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._submit_field(event.input)

    def on_input_blurred(self, event: Input.Blurred) -> None:
        event.stop()
        self._submit_field(event.input)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Describe the setting that has the focus."""
        field = event.widget.parent
        setting = field.setting if isinstance(field, SettingField) else ""
        described = parameters.describe(setting) if setting in parameters.PARAMETER_NAMES else ""
        self.query_one("#hint", Static).update(Content(described))

    def on_descendant_blur(self, event: events.DescendantBlur) -> None:
        if isinstance(event.widget, TextArea):
            self._submit_field(event.widget)

    def action_close(self) -> None:
        self.post_message(self.Closed())

    def _field(self, setting: str) -> TextArea | Input:
        if setting == SYSTEM_SETTING:
            return self.query_one(f"#{SYSTEM_SETTING}", TextArea)
        return self.query_one(f"#set-{setting} Input", Input)

    def _text(self, setting: str) -> str:
        field = self._field(setting)
        return field.text if isinstance(field, TextArea) else field.value.strip()

    def _fill_field(self, setting: str) -> None:
        value = self._values[setting]
        text, _ = self._rejected_edits.get((self._session_id, setting), (value, ""))
        field = self._field(setting)
        if isinstance(field, Input):
            field.value = text
        elif field.text != text:
            field.text = text
        if text == value:
            self._values[setting] = self._text(setting)  # a field may normalize the text

    def _submit_field(self, field: TextArea | Input) -> None:
        setting = field.parent.setting if isinstance(field.parent, SettingField) else SYSTEM_SETTING
        typed = SettingEdit(self._session_id, setting, self._text(setting))
        if typed.text != self._values.get(setting, typed.text):
            self.post_message(self.Changed(typed))
        else:  # back to the applied value: clears the error
            self.mark_applied(typed)

    def _show_errors(self) -> None:
        """Show below each field why its text was rejected."""
        reasons = {
            setting: why
            for (session, setting), (_, why) in self._rejected_edits.items()
            if session == self._session_id
        }
        if reasons == self._shown_errors:
            return
        self._shown_errors = reasons
        self.query(".error").remove()
        for setting, why in reasons.items():
            field = self._field(setting)
            row = field.parent if isinstance(field.parent, SettingField) else field
            assert isinstance(row.parent, Widget)
            row.parent.mount(Static(Content(why), classes="error"), after=row)
            for group in row.ancestors_with_self:
                if isinstance(group, Collapsible):
                    group.collapsed = False
