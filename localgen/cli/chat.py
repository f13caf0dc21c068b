"""`localgen chat`."""

from __future__ import annotations

import sys
from contextlib import closing

from localgen.backends.errors import InvalidRequest
from localgen.cli.arguments import ModelArgument, model_and_prompt, whole_prompt
from localgen.cli.options import takes_model_options
from localgen.cli.pull import or_fetch
from localgen.repl.session import ModelOptions


@takes_model_options
def command(options: ModelOptions, model: ModelArgument = None) -> None:
    """Talk to a model. Piped input is read whole, as one prompt with a plain answer."""
    model, sentence = model_and_prompt(model, None)
    if sentence is not None:
        raise InvalidRequest("chat takes a model, not a prompt: localgen run answers one prompt")
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    prompt = None if at_terminal else whole_prompt(None)
    from rich.console import Console

    from localgen.cli.one_shot import answer_one
    from localgen.client import Client
    from localgen.repl.loading import Loading
    from localgen.repl.repl import start_chat

    console = Console(highlight=False, stderr=not at_terminal)
    loading = Loading(console, model or "the built-in model")
    with closing(Client(say=loading.say)) as client:
        if prompt is not None:
            answer_one(client, loading, model, prompt, options)
        else:
            or_fetch(model, lambda: start_chat(client, loading, model, options))
