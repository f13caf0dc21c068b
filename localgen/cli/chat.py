"""`localgen chat`."""

from __future__ import annotations

import sys
from contextlib import closing

import typer

from localgen.backends.errors import InvalidRequest
from localgen.chat.parameters import ModelOptions
from localgen.cli.arguments import ModelArgument, model_and_prompt, whole_prompt
from localgen.cli.options import takes_model_options
from localgen.cli.pull import or_fetch
from localgen.cli.remote_options import KeyEnvOption, UrlOption, applicable, client_of, endpoint_of


@takes_model_options
def command(
    context: typer.Context,
    options: ModelOptions,
    model: ModelArgument = None,
    url: UrlOption = None,
    api_key_env: KeyEnvOption = None,
) -> None:
    """Talk to a model. Piped input is read whole, as one prompt with a plain answer."""
    there = endpoint_of(context, url, api_key_env)
    options = applicable(options, there)
    model, sentence = model_and_prompt(model, None, there.model if there else None)
    if sentence is not None:
        raise InvalidRequest("chat takes a model, not a prompt: localgen run answers one prompt")
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    prompt = None if at_terminal else whole_prompt(None)
    from rich.console import Console

    from localgen.cli.one_shot import answer_one
    from localgen.repl.load_progress import Loading
    from localgen.repl.repl import start_chat

    console = Console(highlight=False, stderr=not at_terminal)
    loading = Loading(console, model or "the built-in model")
    with closing(client_of(there, loading.say)) as client:
        if prompt is not None:
            answer_one(client, loading, model, prompt, options)
        elif there is not None:
            start_chat(client, loading, model, options)
        else:
            or_fetch(
                model, lambda: start_chat(client, loading, model, options), draft=options.load.draft
            )
