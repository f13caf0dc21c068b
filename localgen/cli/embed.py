"""`localgen embed`."""

from __future__ import annotations

import shlex
from contextlib import closing
from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.cli import tables
from localgen.cli.arguments import (
    ModelArgument,
    is_model_name,
    read_stdin,
    split_model_and_prompt,
)
from localgen.cli.completion_values import complete_model
from localgen.cli.pull import run_or_offer_pull

TextsModelOption = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        help="Model; all arguments are then texts.",
        autocompletion=complete_model,
    ),
]


def command(
    model: ModelArgument = None,
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts (default: the lines of standard input).")
    ] = None,
    named_model: TextsModelOption = None,
    dimensions: Annotated[
        int | None,
        typer.Option(
            metavar="<int>",
            min=1,
            help="Keep only the first elements of each embedding, normalized again.",
        ),
    ] = None,
) -> None:
    """Print the embeddings of texts as JSON lines: {"text": …, "embedding": […]}.

    The model comes first, unless -m names it; a single argument with spaces in it is a text for the
    default model. Without TEXTS, each line of standard input is a text; empty lines are left out.
    """
    words = [word for word in (model, *(texts or ())) if word is not None]
    model, given = _split_model_and_texts(words, named_model)
    first = words[0] if words and model == words[0] and named_model is None else None
    wanted = given or _read_lines()
    if not wanted:
        raise InvalidRequest(_no_text_message(model, first))
    try:
        run_or_offer_pull(model, lambda: _embed(model, wanted, dimensions))
    except ModelNotFound as error:
        if first is None or is_model_name(first):
            raise
        raise ModelNotFound(f"{error.message}; {_only_texts_advice(words)}") from error


def _split_model_and_texts(words: list[str], named: str | None) -> tuple[str | None, list[str]]:
    """Return model and texts as split_model_and_prompt() does, but each word is a text."""
    if len(words) < 2:
        model, text = split_model_and_prompt(words, model=named)
        return model, [] if text is None else [text]
    return (words[0], words[1:]) if named is None else (named, words)


def _no_text_message(model: str | None, first: str | None) -> str:
    """first: the word that was taken as the model; None if another way named it."""
    if first is not None and not is_model_name(first):
        return f"no text, and {first!r} is no model; {_only_texts_advice([first])}"
    place = f" for the model {model}" if model else ""
    return f"no text{place}: give one as an argument or on standard input"


def _only_texts_advice(words: list[str]) -> str:
    from localgen.hub.packaged import default_model

    command = shlex.join(["localgen", "embed", "-m", default_model(), *words])
    return f"`{command}` asks the default model"


def _read_lines() -> list[str]:
    # str.splitlines() would also split at U+2028, U+0085 and form feeds
    lines = read_stdin("the texts, one a line").split("\n")
    return [line.removesuffix("\r") for line in lines if line.strip()]


def _embed(model: str | None, texts: list[str], dimensions: int | None) -> None:
    from localgen.backends.model_info import LoadOptions
    from localgen.cli.one_shot import stderr_console
    from localgen.client import LocalClient
    from localgen.hub.packaged import default_model
    from localgen.repl.load_progress import LoadProgressLine

    loading = LoadProgressLine(stderr_console(), model or default_model())
    with closing(LocalClient(notify=loading.notify)) as client:
        with loading:
            client.connect()
            with loading.notices_to(loading.print_notice):
                client.load(model, LoadOptions(), loading.update)
        with loading.notices_to(loading.print_notice):
            for text, vector in zip(texts, client.embed(model, texts, dimensions), strict=True):
                typer.echo(tables.json_text({"text": text, "embedding": vector}))
