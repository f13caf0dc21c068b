"""What `localgen quantize` says of its options, said of the screen."""

from __future__ import annotations

import re

# what has a field or a key here is called by it; the rest is an option of a command
_SAID = (
    ("run again with --resume", "press Ctrl+R to go on"),
    ("--resume goes on", "Ctrl+R goes on"),
    ("another --out", "another name under Result"),
    ("an --out on another disk", "a folder on another disk under Result"),
    ("--out ", "Result "),
    ("use --group-size ", "use groups of "),
    ("use --fp8", "use fp8"),
    ("--rtn or --fp8 need less", "rtn or fp8 need less"),
    ("--calib builtin makes one", "Calibrate makes one"),
    ("--backend cuda --device cpu runs", "localgen tui --backend cuda --device cpu runs"),
    ("change --seq-len", "localgen quantize --seq-len changes it"),
    ("a smaller --seq-len", "localgen quantize with a smaller --seq-len"),
    (
        "--device cpu, or fewer tokens at once with --seq-len",
        "localgen quantize --device cpu, or its --seq-len for fewer tokens at once",
    ),
)
_TABLE = dict(_SAID)
_OPTIONS = re.compile("|".join(re.escape(said) for said, _ in _SAID))


def on_screen(message: str) -> str:
    """The message for somebody who has a form and keys before him."""
    return _OPTIONS.sub(lambda found: _TABLE[found[0]], message)
