"""Answers on a terminal look the same however they are split, and are never interpreted."""

from __future__ import annotations

import io
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console
from rich.segment import Segment
from scripted_client import TIMINGS, answer
from serving import wait_until

from localgen.backends import units
from localgen.backends.terminal_text import (
    ProseStream,
    collapse,
    escape_control_chars,
    one_line,
)
from localgen.backends.types import RestoredTokens, Timings
from localgen.chat import report
from localgen.chat.markup import split_blocks
from localgen.repl.live_answer import LiveAnswer
from localgen.repl.live_rows import LiveRows
from localgen.repl.load_progress import LoadProgressLine
from localgen.repl.markdown import render_block

RICH_TEXT = """# A title

Some **bold** text, `code`, a [link](http://a.example/x) and 🙂.
A second line.

1. one

2. two
   - nested

   still two

- a

- b
para

```py
def f(x):

    return x
```

| name | value |
|------|------:|
| a    |     1 |
| bb   |    22 |

> quoted

<think>
never hidden
</think>

![picture](http://a.example/p.png) &lt;

[ref]: http://hidden.example

last words without a newline"""


def console(**changes: object) -> Console:
    known: dict[str, object] = {"file": io.StringIO(), "width": 60, "height": 24}
    return Console(**(known | {"highlight": False} | changes))  # type: ignore[arg-type]


def pieces(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(len(text) + 1), k=rng.randint(0, len(text))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def drawn(parts: list[str], **changes: object) -> str:
    shown = console(**changes)
    with LiveAnswer(shown, used_tokens=10, max_context=2048) as live:
        for number, part in enumerate(parts):
            live.feed(part, number)
            if not shown.is_terminal:
                live._print_final()  # every state that a painter could see
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


@pytest.mark.parametrize("seed", range(25))
def test_an_answer_looks_the_same_however_it_was_cut(seed: int) -> None:
    assert drawn(pieces(RICH_TEXT, random.Random(seed))) == drawn([RICH_TEXT])


@pytest.mark.parametrize("seed", range(25))
def test_blocks_lose_nothing(seed: int) -> None:
    done: list[str] = []
    tail = ""
    for piece in pieces(RICH_TEXT, random.Random(seed)):
        blocks, tail = split_blocks(tail + piece)
        done += blocks
    whole = "".join([*done, tail])
    assert re.sub(r"\s", "", whole) == re.sub(r"\s", "", RICH_TEXT)


def test_nothing_the_model_wrote_is_hidden() -> None:
    text = drawn([RICH_TEXT])
    for word in (
        "<think>",
        "never hidden",
        "picture",
        "p.png",
        "&lt;",
        "hidden.example",
        "a.example/x",
    ):
        assert word in text
    assert "last words" in text


THOUGHT = "First this.\n\nThen *that*, and so on"


def test_thoughts_are_dim() -> None:
    shown = console(force_terminal=True, color_system="standard")
    with LiveAnswer(shown, used_tokens=10, max_context=2048) as live:
        live.feed("", 1, THOUGHT)
        live.feed("The answer.", 2)
    assert isinstance(shown.file, io.StringIO)
    assert "\x1b[2mThen *that*, and so on" in shown.file.getvalue()
    assert "\x1b[2mThe answer." not in shown.file.getvalue()


@pytest.mark.parametrize("seed", range(10))
def test_thoughts_look_the_same_however_they_were_cut(seed: int) -> None:
    shown = console()
    with LiveAnswer(shown, used_tokens=10, max_context=2048) as live:
        for part in pieces(THOUGHT, random.Random(seed)):
            live.feed("", 1, part)
            live._print_final()
        live.feed("The **answer**.", 2)
        live._print_final()
    assert isinstance(shown.file, io.StringIO)
    lines = [line.rstrip() for line in shown.file.getvalue().splitlines()]
    said = ["First this.", "", "Then *that*, and so on", "", "The answer."]
    assert lines[: len(said)] == said


def test_lines_of_a_paragraph_stay_lines() -> None:
    assert drawn(["roses\nviolets\n"]).split("\n")[:2] == ["roses", "violets"]


def test_code_blocks_have_no_margin() -> None:
    lines = drawn(["```py\ndef f(x):\n    return x\n```\n"]).split("\n")
    assert lines[:4] == ["```py", "def f(x):", "    return x", "```"]


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\x08\x7f\x1b]8;;http://evil\x1b\\x\u202eabc\r\n"


@pytest.mark.parametrize(
    "frame", ["{}", "`{}`", "# {}", "```\n{}\n```", "| {} |\n|---|\n", "[{}](x)"]
)
def test_control_sequences_in_an_answer_are_inert(frame: str) -> None:
    text = drawn(list(frame.format(HOSTILE)), force_terminal=True, color_system=None)
    # sequences that rich writes to move the cursor and clear rows of the live part
    text = re.sub(r"\x1b\[(\?25[lh]|\d*[ABK]|\d*G|\d*m|1A\x1b\[2K)", "", text).replace("\r", "")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)


@pytest.mark.parametrize("seed", range(10))
def test_inert_does_not_depend_on_cuts(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices([*HOSTILE, "\r", "\n", "\r\n"], k=200))
    stream, *parts = ProseStream(), *pieces(text, rng)
    shown = "".join(map(stream.feed, parts)) + stream.feed("", last=True)
    assert shown == escape_control_chars(text)


@pytest.mark.parametrize("parts", [["half\rdone\r\nline\r"], list("half\rdone\r\nline\r")])
def test_a_carriage_return_is_shown_unless_it_ends_a_line(parts: list[str]) -> None:
    assert drawn(parts).splitlines()[:2] == [r"half\rdone", r"line\r"]
    shown = console()
    with LiveAnswer(shown, used_tokens=10, max_context=2048) as live:
        for part in parts:
            live.feed("", 1, part)
        live.feed("answer", 2)
    assert isinstance(shown.file, io.StringIO)
    assert shown.file.getvalue().splitlines()[:2] == [r"half\rdone", r"line\r"]


def test_inert_keeps_what_is_text() -> None:
    text = "tab\tnewline\n 🙂 👩‍👩‍👧 é 中文"
    assert escape_control_chars(text) == text
    assert escape_control_chars("a\ud800b").encode()
    assert one_line("a\n b\x1b\t") == r"a\n b\x1b\t"
    assert collapse(" a\n b\x1b\t") == r"a b\x1b"


def test_the_live_part_never_outgrows_the_terminal() -> None:
    shown = console(height=10, force_terminal=True)
    live = LiveAnswer(shown, used_tokens=0, max_context=100)
    live.feed("```\n" + "\n".join(map(str, range(100))), 1)
    live._print_final()
    rows = [*live._live.live, *live._render_status()]
    assert len(rows) <= 9
    text = "\n".join("".join(segment.text for segment in row) for row in rows)
    assert "99" in text
    assert "context ~1/100" in text


def test_without_figures_the_live_part_is_the_answer_alone() -> None:
    shown = console(force_terminal=True)
    live = LiveAnswer(shown, used_tokens=0, max_context=100, shows_figures=False)
    assert live._live.live == []
    live.feed("some text", 2)
    live._print_final()
    rows = ["".join(segment.text for segment in row) for row in live._live.live]
    assert rows == ["some text"]


@pytest.mark.parametrize(("columns", "rows"), [(60, 2), (50, 2), (49, 3), (20, 4), (10, 6)])
def test_rows_that_a_narrower_terminal_wraps_are_removed_whole(columns: int, rows: int) -> None:
    shown = console(force_terminal=True)
    live = LiveRows(shown)
    live.draw([], [[Segment("a" * 50)]], [[Segment("b" * 7)]])
    assert isinstance(shown.file, io.StringIO)
    shown.file.truncate(shown.file.seek(0))
    shown.width = columns
    if columns != 60:
        assert not live.draw([[Segment("lasting")]])
        assert not shown.file.getvalue()
        assert live.is_resized()
    assert live.draw([[Segment("lasting")]])
    assert shown.file.getvalue() == "\r" + "\x1b[1A\x1b[2K" * rows + "lasting\n"


class Tmux:
    """A screen that wraps lines again at a resize, and has room at its end meanwhile: the rows that
    this adds scroll out at the top, where nothing erases them."""

    def __init__(self, columns: int) -> None:
        self._columns, self._num_gone = columns, 0
        self._lines = [*["above"] * 8, ""]

    def _rows(self) -> list[tuple[int, int]]:
        """The line of each row, and where in the line it begins."""
        return [
            (number, start)
            for number, line in enumerate(self._lines)
            for start in range(0, max(1, len(line)), self._columns)
        ]

    def resize(self, columns: int) -> None:
        before, self._columns = self._rows(), columns
        after = self._rows()
        num_left = len(before) - self._num_gone
        gone = sum(row < before[self._num_gone] for row in after)  # wrapped again like the others
        self._num_gone = max(gone, len(after) - num_left)

    def write(self, output: str) -> None:
        for part in re.findall(r"\x1b\[1A\x1b\[2K|\n|\x1b\[[?0-9;]*[a-zA-Z]|[^\x1b\n]+", output):
            if part == "\x1b[1A\x1b[2K":
                if len(self._rows()) - 1 > self._num_gone:
                    *self._lines, last, _ = self._lines
                    kept = last[: (len(last) - 1) // self._columns * self._columns] if last else ""
                    self._lines += [kept, ""] if kept else [""]
            elif part == "\n":
                self._lines.append("")
            elif part[0] != "\x1b":
                self._lines[-1] += part.replace("\r", "")

    @property
    def text(self) -> str:
        return "".join(self._lines).replace(" ", "").replace("above", "")


def streamed_with_resizes(answer: str, rng: random.Random, height: int) -> str:
    """What a screen shows at the end, without spaces and lines of tables."""
    shown = console(force_terminal=True, width=60, height=height, color_system=None)
    assert isinstance(shown.file, io.StringIO)
    terminal = Tmux(60)
    live = LiveAnswer(shown, used_tokens=0, max_context=None, shows_figures=rng.random() < 0.5)
    while answer:
        size = rng.randint(1, 30)
        text, answer = answer[:size], answer[size:]
        live.feed(text, 1)
        live._print_final(last=not answer)
        terminal.write(shown.file.getvalue())
        shown.file.truncate(shown.file.seek(0))
        if rng.random() < 0.1:
            shown.width = rng.randint(25, 90)
            terminal.resize(shown.width)
    return re.sub("[\u2500-\u257f]", "", terminal.text)


HEIGHTS = [6, 12, 200]


@pytest.mark.parametrize("height", HEIGHTS)
@pytest.mark.parametrize("seed", range(8))
def test_a_resize_repeats_and_loses_no_prose(seed: int, height: int) -> None:
    rng = random.Random(seed)
    words = [f"w{number}" for number in range(150)]
    forms = ["**{0}** ", "`{0}` ", "[{0}](http://a.example/{0}) "]
    texts = [
        rng.choice(forms if rng.random() < 0.2 else ["{0} "]).format(word)
        + "\n\n" * (rng.random() < 0.03)
        for word in words
    ]
    whole = streamed_with_resizes("".join(texts), random.Random(0), 200)
    found = streamed_with_resizes("".join(texts), rng, height)
    # what was incomplete when it was made lasting may keep its marks
    assert re.sub(r"[*`\[\]()]", "", found) == re.sub(r"[*`\[\]()]", "", whole)


@pytest.mark.parametrize("height", HEIGHTS)
@pytest.mark.parametrize("seed", range(8))
def test_a_resize_repeats_and_loses_no_code_and_no_row_of_a_table(seed: int, height: int) -> None:
    rng = random.Random(seed)
    words = (f"w{number}x" for number in range(10_000))

    def cell() -> str:
        return " ".join(next(words) for _ in range(rng.randint(1, 3)))

    rows = [f"| {cell()} | {cell()} | {cell()} |\n" for _ in range(25)]
    code = [f"{next(words)}({next(words)})\n" for _ in range(40)]
    answer = (
        f"Before\n\n{rows[0]}|--|:-:|--|\n{''.join(rows[1:])}\n```py\n{''.join(code)}```\n\nend"
    )
    found = streamed_with_resizes(answer, rng, height)
    table, _, rest = found.partition("```py")
    counts = Counter(re.findall(r"w\d+x", table))
    assert counts == Counter(re.findall(r"w\d+x", "".join(rows)))
    assert rest == "".join(code).replace("\n", "") + "```end"


def test_a_terminal_ends_with_the_whole_text_and_no_live_line() -> None:
    text = drawn(["one\n\n", "two"], force_terminal=True, color_system=None)
    last = text.rpartition("\x1b[")[0]
    assert last.count("one") >= 1
    assert "two" in last
    assert "context ~" not in text.rpartition("two")[2]


def test_markdown_on_random_text_never_fails() -> None:
    rng = random.Random(5)
    marks = [
        "#",
        "*",
        "_",
        "`",
        "```",
        "|",
        "-",
        "\n",
        " ",
        "a",
        "1.",
        ">",
        "[",
        "](",
        ")",
        "<",
        "~",
        "\t",
    ]
    for _ in range(300):
        text = escape_control_chars("".join(rng.choices(marks, k=40)))
        blocks, tail = split_blocks(text)
        for block in (*blocks, tail):
            render_block(console(), block)


def test_the_line_under_an_answer() -> None:
    assert report.completion_line(answer()) == "41.2 tok/s · first token 56 ms · 49 of 2,048"


@pytest.mark.parametrize(
    ("rate", "shown"), [(41.24, "41.2"), (99.97, "100"), (385.2, "385"), (1234.5, "1,234")]
)
def test_the_line_under_an_answer_fits_a_line(rate: float, shown: str) -> None:
    timings = Timings(predicted_n=512, predicted_per_second=rate, ttft_ms=56, queue_ms=0.4)
    told = answer(timings=timings, cached_tokens=812, completion_tokens=512, ctx=8192)
    line = report.completion_line(told)
    assert line.startswith(f"{shown} tok/s · ")
    assert len(line) <= 60


def test_draft_statistics_lines() -> None:
    drafted = replace(
        TIMINGS,
        predicted_n=41,
        draft_n=50,
        draft_n_accepted=30,
        draft_steps=10,
        draft_speedup=1.94,
    )
    told = answer(timings=drafted, completion_tokens=41)
    assert " · 1.9× with drafts · " in report.completion_line(told)
    little = replace(drafted, draft_speedup=1.09)
    assert "draft" not in report.completion_line(answer(timings=little))
    assert "drafts:     50 tokens, 60 % accepted, 4.0 tokens/step, 1.94× plain decode" in (
        report.verbose_stats_lines(told, 0.0)
    )
    none = replace(TIMINGS, draft_reason="switched off")
    assert "drafts:     none: switched off" in report.verbose_stats_lines(answer(timings=none), 0.0)
    none = replace(TIMINGS, draft_reason="no match: the text does not repeat itself")
    lines = report.verbose_stats_lines(answer(timings=none), 0.0)
    assert "drafts:     none: the text does not repeat itself" in lines
    assert "draft" not in report.completion_line(answer(timings=none))


def test_tokens_from_other_tiers_are_shown_with_the_time_that_they_saved() -> None:
    disk = RestoredTokens("disk", 4096, ms=210.0, saved_ms=54_000.0)
    told = answer(timings=replace(TIMINGS, restored=(disk,)))
    assert report.completion_line(told) == (
        "41.2 tok/s · first token 56 ms · 4,096 tokens from disk in 0.2 s (54 s saved)"
        " · 49 of 2,048"
    )
    assert "restored:   4,096 tokens from disk in 0.2 s (54 s saved)" in (
        report.verbose_stats_lines(told, 0.0)
    )
    ram = RestoredTokens("ram", 512, ms=8.5, saved_ms=700.0)
    both = answer(timings=replace(TIMINGS, restored=(ram, disk)))
    shown = "512 tokens from RAM in 8 ms, 4,096 tokens from disk in 0.2 s (54 s saved)"
    assert f"restored:   {shown}" in report.verbose_stats_lines(both, 0.0)
    assert f" · {shown} · " in report.completion_line(both)


def test_tokens_that_saved_less_than_a_second_are_in_the_details_only() -> None:
    ram = RestoredTokens("ram", 512, ms=8.5, saved_ms=700.0)
    told = answer(timings=replace(TIMINGS, restored=(ram,)))
    assert report.completion_line(told) == report.completion_line(answer())
    lines = report.verbose_stats_lines(told, 0.0)
    assert "restored:   512 tokens from RAM in 8 ms" in lines
    assert not [line for line in report.verbose_stats_lines(answer(), 0.0) if "restored" in line]


def test_one_token_has_no_rate() -> None:
    timings = Timings(predicted_n=1, predicted_per_second=1e6, prompt_n=3, ttft_ms=1234)
    line = report.completion_line(answer(timings=timings, completion_tokens=1))
    assert line == "first token 1.23 s · 47 of 2,048"


def test_verbose_lines() -> None:
    text = "\n".join(report.verbose_stats_lines(answer(), 1530.0))
    for part in ("1.53 s", "46 tokens, 12 cached", "618.2 tokens/s", "41.2 tokens/s", "TTFT"):
        assert part in text


def test_warnings_after_an_answer() -> None:
    assert report.completion_warnings(answer()) == []
    assert report.completion_warnings(answer(notes=("preempted once",))) == ["preempted once"]
    cut = answer(finish_reason="length")
    limit = "cut at the token limit: raise it with "
    assert report.completion_warnings(cut) == [f"{limit}/set parameter max_tokens"]
    assert report.completion_warnings(cut, in_chat=False) == [f"{limit}-n"]
    noted = answer(finish_reason="length", notes=("the context is full",))
    assert report.completion_warnings(noted) == ["the context is full"]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 KB"),
        (12e6, "12.0 MB"),
        (4.66e9, "4.7 GB"),
        (139.6e9, "139.6 GB"),
        (144.2e6, "144 MB"),
    ],
)
def test_sizes_are_formatted(size_bytes: float, text: str) -> None:
    assert units.format_size(size_bytes) == text


def test_a_notice_is_shown_until_more_text_comes() -> None:
    shown = console(force_terminal=True)
    assert isinstance(shown.file, io.StringIO)
    screen = shown.file
    with LiveAnswer(shown, used_tokens=10, max_context=2048) as live:
        live.show_notice("no answer of the engine for 12 s")
        wait_until(lambda: "no answer of the engine for 12 s" in screen.getvalue())
        live.feed("more", 1)
        wait_until(lambda: "more" in screen.getvalue())
        last = screen.getvalue().rindex("no answer of the engine")
        assert "more" in screen.getvalue()[last:]


def test_notices_of_the_client_go_where_they_are_wanted() -> None:
    shown = console(force_terminal=True)
    got: list[str] = []
    line = LoadProgressLine(shown, "tiny")
    with line.notices_to(got.append):
        line.notify("no answer of the engine for 12 s")
    line.notify("starting the server")
    assert got == ["no answer of the engine for 12 s"]
    assert isinstance(shown.file, io.StringIO)
    assert "starting the server" in shown.file.getvalue()
    assert "no answer" not in shown.file.getvalue()


def test_the_key_that_ends_the_reasoning_is_shown_meanwhile() -> None:
    shown = console(force_terminal=True)
    live = LiveAnswer(shown, used_tokens=10, max_context=None, reasoning_hint="KEY answers now")

    def drawn_below() -> str:
        return "".join(part.text for row in live._render_status() for part in row)

    assert "KEY" not in drawn_below()
    live.feed("", 1, THOUGHT)
    assert "KEY answers now" in drawn_below()
    live.feed("The answer.", 2)
    assert "KEY" not in drawn_below()
