"""Cells of the request table are exactly as wide as their column, whatever their text."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from localgen.tui.top.request_table import TextCell

TEXTS = ("", "llama-8b", "12,345", "日本語のモデル", "e\u0301tude", "[bold]not markup[/]")


@pytest.mark.parametrize("width", [0, 1, 2, 5, 8, 30])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("is_right", [False, True])
def test_cell_fills_its_column(text: str, width: int, is_right: bool) -> None:
    fitted = TextCell(text, is_right_aligned=is_right).fit_to_width(width)
    assert cell_len(fitted) == width
    if cell_len(text) <= width:
        assert fitted.strip() == text
    elif width:
        assert fitted.endswith("…")


@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_cell_renders_like_rich_text(text: str, is_right: bool) -> None:
    def drawn(cell: TextCell | Text) -> str:
        console = Console(file=StringIO(), width=12, force_terminal=True, color_system="truecolor")
        return "".join(
            segment.text
            for line in console.render_lines(cell, console.options.update(no_wrap=True))
            for segment in line
        )

    justify = "right" if is_right else "left"
    text_of_rich = Text(text, "dim", justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    assert drawn(TextCell(text, "dim", is_right)) == drawn(text_of_rich)


def test_cell_style_and_measurement() -> None:
    console = Console(file=StringIO(), width=12)
    ((segment,),) = console.render_lines(TextCell("ab", "dim"), console.options.update(width=4))
    assert segment.text == "ab  "
    assert segment.style is not None
    assert segment.style.dim
    assert Measurement.get(console, console.options, TextCell("日本")) == Measurement(4, 4)
