"""`localgen run`."""

from __future__ import annotations

from contextlib import closing

import typer

from localgen.chat.parameters import ModelOptions
from localgen.cli.arguments import (
    JsonFlag,
    ModelArgument,
    PromptArgument,
    read_prompt,
    split_model_and_prompt,
)
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
    prompt: PromptArgument = None,
    json: JsonFlag = False,
    url: UrlOption = None,
    api_key_env: KeyEnvOption = None,
) -> None:
    """Answer one prompt and print the answer.

    The model comes first. A single argument with spaces in it is a prompt for the default model; a
    single word is a model, and the prompt is read from standard input. If there is both a prompt
    and piped input, the input is appended to the prompt after a blank line.
    """
    endpoint = endpoint_from_options(context, url, api_key_env)
    options = options_for_endpoint(options, endpoint)
    model, prompt = split_model_and_prompt(model, prompt, endpoint.model if endpoint else None)
    prompt = read_prompt(prompt)
    from localgen.cli.one_shot import answer_prompt, stderr_console
    from localgen.repl.load_progress import LoadProgressLine

    loading = LoadProgressLine(stderr_console(), model or "the built-in model")
    with closing(create_client(endpoint, loading.notify)) as client:

        def answer() -> None:
            answer_prompt(client, loading, model, prompt, options, json_output=json)

        if endpoint is not None:
            answer()
        else:
            run_or_offer_pull(model, answer, draft=options.load.draft)
