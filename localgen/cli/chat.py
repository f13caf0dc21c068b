"""`localgen chat`."""

from __future__ import annotations

import sys
from contextlib import closing

import typer

from localgen.backends.errors import InvalidRequest
from localgen.chat.parameters import ModelOptions
from localgen.cli.arguments import ModelArgument, ModelOption, read_prompt, split_model_and_prompt
from localgen.cli.options import takes_model_options
from localgen.cli.pull import run_or_offer_pull
from localgen.cli.remote_options import (
    KeyEnvOption,
    UrlOption,
    create_client,
    endpoint_from_options,
    options_for_endpoint,
)


@takes_model_options
def command(
    context: typer.Context,
    options: ModelOptions,
    model: ModelArgument = None,
    named_model: ModelOption = None,
    url: UrlOption = None,
    api_key_env: KeyEnvOption = None,
) -> None:
    """Chat with a model in the terminal.

    If standard input or output is not a terminal, read one prompt from standard input and print a
    plain-text answer.
    """
    endpoint = endpoint_from_options(context, url, api_key_env)
    options = options_for_endpoint(options, endpoint)
    if model is not None and named_model is not None:
        raise InvalidRequest(f"two models: {model!r} and that of --model")
    words = [] if model is None else [model]
    default = endpoint.model if endpoint else None
    model, sentence = split_model_and_prompt(words, default, model=named_model)
    if sentence is not None:
        raise InvalidRequest("chat takes a model, not a prompt: use localgen run for one prompt")
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    prompt = None if at_terminal else read_prompt(None)
    from rich.console import Console

    from localgen.cli.one_shot import answer_prompt
    from localgen.hub.packaged import default_model
    from localgen.repl.load_progress import LoadProgressLine
    from localgen.repl.repl import start_chat

    console = Console(highlight=False, stderr=not at_terminal)
    loading = LoadProgressLine(console, model or default_model())
    with closing(create_client(endpoint, loading.notify)) as client:
        if prompt is not None:
            answer_prompt(client, loading, model, prompt, options)
        elif endpoint is not None:
            start_chat(client, loading, model, options)
        else:
            run_or_offer_pull(
                model, lambda: start_chat(client, loading, model, options), draft=options.load.draft
            )
