"""The quantize screen: form, estimate, progress and result."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import ClassVar

from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Button, Static

from localgen.backends.errors import LocalgenError
from localgen.backends.terminal_text import one_line
from localgen.quant.originals import scan_originals
from localgen.quant.request.form import QuantizeForm, method_option, with_option
from localgen.quant.request.gguf_types import AUTO, GGUF_TYPES
from localgen.quant.request.request import QuantizeRequest
from localgen.quant.request.target import parse_gguf_choice
from localgen.tui.quantize.choices import NamePicker
from localgen.tui.quantize.estimate import EstimatePanel, QuantizeEstimate, apply_event
from localgen.tui.quantize.form import PickerButton, QuantizeFormPanel
from localgen.tui.quantize.progress import ProgressPanel
from localgen.tui.quantize.result import QuantizeResultPanel
from localgen.tui.quantize.run import replace_cli_options
from localgen.tui.quantize.runner import QuantizeRunner
from localgen.tui.widgets.dialog import ConfirmDialog
from localgen.tui.widgets.footer import KeyFooter
from localgen.tui.widgets.numbers import format_bytes
from localgen.tui.widgets.tool_screen import ToolScreen

DEBOUNCE_S = 0.4
_WIDE_COLUMNS = 76


class QuantizeScreen(ToolScreen[str | None]):
    """Shows the runner's state; sync() is called many times a second.

    Closes with the result's path to chat with it, or None; a run continues in the background.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "run", "Run"),
        Binding("ctrl+c", "stop", "Stop", priority=True),
        Binding("ctrl+t", "chat", "Chat with it"),
        Binding("ctrl+o", "model", "Model"),
        Binding("escape", "back", "Back"),
        Binding("pageup", "scroll(-1)", "Scroll back", show=False),
        Binding("pagedown", "scroll(1)", "Scroll forward", show=False),
    ]
    DEFAULT_CSS = """
    QuantizeScreen #title { height: 1; background: $panel; padding: 0 1; text-wrap: nowrap; }
    QuantizeScreen #body { height: 1fr; overflow-y: auto; scrollbar-size-vertical: 1; }
    QuantizeScreen QuantizeFormPanel { height: auto; width: 1fr; }
    QuantizeScreen #side { height: auto; width: 1fr; }
    QuantizeScreen.-wide #body { layout: horizontal; overflow-y: hidden; }
    QuantizeScreen.-wide QuantizeFormPanel { height: 1fr; max-width: 56; }
    QuantizeScreen.-wide #side {
        height: 1fr; overflow-y: auto; scrollbar-gutter: stable; scrollbar-size-vertical: 1;
    }
    QuantizeScreen #actions { height: 1; margin: 0 1; }
    QuantizeScreen #actions Button { margin-right: 2; }
    QuantizeScreen #message { height: auto; max-height: 4; padding: 0 2; display: none; }
    QuantizeScreen #message.-shown { display: block; color: $error; }
    """

    def __init__(self, runner: QuantizeRunner) -> None:
        super().__init__()
        self._runner = runner
        self._form_panel = QuantizeFormPanel(runner.initial_form())
        self._estimate_panel, self._progress_panel = EstimatePanel(), ProgressPanel()
        self._result_panel = QuantizeResultPanel()
        self._run_button = Button("Run (Ctrl+R)", id="run", variant="primary", compact=True)
        self._stop_button = Button("Stop (Ctrl+C)", id="stop", variant="warning", compact=True)
        self._chat_button = Button(
            "Chat with it (Ctrl+T)", id="chat", variant="success", compact=True
        )
        # whether the form was changed after the displayed run started
        run = runner.current_run
        self._is_form_changed = run is None or self._form_panel.form != run.form
        # the last run whose end this screen has handled
        self._last_ended_run = None if runner.is_running else runner.current_run
        self._estimated_model = ""
        # the method is the user's choice, or of an earlier run: else it is the one that suits best
        is_default = self._form_panel.form == QuantizeForm()
        self._is_method_chosen = runner.has_edited_form or not is_default
        self._shown_option = method_option(self._form_panel.form)
        self._was_running: bool | None = None
        # the app may call sync() before compose() has finished
        self._is_composed = False
        self._shown_state: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield Static(
            Content.assemble(("localgen tui", "bold $primary"), ("  Quantize a model", "bold")),
            id="title",
        )
        with Vertical(id="body"):
            yield self._form_panel
            with Vertical(id="side"):
                yield self._progress_panel
                yield self._result_panel
                yield self._estimate_panel
        yield Static(id="message", markup=False)
        with Horizontal(id="actions"):
            yield self._run_button
            yield self._stop_button
            yield self._chat_button
        yield KeyFooter(compact=True)

    def on_mount(self) -> None:
        self._is_composed = True
        self.sync()
        if not self._runner.is_running and (self._is_form_changed or not self._has_result):
            self.update_estimate()

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= _WIDE_COLUMNS, "-wide")

    def sync(self) -> None:
        """Show what has changed in the run."""
        if not self._is_composed:
            return
        run, is_running = self._runner.current_run, self._runner.is_running
        if run is not None and is_running:
            self._progress_panel.show_run(run)
        state = (run, is_running, self._is_form_changed, self._estimate_panel.estimate)
        if state == self._shown_state:
            return
        self._shown_state = state
        self._update_panels()
        if run is not None and not is_running and run is not self._last_ended_run:
            self._last_ended_run = run
            self._handle_run_end()

    def show_message(self, message: str) -> None:
        """Show an error below the panels; an empty message hides it."""
        line = self.query_one("#message", Static)
        line.update(Content(one_line(message)))
        line.set_class(bool(message), "-shown")

    @work(exclusive=True, group="estimate")
    async def update_estimate(self) -> None:
        """Dry-run the form, after a pause in typing."""
        choice = self._form_panel.form
        # the recommendation depends on the model alone
        is_same = self._estimated_model == choice.model
        advised = self._estimate_panel.estimate.recommendation if is_same else None
        self._estimated_model = choice.model
        found = QuantizeEstimate(option=method_option(choice), recommendation=advised)
        self._estimate_panel.estimate = found
        self.sync()
        await asyncio.sleep(DEBOUNCE_S)
        try:
            found = await self._dry_run(found, choice.to_request())
        except LocalgenError as error:
            found = replace(found, error=replace_cli_options(error.message), is_complete=True)
        self._estimate_panel.estimate = found
        self.sync()
        self._suggest_best_method(found)

    def _suggest_best_method(self, estimate: QuantizeEstimate) -> None:
        """Select the method that suits this machine best, unless the user has chosen one."""
        advised = estimate.recommendation
        best = advised.best_option if advised is not None else None
        if best is not None and best != estimate.option and not self._is_method_chosen:
            self._form_panel.show_values(with_option(self._form_panel.form, best))
            self._shown_option = best
            self.update_estimate()

    def on_quantize_form_panel_changed(self, event: QuantizeFormPanel.Changed) -> None:
        event.stop()
        self._runner.keep_form(event.form)
        option = method_option(event.form)
        self._is_method_chosen |= option != self._shown_option
        self._shown_option = option
        self.show_message("")
        self._is_form_changed = True
        self.update_estimate()

    def on_picker_button_pressed(self, event: PickerButton.Pressed) -> None:
        event.stop()
        if event.field == "model":
            self.action_model()
        else:
            self._pick_gguf_type()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        match event.button.id:
            case "run":
                self.action_run()
            case "stop":
                self.action_stop()
            case "chat":
                self.action_chat()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer keys only while they have an effect."""
        match action:
            case "run":
                return not self._runner.is_running and (
                    self._is_form_changed or not self._has_result
                )
            case "model":
                return not self._runner.is_running
            case "chat":
                return self._has_result and not self._is_form_changed
        return True

    @work(group="run")
    async def action_run(self) -> None:
        """Start the run, or resume the unfinished one."""
        estimate = self._estimate_panel.estimate
        if estimate.error:
            self.show_message(estimate.error)
        elif not estimate.can_run:
            self.show_message("still estimating: try again in a moment")
        else:
            self.show_message("")
            await self._start_run(self._form_panel.form, resume=estimate.unfinished is not None)

    def action_stop(self) -> None:
        """Copy the selection, or stop the run after confirmation."""
        selected = self.get_selected_text()
        if selected:
            self.app.copy_to_clipboard(selected)
            self.notify("Copied.", timeout=2)
        elif self._runner.is_running:
            self._confirm_stop()
        else:
            self.show_message("nothing is being quantized; Esc goes back, Ctrl+Q quits")

    def action_chat(self) -> None:
        run = self._runner.current_run
        if run is not None and run.result is not None:
            self.dismiss(run.result.path)

    def action_back(self) -> None:
        self.dismiss(None)

    def action_scroll(self, by: int) -> None:
        """Scroll the body or the side panel; depending on the width, only one of them can."""
        for part in (self.query_one("#body"), self.query_one("#side")):
            if by < 0:
                part.scroll_page_up(animate=False)
            else:
                part.scroll_page_down(animate=False)

    @work(group="pick")
    async def action_model(self) -> None:
        """Choose an installed model or type a name."""
        found = await asyncio.to_thread(scan_originals)
        rows = [(one.name, f"{format_bytes(one.size_bytes)} · {one.source}") for one in found]
        hint = "a folder with config.json and safetensors"
        picker = NamePicker("16-bit models", rows, self._form_panel.form.model, hint)
        name = await self.app.push_screen_wait(picker)
        if name is not None:
            self._form_panel.set_values(model=name)

    @work(group="pick")
    async def _pick_gguf_type(self) -> None:
        rows = [
            (name, "needs calibration" if kind.needs_imatrix else "")
            for name, kind in GGUF_TYPES.items()
        ]
        # no number: a typed target such as `auto 4 bits` must match no row
        rows.insert(0, (AUTO, "by measured loss"))
        hint = "auto with a target: auto 3.4G, auto 4 bits, auto KL 0.05"
        current = self._form_panel.form.gguf
        picker = NamePicker("GGUF file types, largest first", rows, current, hint)
        name = await self.app.push_screen_wait(picker)
        if name is None:
            return
        try:
            parse_gguf_choice(name)
        except LocalgenError as error:
            self.show_message(replace_cli_options(error.message))
        else:
            self._form_panel.set_values(gguf=name)

    @property
    def _has_result(self) -> bool:
        run = self._runner.current_run
        return run is not None and not run.is_running and run.result is not None

    async def _dry_run(
        self, estimate: QuantizeEstimate, request: QuantizeRequest
    ) -> QuantizeEstimate:
        """Return the estimate after the dry run; cancelling kills its process."""
        looking = await asyncio.to_thread(self._runner.dry_run, request)
        received = []

        def listen() -> None:
            for event in looking.events():
                received.append(event)  # noqa: PERF402  # events before an error count too

        try:
            await asyncio.to_thread(listen)
        except LocalgenError as error:
            estimate = replace(estimate, error=replace_cli_options(error.message))
        except Exception as error:  # report it; the chats must keep running
            defect = f"internal error ({type(error).__name__}: {error})"
            estimate = replace(estimate, error=defect)
        finally:
            looking.kill()
        for event in received:
            estimate = apply_event(estimate, event)
        return replace(estimate, is_complete=True)

    async def _start_run(self, form: QuantizeForm, *, resume: bool) -> None:
        try:
            await asyncio.to_thread(self._runner.start, form, resume=resume)
        except LocalgenError as error:
            self.show_message(replace_cli_options(error.message))
            return
        self._is_form_changed = False
        self.sync()

    @work(group="stop", exclusive=True)
    async def _confirm_stop(self) -> None:
        run = self._runner.current_run
        stays = "Finished layers are kept and can be resumed."
        if run is not None and not run.form.is_resumable:
            stays = "A file without calibration cannot be resumed."
        question = f"Stop quantizing? {stays}"
        if await self.app.push_screen_wait(ConfirmDialog(question, yes="Stop", no="Continue")):
            self._runner.stop()

    def _handle_run_end(self) -> None:
        self._runner.mark_announced()
        if not self._has_result:
            self.update_estimate()  # shows that it can be resumed

    def _update_panels(self) -> None:
        """Show the panels and buttons that apply to the current state."""
        run, is_running = self._runner.current_run, self._runner.is_running
        has_verdict = run is not None and not is_running and not self._is_form_changed
        self._form_panel.disabled = is_running
        self._progress_panel.display = is_running
        self._result_panel.display = has_verdict
        if run is not None and has_verdict:
            self._result_panel.show_run(run)
        self._estimate_panel.display = not is_running and not (has_verdict and self._has_result)
        estimate = self._estimate_panel.estimate
        label = f"{'Resume' if estimate.unfinished is not None else 'Run'} (Ctrl+R)"
        if str(self._run_button.label) != label:
            self._run_button.label = label
            self._run_button.refresh(layout=True)  # the labels differ in width
        self._run_button.display = self._estimate_panel.display
        self._run_button.disabled = not estimate.can_run
        self._stop_button.display = is_running
        self._chat_button.display = has_verdict and self._has_result
        if is_running != self._was_running:
            self._was_running = is_running
            self.set_focus(
                self._stop_button if is_running else self._form_panel.query_one("#control-model")
            )
        self.refresh_bindings()
