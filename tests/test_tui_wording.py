"""Messages on the quantize screen mention no command-line options."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from localgen import quant
from localgen.tui.quantize.run import replace_cli_options

# these parse options or draw tables: the screen shows none of their messages
SILENT = {"advice", "compare", "form", "originals", "process", "report", "request", "run", "target"}
SPEAKING = [
    path
    for folder in quant.__path__
    for path in Path(folder).rglob("*.py")
    if path.stem not in SILENT
]
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_OF_A_COMMAND = re.compile(r"localgen (?:quantize|tui)[^,;:()]*|its --seq-len")


def messages(path: Path) -> list[str]:
    """Every message of a file that mentions an option."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.JoinedStr):
                pieces = [each.value if isinstance(each, ast.Constant) else "X"
                          for each in part.values]  # fmt: skip
                found.append("".join(map(str, pieces)))
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                found.append(part.value)
    parsers = ("add_argument", "parse_args")
    return [] if any(each in path.read_text() for each in parsers) else found


def options_in(text: str) -> list[str]:
    return _OPTION.findall(_OF_A_COMMAND.sub("", text))


def test_every_message_speaks_of_the_screen() -> None:
    said = {text for path in SPEAKING for text in messages(path) if _OPTION.search(text)}
    assert len(said) > 8
    left = {
        text: options_in(replace_cli_options(text))
        for text in said
        if options_in(replace_cli_options(text))
    }
    # a part of a longer text that is also in the list
    whole = {text for text in left if not any(text != each and text in each for each in said)}
    assert not whole


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "tiny-awq already exists: remove it, or give another --out",
            "tiny-awq already exists: remove it, or give another name under Result",
        ),
        (
            "1 GB are free: make room and run again with --resume",
            "1 GB are free: make room and press Ctrl+R to resume",
        ),
        ("groups of 128 do not: use --group-size 64 or 32", "groups of 128 do not: use groups of "
         "64 or 32"),
        (
            "4 GB are too much: --rounding-steps 0 needs less, or a smaller --seq-len",
            "4 GB are too much: Rounding set to plain needs less, or localgen quantize with a "
            "smaller --seq-len",
        ),
        ("--out x: there is no folder /y", "Result x: there is no folder /y"),
        ("a model called my--out", "a model called my--out"),
    ],
)  # fmt: skip
def test_options_are_called_by_their_fields(said: str, shown: str) -> None:
    assert replace_cli_options(said) == shown
