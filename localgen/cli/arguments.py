"""Arguments of the chat commands: model, prompt, standard input."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.cli.completion_values import complete_model

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="Model name or path (default: $LOCALGEN_MODEL, else the built-in model).",
        autocompletion=complete_model,
    ),
]
PromptArgument = Annotated[str | None, typer.Argument(help="Prompt (default: standard input).")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def split_model_and_prompt(
    model: str | None, prompt: str | None, default_model: str | None = None
) -> tuple[str | None, str | None]:
    """Return model and prompt; a single argument may be either.

    A single argument with whitespace in it is the prompt, unless it is the path of a file.
    default_model: model if none is given; falls back to LOCALGEN_MODEL.
    """
    default_model = default_model or os.environ.get("LOCALGEN_MODEL") or None
    if prompt is None and model is not None and len(model.split()) > 1 and not _is_file(model):
        return default_model, model
    return model or default_model, prompt


def read_prompt(prompt: str | None) -> str:
    """Return the prompt: the argument, piped input, or both with a blank line between.

    Raises InvalidRequest if both are empty or the input is not UTF-8.
    """
    if prompt is not None and _is_terminal():
        return prompt
    if _is_terminal():
        print("enter the prompt, then press Ctrl+D:", file=sys.stderr)
    parts = [part for part in (prompt, read_stdin()) if part and part.strip()]
    if not parts:
        raise InvalidRequest("no prompt: give it as an argument or on standard input")
    return "\n\n".join(parts)


def read_stdin() -> str:
    """Read standard input to the end and strip one trailing newline.

    Raises InvalidRequest if it is not UTF-8.
    """
    if sys.stdin is None:
        return ""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        place = f"byte {error.start:,}"
        raise InvalidRequest(f"standard input is not UTF-8 text at {place}") from error


def _is_file(text: str) -> bool:
    try:
        return text.lower().endswith(".gguf") or Path(text).expanduser().exists()
    except OSError:
        return False  # too long for a path


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
