"""Runs quantizations for the app, one at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from localgen.backends.errors import InvalidRequest
from localgen.quant.originals import require_packages
from localgen.quant.process import QuantizeProcess, QuantizeWorker
from localgen.quant.request.form import (
    QuantizeForm,
    has_unfinished_run,
    load_form,
    save_form,
    with_absolute_output,
    with_relative_output,
)
from localgen.quant.request.request import QuantizeRequest
from localgen.tui.quantize.run import QuantizeRun

# the flag: dry run, which only estimates
StartProcess = Callable[[QuantizeRequest, bool], QuantizeWorker]


def start_process(request: QuantizeRequest, dry_run: bool) -> QuantizeWorker:
    """Start a quantization, or its dry run, in a child process."""
    return QuantizeProcess(request, dry_run=dry_run)


class QuantizeRunner:
    """Starts and tracks quantization runs.

    state_dir: stores the form of the last run. is_remote: the app uses a server on another machine.
    current_run: the running or the last run.
    """

    def __init__(
        self,
        state_dir: Path,
        start_process: StartProcess = start_process,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_remote: bool = False,
    ) -> None:
        self.current_run: QuantizeRun | None = None
        self._saved_path = state_dir / "quantize.json"
        self._start_process, self._clock, self._is_remote = start_process, clock, is_remote
        self._announced_run: QuantizeRun | None = None
        self._edited_form: QuantizeForm | None = None  # since the last run was started

    def require_available(self) -> None:
        """Raises InvalidRequest or LoadFailed if nothing can be quantized on this machine."""
        if self._is_remote:
            raise InvalidRequest(
                "cannot quantize on a remote server: use localgen tui without --url, "
                "or localgen quantize on that machine"
            )
        require_packages()

    @property
    def is_running(self) -> bool:
        return self.current_run is not None and self.current_run.is_running

    def initial_form(self) -> QuantizeForm:
        """Initial form: as last edited, else of the current run, else of an unfinished saved run,
        else the defaults."""
        if self._edited_form is not None:
            return self._edited_form
        if self.current_run is not None:
            return self.current_run.form
        kept = load_form(self._saved_path)
        if kept is None or not has_unfinished_run(kept):
            return QuantizeForm()
        return with_relative_output(kept)

    def keep_form(self, form: QuantizeForm) -> None:
        """Keep an edited form for the time when the screen is opened again."""
        self._edited_form = form

    @property
    def has_edited_form(self) -> bool:
        return self._edited_form is not None

    def dry_run(self, request: QuantizeRequest) -> QuantizeWorker:
        """Start a dry run. Raises LoadFailed if no process can be started."""
        return self._start_process(request, True)

    def start(self, form: QuantizeForm, *, resume: bool) -> QuantizeRun:
        """Start a run. Raises InvalidRequest if one is running, LoadFailed if no process starts."""
        if self.is_running:
            raise InvalidRequest("a model is already being quantized")
        run = QuantizeRun(
            form, self._start_process(form.to_request(resume=resume), False), self._clock
        )
        save_form(with_absolute_output(form), self._saved_path)
        self.current_run, self._edited_form = run, None
        run.start()
        return run

    def stop(self) -> None:
        if self.current_run is not None and self.current_run.is_running:
            self.current_run.stop()

    def mark_announced(self) -> None:
        """Mark the last run's outcome as seen by the user."""
        self._announced_run = self.current_run

    def take_end_message(self) -> str:
        """Return the outcome of the last run once; empty if there is nothing new."""
        if (
            self.current_run is None
            or self.current_run.is_running
            or self.current_run is self._announced_run
        ):
            return ""
        self.mark_announced()
        return f"{self.current_run.status_line()} · F10 shows it"
