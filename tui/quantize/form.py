"""The quantize form: one row per field of a QuantizeForm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, Label, Static

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.quant.request.form import (
    BITS,
    GGUF_CALIBRATIONS,
    GROUP_SIZES,
    METHOD_CHOICES,
    QuantizeForm,
    invalid_value_reason,
    unavailable_reason,
)
from localgen.tui.quantize.choices import RadioChoices

_GROUP_SIZE_OPTIONS = [(size, "row" if size < 0 else str(size)) for size in GROUP_SIZES]
_CALIBRATION_LABELS = ("nothing", "matrix", "matrix+awq", "gptq")
_LABELS = {
    "model": "Model",
    "method": "Method",
    "gguf": "File type",
    "gguf_calibration": "Calibrate",
    "bits": "Bits",
    "group_size": "Group",
    "is_learned": "Rounding",
    "text": "Text",
    "is_measured": "Measure",
    "out": "Result",
}
_OPTIONS: dict[str, list[tuple[object, str]]] = {
    "method": [(name, name) for name in METHOD_CHOICES],
    "gguf_calibration": list(zip(GGUF_CALIBRATIONS, _CALIBRATION_LABELS, strict=True)),
    "bits": [(bits, str(bits)) for bits in BITS],
    "group_size": [(value, label) for value, label in _GROUP_SIZE_OPTIONS],
    "is_learned": [(True, "learned"), (False, "plain")],
    "is_measured": [(True, "yes"), (False, "no")],
}
# fields whose value is chosen in a picker dialog
PICKER_FIELDS = ("model", "gguf")


class PickerButton(Widget, can_focus=True):
    """Shows a value that is chosen in a dialog. Posts Pressed to open it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,space", "open", "Choose from a list", show=False)
    ]
    DEFAULT_CSS = """
    PickerButton { width: 1fr; height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    class Pressed(Message):
        """The picker of a field should be opened."""

        def __init__(self, field: str) -> None:
            super().__init__()
            self.field = field

    def __init__(self, field: str) -> None:
        super().__init__(id=f"control-{field}")
        self._field, self._value = field, ""

    def show_value(self, value: str) -> None:
        self._value = value
        self.refresh()

    def render(self) -> Content:
        style = "bold reverse" if self.has_focus else "bold $primary"
        return Content.assemble((f"▾ {one_line(self._value)}", style))

    def on_click(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        self.post_message(self.Pressed(self._field))


class FormField(Horizontal):
    """A label and its control, or the reason why the field does not apply."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "app.focus_next", "Next field", show=False),
        Binding("up", "app.focus_previous", "Previous field", show=False),
    ]
    DEFAULT_CSS = """
    FormField { height: auto; }
    FormField Label { width: 11; color: $text-muted; }
    FormField:focus-within Label { color: $foreground; text-style: bold; }
    FormField Input { width: 1fr; }
    FormField .disabled-reason { display: none; width: 1fr; height: auto; color: $text-disabled; }
    FormField.-disabled .disabled-reason { display: block; }
    FormField.-disabled .control { display: none; }
    """

    def __init__(self, name: str, control: Widget) -> None:
        super().__init__(id=f"field-{name}")
        self.field_name, self._control = name, control
        control.add_class("control")

    def compose(self) -> ComposeResult:
        yield Label(_LABELS[self.field_name], markup=False)
        yield self._control
        yield Static(classes="disabled-reason", markup=False)

    def show_value(self, form: QuantizeForm, default_out: str) -> None:
        """Show the form's value. default_out: name of the result if none is entered."""
        why = unavailable_reason(form, self.field_name)
        self.set_class(bool(why), "-disabled")
        self.query_one(".disabled-reason", Static).update(Content(f"– {why}"))
        is_calibration = self.field_name == "gguf_calibration"
        value: Any = (
            form.effective_calibration if is_calibration else getattr(form, self.field_name)
        )
        match self._control:
            case RadioChoices() as choices:
                values = [each for each, _ in _OPTIONS[self.field_name]]
                refused = (
                    {}
                    if why
                    else {v: invalid_value_reason(form, self.field_name, v) for v in values}
                )
                choices.show_value(value, {v: reason for v, reason in refused.items() if reason})
            case Input() as field:
                field.placeholder = default_out if self.field_name == "out" else "built-in text"
                if field.value.strip() != value:
                    field.value = value
            case PickerButton() as opener:
                opener.show_value(str(value))


class QuantizeFormPanel(Vertical):
    """Edits a QuantizeForm. Posts Changed with each new form."""

    DEFAULT_CSS = """
    QuantizeFormPanel {
        border: round $border; border-title-color: $primary; border-title-style: bold;
        padding: 0 1; overflow-y: auto; scrollbar-size-vertical: 1;
    }
    QuantizeFormPanel:focus-within { border: round $primary; }
    QuantizeFormPanel:disabled { opacity: 60%; }
    """

    class Changed(Message):
        """The user has changed the form."""

        def __init__(self, form: QuantizeForm) -> None:
            super().__init__()
            self.form = form

    def __init__(self, form: QuantizeForm) -> None:
        super().__init__()
        self.form = form
        self.border_title = "Settings"

    def compose(self) -> ComposeResult:
        for name in _LABELS:
            yield FormField(name, _control(name))

    def on_mount(self) -> None:
        self.show_values(self.form)

    def show_values(self, form: QuantizeForm) -> None:
        """Show a form."""
        self.form = form
        try:
            default_output = str(replace(form, out="").output_path)
        except LocalgenError:
            default_output = ""
        for field in self.query(FormField):
            field.show_value(form, default_output)

    def set_values(self, **changes: Any) -> None:
        """Change fields of the form; posts Changed if any differ."""
        changed = replace(self.form, **changes)
        if changed != self.form:
            self.show_values(changed)
            self.post_message(self.Changed(changed))

    def on_radio_choices_changed(self, event: RadioChoices.Changed) -> None:
        event.stop()
        self.set_values(**{_field_name_of(event.radio_choices): event.value})

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.set_values(**{_field_name_of(event.input): event.value.strip()})

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.screen.focus_next()

    def on_click(self, event: events.Click) -> None:
        """Focus a field's control when its label is clicked."""
        field = event.widget.parent if isinstance(event.widget, Label) else None
        if isinstance(field, FormField):
            field.query_one(".control").focus()


def _control(name: str) -> Widget:
    if name in PICKER_FIELDS:
        return PickerButton(name)
    if name in _OPTIONS:
        return RadioChoices(_OPTIONS[name], id=f"control-{name}")
    return Input(compact=True, select_on_focus=False, id=f"control-{name}")


def _field_name_of(control: Widget) -> str:
    field = control.parent
    assert isinstance(field, FormField)
    return field.field_name
