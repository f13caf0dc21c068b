"""Code blocks of prompts."""

from __future__ import annotations

from localgen.chat.fences import fenced, with_file, with_short_blocks, without_blocks
from localgen.chat.session_recorder import title_from_prompt

BLOCK = fenced("\n".join(f"line {n}" for n in range(1, 9)), "console")


def test_a_fence_is_longer_than_those_inside() -> None:
    assert fenced("a\n", "py") == "```py\na\n```"
    assert fenced("````\nx\n````", "") == "`````\n````\nx\n````\n`````"
    assert without_blocks(fenced("```\nx\n```", "md") + "\nafter") == "after"


def test_long_blocks_are_shortened() -> None:
    text = f"why?\n{BLOCK}\nand {BLOCK}"
    assert with_short_blocks(BLOCK, 8) == BLOCK
    assert with_short_blocks(text, 4) == (
        f"why?\n```console\nline 1\nline 2\nline 3\n… 5 lines more\n```\nand {BLOCK}"
    )
    assert with_short_blocks("```py\nnever closed\na\nb\nc", 2) == "```py\nnever closed\na\nb\nc"


def test_a_session_is_named_for_the_question_not_for_the_code() -> None:
    assert title_from_prompt(f"{BLOCK}\nWhat is  wrong?") == "What is wrong?"
    assert title_from_prompt(BLOCK).startswith("```console line 1")
    assert title_from_prompt(with_file("explain @a.py", "a.py", BLOCK)) == "explain @a.py"
