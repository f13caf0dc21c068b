"""The question before quitting, if work would be stopped or lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from textual.screen import Screen

from localgen.backends.terminal_text import escape_name, one_line
from localgen.tui.chat.model_picker import ModelPicker
from localgen.tui.chat.session_manager import SessionManager

if TYPE_CHECKING:
    from localgen.tui.quantize.runner import QuantizeRunner


def quit_question(
    manager: SessionManager,
    screens: Sequence[Screen[object]],
    runner: QuantizeRunner | None,
    shell_line: str = "",
) -> str:
    """Text of the confirmation; empty if quitting stops or loses nothing. shell_line: running."""
    parts = [
        *_unfinished_answers(len(manager.answering_sessions)),
        *([f"{one_line(shell_line)} is still running."] if shell_line else []),
        *_running_commands(manager, screens),
        *_running_quantization(runner),
        *_unsaved_sessions(manager),
    ]
    return "\n".join([*parts, "Quit?"]) if parts else ""


def _unfinished_answers(count: int) -> Iterator[str]:
    if count:
        what = "1 answer is" if count == 1 else f"{count} answers are"
        yield f"{what} still being written: the text so far is kept."


def _running_commands(manager: SessionManager, screens: Sequence[Screen[object]]) -> Iterator[str]:
    for each in manager.busy_sessions:
        yield f"{escape_name(each.name)}: {one_line(each.running_command)} is still running."
    if not manager.busy_sessions and any(
        each.is_busy for each in screens if isinstance(each, ModelPicker)
    ):
        yield "A model is being downloaded: the download can be resumed."


def _running_quantization(runner: QuantizeRunner | None) -> Iterator[str]:
    run = None if runner is None else runner.current_run
    if run is not None and run.is_running:
        name, place = escape_name(run.name), run.step_position
        yield f"{name} is being quantized ({place}): finished layers are kept and can be resumed."


def _unsaved_sessions(manager: SessionManager) -> Iterator[str]:
    for each in manager.unsaved_sessions:
        name, why = escape_name(each.name), one_line(each.save_error)
        yield f"{name} is not saved and would be lost: {why}."
