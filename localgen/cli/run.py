"""`localgen run`."""

from __future__ import annotations

from contextlib import closing

import typer

from localgen.chat.parameters import ModelOptions
from localgen.cli.arguments import (
    JsonFlag,
    ModelArgument,
    PromptArgument,
    model_and_prompt,
    whole_prompt,
)
from localgen.cli.options import takes_model_options
from localgen.cli.pull import or_fetch
from localgen.cli.remote_options import KeyEnvOption, UrlOption, applicable, client_of, endpoint_of


@takes_model_options
def command(
    context: typer.Context,
    options: ModelOptions,
    model: ModelArgument = None,
    prompt: PromptArgument = None,
    json: JsonFlag = False,
    url: UrlOption = None,
    api_key_env: KeyEnvOption = None,
) -> None:
    """Answer one prompt and print the answer.

    The model comes first. A single argument with blanks in it is a prompt for the built-in
    model; a single word is a model, and the prompt is read from standard input. Given a prompt
    and piped input, the input follows the prompt after a blank line.
    """
    there = endpoint_of(context, url, api_key_env)
    options = applicable(options, there)
    model, prompt = model_and_prompt(model, prompt, there.model if there else None)
    prompt = whole_prompt(prompt)
    from localgen.cli.one_shot import answer_one, stderr_console
    from localgen.repl.load_progress import Loading

    loading = Loading(stderr_console(), model or "the built-in model")
    with closing(client_of(there, loading.say)) as client:

        def answer() -> None:
            answer_one(client, loading, model, prompt, options, as_json=json)

        if there is not None:
            answer()
        else:
            or_fetch(model, answer, draft=options.load.draft)
