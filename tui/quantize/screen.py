"""The quantize screen: what to make, what that takes, how far it is, what came of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Button, Static

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.quant.originals import originals
from localgen.quant.request.form import Choice, option
from localgen.quant.request.gguf_types import TYPES
from localgen.quant.request.request import Asked
from localgen.tui.quantize.choices import NamePicker
from localgen.tui.quantize.estimate import EstimatePanel, Reckoning, with_event
from localgen.tui.quantize.form import Form, Opener
from localgen.tui.quantize.progress import ProgressPanel
from localgen.tui.quantize.result import VerdictPanel
from localgen.tui.quantize.run import on_screen
from localgen.tui.quantize.runner import Workshop
from localgen.tui.widgets import numbers
from localgen.tui.widgets.dialog import Confirm
from localgen.tui.widgets.footer import Keys

PAUSE_S = 0.4
_WIDE_COLUMNS = 76


class QuantizeScreen(Screen[str | None]):
    """Shows what the workshop does. sync() is called many times a second.

    Closes with the result that is to be talked with, or None; the run goes on.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "run", "Run"),
        Binding("ctrl+c", "stop", "Stop", priority=True),
        Binding("ctrl+t", "talk", "Chat with it"),
        Binding("ctrl+o", "model", "Model"),
        Binding("escape", "back", "Back"),
        Binding("pageup", "scroll(-1)", "Scroll back", show=False),
        Binding("pagedown", "scroll(1)", "Scroll on", show=False),
    ]
    DEFAULT_CSS = """
    QuantizeScreen #title { height: 1; background: $panel; padding: 0 1; text-wrap: nowrap; }
    QuantizeScreen #body { height: 1fr; overflow-y: auto; scrollbar-size-vertical: 1; }
    QuantizeScreen Form { height: auto; width: 1fr; }
    QuantizeScreen #side { height: auto; width: 1fr; }
    QuantizeScreen.-wide #body { layout: horizontal; overflow-y: hidden; }
    QuantizeScreen.-wide Form { height: 1fr; max-width: 56; }
    QuantizeScreen.-wide #side {
        height: 1fr; overflow-y: auto; scrollbar-gutter: stable; scrollbar-size-vertical: 1;
    }
    QuantizeScreen #acts { height: 1; margin: 0 1; }
    QuantizeScreen #acts Button { margin-right: 2; }
    QuantizeScreen #told { height: auto; max-height: 4; padding: 0 2; display: none; }
    QuantizeScreen #told.-shown { display: block; color: $error; }
    """

    def __init__(self, workshop: Workshop) -> None:
        super().__init__()
        self._workshop = workshop
        self._form = Form(workshop.first())
        self._estimate, self._progress = EstimatePanel(), ProgressPanel()
        self._verdict = VerdictPanel()
        self._run = Button("Run", id="run", variant="primary", compact=True)
        self._stop = Button("Stop (Ctrl+C)", id="stop", variant="warning", compact=True)
        self._talk = Button("Chat with it (Ctrl+T)", id="talk", variant="success", compact=True)
        # whether the form has changed since the run that is shown began
        self._is_anew = workshop.run is None
        # the last run whose end is known here
        self._ended = None if workshop.is_running else workshop.run
        self._looked_at = ""
        self._had_stop: bool | None = None
        # the beat of the program may come before all parts are there
        self._is_whole = False
        self._shown: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield Static(
            Content.assemble(("localgen tui", "bold $primary"), ("  Quantize a model", "bold")),
            id="title",
        )
        with Vertical(id="body"):
            yield self._form
            with Vertical(id="side"):
                yield self._progress
                yield self._verdict
                yield self._estimate
        yield Static(id="told", markup=False)
        with Horizontal(id="acts"):
            yield self._run
            yield self._stop
            yield self._talk
        yield Keys(compact=True)

    def on_mount(self) -> None:
        self._is_whole = True
        self.sync()
        if not self._workshop.is_running and not self._is_made:
            self.reckon()

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= _WIDE_COLUMNS, "-wide")

    def sync(self) -> None:
        """What is new in the run."""
        if not self._is_whole:
            return
        run, is_running = self._workshop.run, self._workshop.is_running
        if run is not None and is_running:
            self._progress.show(run)
        state = (run, is_running, self._is_anew, self._estimate.reckoning)
        if state == self._shown:
            return
        self._shown = state
        self._show()
        if run is not None and not is_running and run is not self._ended:
            self._ended = run
            self._has_ended()

    def tell(self, message: str) -> None:
        """Something that did not do, below everything; nothing: it does."""
        told = self.query_one("#told", Static)
        told.update(Content(one_line(message)))
        told.set_class(bool(message), "-shown")

    @work(exclusive=True, group="reckon")
    async def reckon(self) -> None:
        """Look at what the choice takes, once it has been left alone for a moment."""
        choice = self._form.choice
        # what suits the machine stays while it is the same model
        is_same = self._looked_at == choice.model
        advised = self._estimate.reckoning.advised if is_same else None
        self._looked_at = choice.model
        found = Reckoning(option=option(choice), advised=advised)
        self._estimate.reckoning = found
        self.sync()
        await asyncio.sleep(PAUSE_S)
        try:
            found = await self._looked(found, choice.asked())
        except LocalgenError as error:
            found = replace(found, error=on_screen(error.message), is_whole=True)
        self._estimate.reckoning = found
        self.sync()

    def on_form_changed(self, event: Form.Changed) -> None:
        event.stop()
        self.tell("")
        self._is_anew = True
        self.reckon()

    def on_opener_wanted(self, event: Opener.Wanted) -> None:
        event.stop()
        if event.field == "model":
            self.action_model()
        else:
            self._pick_type()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        match event.button.id:
            case "run":
                self.action_run()
            case "stop":
                self.action_stop()
            case "talk":
                self.action_talk()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys are offered while they do something."""
        match action:
            case "run":
                return not self._workshop.is_running and (self._is_anew or not self._is_made)
            case "model":
                return not self._workshop.is_running
            case "talk":
                return self._is_made and not self._is_anew
        return True

    @work(group="run")
    async def action_run(self) -> None:
        """Begin, or go on with what lies there."""
        reckoning = self._estimate.reckoning
        if reckoning.error:
            self.tell(reckoning.error)
        elif not reckoning.is_possible:
            self.tell("not yet: what it takes is still being reckoned")
        else:
            self.tell("")
            await self._begin(self._form.choice, resume=reckoning.unfinished is not None)

    def action_stop(self) -> None:
        """Copy what is selected; or stop the run, after a question."""
        selected = self.get_selected_text()
        if selected:
            self.app.copy_to_clipboard(selected)
            self.notify("Copied.", timeout=2)
        elif self._workshop.is_running:
            self._stop_if_sure()
        else:
            self.tell("nothing is being quantized; Esc goes back, Ctrl+Q leaves")

    def action_talk(self) -> None:
        run = self._workshop.run
        if run is not None and run.made is not None:
            self.dismiss(run.made.path)

    def action_back(self) -> None:
        self.dismiss(None)

    def action_scroll(self, by: int) -> None:
        """Of the two that can scroll one does, by the room there is."""
        for part in (self.query_one("#body"), self.query_one("#side")):
            if by < 0:
                part.scroll_page_up(animate=False)
            else:
                part.scroll_page_down(animate=False)

    @work(group="pick")
    async def action_model(self) -> None:
        """Choose one of the models that are here, or type one."""
        found = await asyncio.to_thread(originals)
        rows = [(one.name, f"{numbers.size(one.size_bytes)} · {one.source}") for one in found]
        hint = "a folder with config.json and safetensors"
        picker = NamePicker("Models in 16 bits", rows, self._form.choice.model, hint)
        name = await self.app.push_screen_wait(picker)
        if name is not None:
            self._form.take(model=name)

    @work(group="pick")
    async def _pick_type(self) -> None:
        rows = [
            (name, "needs calibration" if kind.needs_importance else "")
            for name, kind in TYPES.items()
        ]
        picker = NamePicker("Types of GGUF files, the largest first", rows, self._form.choice.gguf)
        name = await self.app.push_screen_wait(picker)
        if name is not None:
            self._form.take(gguf=name)

    @property
    def _is_made(self) -> bool:
        run = self._workshop.run
        return run is not None and not run.is_running and run.made is not None

    async def _looked(self, found: Reckoning, asked: Asked) -> Reckoning:
        """What is found out; cancelled: the one who looks is ended."""
        looking = await asyncio.to_thread(self._workshop.look, asked)
        told = []

        def listen() -> None:
            for event in looking.events():
                told.append(event)  # noqa: PERF402  # what is told before an error counts too

        try:
            await asyncio.to_thread(listen)
        except LocalgenError as error:
            found = replace(found, error=on_screen(error.message))
        except Exception as error:  # a user sees a sentence, and the chats go on
            defect = f"a defect of localgen ({type(error).__name__}: {error})"
            found = replace(found, error=defect)
        finally:
            looking.end()
        for event in told:
            found = with_event(found, event)
        return replace(found, is_whole=True)

    async def _begin(self, choice: Choice, *, resume: bool) -> None:
        try:
            await asyncio.to_thread(self._workshop.begin, choice, resume=resume)
        except LocalgenError as error:
            self.tell(on_screen(error.message))
            return
        self._is_anew = False
        self.sync()

    @work(group="stop", exclusive=True)
    async def _stop_if_sure(self) -> None:
        run = self._workshop.run
        stays = "The layers that are done stay, and can be gone on with."
        if run is not None and not run.choice.goes_by_layers:
            stays = "A file without calibration is begun anew the next time."
        question = f"Stop quantizing? {stays}"
        if await self.app.push_screen_wait(Confirm(question, yes="Stop", no="Go on")):
            self._workshop.stop()

    def _has_ended(self) -> None:
        self._workshop.seen()
        if not self._is_made:
            self.reckon()  # what is done can be gone on with

    def _show(self) -> None:
        """The parts that say something now."""
        run, is_running = self._workshop.run, self._workshop.is_running
        has_verdict = run is not None and not is_running and not self._is_anew
        self._form.disabled = is_running
        self._progress.display = is_running
        self._verdict.display = has_verdict
        if run is not None and has_verdict:
            self._verdict.show(run)
        self._estimate.display = not is_running and not (has_verdict and self._is_made)
        reckoning = self._estimate.reckoning
        label = "Go on" if reckoning.unfinished is not None else "Run"
        self._run.label = f"{label} (Ctrl+R)"
        self._run.display = self._estimate.display
        self._run.disabled = not reckoning.is_possible
        self._stop.display = is_running
        self._talk.display = has_verdict and self._is_made
        if is_running != self._had_stop:
            self._had_stop = is_running
            self.set_focus(self._stop if is_running else self._form.query_one("#control-model"))
        self.refresh_bindings()
