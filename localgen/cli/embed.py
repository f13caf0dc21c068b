"""`localgen embed`."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.cli import tables
from localgen.cli.arguments import read_stdin
from localgen.cli.completion_values import complete_model
from localgen.cli.pull import run_or_offer_pull


def command(
    model: Annotated[
        str, typer.Argument(help="Model name or path.", autocompletion=complete_model)
    ],
    texts: Annotated[
        list[str] | None, typer.Argument(help="Texts (default: the lines of standard input).")
    ] = None,
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

    Without TEXTS, each line of standard input is a text; empty lines are left out.
    """
    wanted = texts or _read_lines()
    if not wanted:
        raise InvalidRequest(
            f"no text for the model {model}: give one as an argument or on standard input"
        )
    run_or_offer_pull(model, lambda: _embed(model, wanted, dimensions))


def _read_lines() -> list[str]:
    # str.splitlines() would also split at U+2028, U+0085 and form feeds
    lines = read_stdin("the texts, one a line").split("\n")
    return [line.removesuffix("\r") for line in lines if line.strip()]


def _embed(model: str, texts: list[str], dimensions: int | None) -> None:
    from localgen.backends.model_info import LoadOptions
    from localgen.cli.one_shot import stderr_console
    from localgen.client import Client
    from localgen.repl.load_progress import LoadProgressLine

    loading = LoadProgressLine(stderr_console(), model)
    with closing(Client(notify=loading.notify)) as client:
        with loading:
            client.connect()
            client.load(model, LoadOptions(), loading.update)
        for text, vector in zip(texts, client.embed(model, texts, dimensions), strict=True):
            typer.echo(tables.json_text({"text": text, "embedding": vector}))
