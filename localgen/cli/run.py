"""`localgen run`."""

from __future__ import annotations

import shlex
from contextlib import closing

import typer

from localgen.backends.errors import ModelNotFound
from localgen.chat.parameters import ModelOptions
from localgen.cli.arguments import (
    JsonFlag,
    ModelArgument,
    ModelOption,
    PromptArgument,
    PromptFileOption,
    PromptOption,
    read_prompt,
    require_one_prompt,
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
    words: PromptArgument = None,
    named_model: ModelOption = None,
    prompt: PromptOption = None,
    file: PromptFileOption = None,
    json: JsonFlag = False,
    url: UrlOption = None,
    api_key_env: KeyEnvOption = None,
) -> None:
    """Answer one prompt and print the answer.

    The model comes first, unless -m names it. A single argument with spaces in it is a prompt for
    the default model; a single word is a model, and the prompt is read from standard input. If
    there is both a prompt and piped input, the input is appended to the prompt after a blank line.
    """
    endpoint = endpoint_from_options(context, url, api_key_env)
    options = options_for_endpoint(options, endpoint)
    arguments = [word for word in (model, *(words or ())) if word is not None]
    model, prompt = split_model_and_prompt(
        arguments,
        endpoint.model if endpoint else None,
        model=named_model,
        prompt=require_one_prompt(prompt, file),
    )
    if endpoint is None and named_model is None and model in arguments[:1]:
        _require_model_name(arguments)
    prompt = read_prompt(prompt)
    from localgen.cli.one_shot import answer_prompt, stderr_console
    from localgen.hub.packaged import default_model
    from localgen.repl.load_progress import LoadProgressLine

    loading = LoadProgressLine(stderr_console(), model or default_model())
    with closing(create_client(endpoint, loading.notify)) as client:

        def answer() -> None:
            answer_prompt(client, loading, model, prompt, options, json_output=json)

        if endpoint is not None:
            answer()
        else:
            run_or_offer_pull(model, answer, draft=options.load.draft)


def _require_model_name(arguments: list[str]) -> None:
    """Raise ModelNotFound, with the way to ask the default model, if the first word names none."""
    from localgen.hub.reference import resolve_reference
    from localgen.hub.resolve import expand_alias, is_path, resolve_model

    name = expand_alias(arguments[0])
    if is_path(name) or resolve_reference(name) is not None:
        return
    try:
        resolve_model(name)
    except ModelNotFound as error:
        prompt = shlex.join([" ".join(arguments)])
        raise ModelNotFound(
            f"{error.message}; `localgen run -p {prompt}` asks the default model", param="model"
        ) from error
