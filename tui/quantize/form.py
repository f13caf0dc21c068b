"""What is to be made of which model: a line for each part of the choice."""

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
    GROUP_SIZES,
    METHOD_NAMES,
    WEIGHED,
    Choice,
    why_not,
    why_not_value,
)
from localgen.tui.quantize.choices import Choices

_ROWS = [(size, "row" if size < 0 else str(size)) for size in GROUP_SIZES]
_WEIGHED_LABELS = ("nothing", "matrix", "matrix+awq")
_LABELS = {
    "model": "Model",
    "method": "Method",
    "gguf": "File type",
    "weighed": "Calibrate",
    "bits": "Bits",
    "group_size": "Group",
    "text": "Text",
    "is_measured": "Measure",
    "out": "Result",
}
_OPTIONS: dict[str, list[tuple[object, str]]] = {
    "method": [(name, name) for name in METHOD_NAMES],
    "weighed": list(zip(WEIGHED, _WEIGHED_LABELS, strict=True)),
    "bits": [(bits, str(bits)) for bits in BITS],
    "group_size": [(value, label) for value, label in _ROWS],
    "is_measured": [(True, "yes"), (False, "no")],
}
# what is chosen from a list of its own
LISTED = ("model", "gguf")


class Opener(Widget, can_focus=True):
    """A value that is chosen elsewhere. Posts Wanted."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,space", "open", "Choose from a list", show=False)
    ]
    DEFAULT_CSS = """
    Opener { width: 1fr; height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    """

    class Wanted(Message):
        """The list of a field is to be shown."""

        def __init__(self, field: str) -> None:
            super().__init__()
            self.field = field

    def __init__(self, field: str) -> None:
        super().__init__(id=f"control-{field}")
        self._field, self._value = field, ""

    def show(self, value: str) -> None:
        self._value = value
        self.refresh()

    def render(self) -> Content:
        style = "bold reverse" if self.has_focus else "bold $primary"
        return Content.assemble((f"▾ {one_line(self._value)}", style))

    def on_click(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        self.post_message(self.Wanted(self._field))


class Field(Horizontal):
    """A name, and what sets the value; or why there is nothing to be set."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "app.focus_next", "Next line", show=False),
        Binding("up", "app.focus_previous", "Line before", show=False),
    ]
    DEFAULT_CSS = """
    Field { height: auto; }
    Field Label { width: 11; color: $text-muted; }
    Field:focus-within Label { color: $foreground; text-style: bold; }
    Field Input { width: 1fr; }
    Field .closed { display: none; width: 1fr; height: auto; color: $text-disabled; }
    Field.-closed .closed { display: block; }
    Field.-closed .control { display: none; }
    """

    def __init__(self, name: str, control: Widget) -> None:
        super().__init__(id=f"field-{name}")
        self.field, self._control = name, control
        control.add_class("control")

    def compose(self) -> ComposeResult:
        yield Label(_LABELS[self.field], markup=False)
        yield self._control
        yield Static(classes="closed", markup=False)

    def show(self, choice: Choice, usual_out: str) -> None:
        """usual_out: what the result is called if nothing is said."""
        why = why_not(choice, self.field)
        self.set_class(bool(why), "-closed")
        self.query_one(".closed", Static).update(Content(f"– {why}"))
        is_weighed = self.field == "weighed"
        value: Any = choice.calibrated_for if is_weighed else getattr(choice, self.field)
        match self._control:
            case Choices() as choices:
                values = [each for each, _ in _OPTIONS[self.field]]
                refused = {} if why else {v: why_not_value(choice, self.field, v) for v in values}
                choices.show(value, {v: said for v, said in refused.items() if said})
            case Input() as field:
                field.placeholder = usual_out if self.field == "out" else "localgen's own"
                if field.value.strip() != value:
                    field.value = value
            case Opener() as opener:
                opener.show(str(value))


class Form(Vertical):
    """Holds a choice. Posts Changed with each new one."""

    DEFAULT_CSS = """
    Form {
        border: round $border; border-title-color: $primary; border-title-style: bold;
        padding: 0 1; overflow-y: auto; scrollbar-size-vertical: 1;
    }
    Form:focus-within { border: round $primary; }
    Form:disabled { opacity: 60%; }
    """

    class Changed(Message):
        """The choice is another one."""

        def __init__(self, choice: Choice) -> None:
            super().__init__()
            self.choice = choice

    def __init__(self, choice: Choice) -> None:
        super().__init__()
        self.choice = choice
        self.border_title = "What to make"

    def compose(self) -> ComposeResult:
        for name in _LABELS:
            yield Field(name, _control(name))

    def on_mount(self) -> None:
        self.show(self.choice)

    def show(self, choice: Choice) -> None:
        """Take over a choice."""
        self.choice = choice
        try:
            usual = str(replace(choice, out="").out_path)
        except LocalgenError:
            usual = ""
        for field in self.query(Field):
            field.show(choice, usual)

    def take(self, **parts: Any) -> None:
        """Change parts of the choice as if the user had."""
        changed = replace(self.choice, **parts)
        if changed != self.choice:
            self.show(changed)
            self.post_message(self.Changed(changed))

    def on_choices_changed(self, event: Choices.Changed) -> None:
        event.stop()
        self.take(**{_field_of(event.choices): event.value})

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.take(**{_field_of(event.input): event.value.strip()})

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.screen.focus_next()

    def on_click(self, event: events.Click) -> None:
        """A click on a line's name means the line."""
        field = event.widget.parent if isinstance(event.widget, Label) else None
        if isinstance(field, Field):
            field.query_one(".control").focus()


def _control(name: str) -> Widget:
    if name in LISTED:
        return Opener(name)
    if name in _OPTIONS:
        return Choices(_OPTIONS[name], id=f"control-{name}")
    return Input(compact=True, select_on_focus=False, id=f"control-{name}")


def _field_of(control: Widget) -> str:
    field = control.parent
    assert isinstance(field, Field)
    return field.field
