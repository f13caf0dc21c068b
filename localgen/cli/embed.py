"""`localgen embed`."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.cli import tables
from localgen.cli.arguments import read_stdin
from localgen.cli.completion_values import complete_model
from localgen.cli.pull import run_or_offer_pull

# texts per request: the first embeddings are printed before the last ones are computed
_BATCH_TEXTS = 64


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
    wanted = texts or [line for line in read_stdin().splitlines() if line.strip()]
    if not wanted:
        raise InvalidRequest("no text: give one as an argument or on standard input")
    from localgen.backends.model_info import LoadOptions
    from localgen.cli.one_shot import stderr_console
    from localgen.client import Client
    from localgen.repl.load_progress import LoadProgressLine

    loading = LoadProgressLine(stderr_console(), model)
    with closing(Client(notify=loading.notify)) as client:

        def embed() -> None:
            with loading:
                client.connect()
                client.load(model, LoadOptions(), loading.update)
            for start in range(0, len(wanted), _BATCH_TEXTS):
                batch = wanted[start : start + _BATCH_TEXTS]
                try:
                    vectors = client.embed(model, batch, dimensions)
                except LocalgenError as error:
                    # the server counts the texts of a request
                    place = f"texts {start + 1} to {start + len(batch)}: " if start else ""
                    raise type(error)(f"{place}{error.message}", param=error.param) from error
                for text, vector in zip(batch, vectors, strict=True):
                    typer.echo(tables.json_text({"text": text, "embedding": vector}))

        run_or_offer_pull(model, embed)
