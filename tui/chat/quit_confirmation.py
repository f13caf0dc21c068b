"""What leaving now would end or lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from textual.screen import Screen

from localgen.backends.terminal_text import one_line
from localgen.tui.chat.model_picker import ModelPicker
from localgen.tui.chat.session_manager import Desk
from localgen.tui.quantize.runner import Workshop


def question(desk: Desk, screens: Sequence[Screen[object]], workshop: Workshop) -> str:
    """To be asked before; empty: nothing is at stake."""
    parts = [
        *_answers(len(desk.answering)),
        *_work(desk, screens),
        *_quantization(workshop),
        *_unkept(desk),
    ]
    return "\n".join([*parts, "Leave?"]) if parts else ""


def _answers(count: int) -> Iterator[str]:
    if count:
        what = "1 answer is" if count == 1 else f"{count} answers are"
        yield f"{what} still being written: what is there is kept."


def _work(desk: Desk, screens: Sequence[Screen[object]]) -> Iterator[str]:
    for each in desk.busy:
        yield f"{one_line(each.name)}: {one_line(each.busy)} is not done yet."
    if not desk.busy and any(each.is_busy for each in screens if isinstance(each, ModelPicker)):
        yield "A model is being fetched: it goes on from there the next time."


def _quantization(workshop: Workshop) -> Iterator[str]:
    if workshop.run is not None and workshop.run.is_running:
        name, place = one_line(workshop.run.name), workshop.run.place
        yield f"{name} is being made ({place}): what is done is kept, and can be gone on with."


def _unkept(desk: Desk) -> Iterator[str]:
    for each in desk.unkept:
        yield f"{one_line(each.name)} is not saved and would be lost: {one_line(each.unkept)}."
