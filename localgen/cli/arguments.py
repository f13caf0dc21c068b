"""Arguments of the chat commands: model, prompt, standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.cli.completion_values import complete_model

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="Model name or path (default: $LOCALGEN_MODEL, else smollm2, else tiny).",
        autocompletion=complete_model,
    ),
]
PromptArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Prompt, one or several words (default: standard input)."),
]
PromptOption = Annotated[
    str | None, typer.Option("-p", "--prompt", help="Prompt; the arguments are then the model.")
]
PromptFileOption = Annotated[
    Path | None,
    typer.Option("-f", "--file", help="Read the prompt from a file.", dir_okay=False),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        help="Model; other arguments are then a prompt.",
        autocompletion=complete_model,
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class NoPrompt(InvalidRequest):
    """Neither an argument nor standard input has a prompt."""


def split_model_and_prompt(
    words: Sequence[str],
    default_model: str | None = None,
    *,
    model: str | None = None,
    prompt: str | None = None,
) -> tuple[str | None, str | None]:
    """Return model and prompt. words: the arguments; model, prompt: those given by options.

    The first word is the model and the others are the prompt. A single word with whitespace in it
    is the prompt, unless it is the path of a file. default_model: model if none is given; falls
    back to LOCALGEN_MODEL. Raises InvalidRequest if there are two prompts.
    """
    rest = list(words)
    is_prompt = prompt is None and len(rest) == 1 and _is_sentence(rest[0])
    if model is None and rest and not is_prompt:
        model = rest.pop(0)
    if rest and prompt is not None:
        raise InvalidRequest(f"two prompts: {' '.join(rest)[:60]!r} and that of the option")
    if rest:
        prompt = " ".join(rest)
    return model or default_model or os.environ.get("LOCALGEN_MODEL") or None, prompt


def require_one_prompt(prompt: str | None, path: Path | None) -> str | None:
    """Return the prompt of --prompt or --file. Raises InvalidRequest."""
    if path is None:
        return prompt
    if prompt is not None:
        raise InvalidRequest("--prompt and --file exclude each other")
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise InvalidRequest(f"--file {path}: {reason}") from error


def read_prompt(prompt: str | None) -> str:
    """Return the prompt: the argument, piped input, or both with a blank line between.

    Raises NoPrompt if both are empty, InvalidRequest if the input is not UTF-8.
    """
    if prompt is not None and stdin_is_terminal():
        return prompt
    parts = [part for part in (prompt, read_stdin("the prompt")) if part and part.strip()]
    if not parts:
        raise NoPrompt("no prompt: give it as an argument or on standard input")
    return "\n\n".join(parts)


def read_stdin(wanted: str) -> str:
    """Read standard input to the end and strip one trailing newline.

    wanted: what a user at a terminal is asked to enter. Raises InvalidRequest if it is not UTF-8.
    """
    if sys.stdin is None:
        return ""
    if stdin_is_terminal():
        print(f"enter {wanted}, then press Ctrl+D:", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        place = f"byte {error.start:,}"
        raise InvalidRequest(f"standard input is not UTF-8 text at {place}") from error


def stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def is_model_name(name: str) -> bool:
    """True for a path, and for a model that is installed or can be pulled."""
    from localgen.client.pullable_models import can_pull
    from localgen.hub.resolve import is_installed, is_path

    return is_path(name) or can_pull(name) or is_installed(name)


def _is_sentence(text: str) -> bool:
    return len(text.split()) > 1 and not is_file(text)


def is_file(text: str) -> bool:
    """True for the name of a GGUF file, and for any path that exists."""
    try:
        return text.lower().endswith(".gguf") or Path(os.path.expanduser(text)).exists()
    except OSError:
        return False  # too long for a path
