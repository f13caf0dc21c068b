"""`localgen run`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing

import typer

from localgen.backends.errors import ModelNotFound
from localgen.chat.parameters import ModelOptions
from localgen.cli.arguments import (
    JsonFlag,
    ModelArgument,
    ModelOption,
    NoPrompt,
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
    prompt = require_one_prompt(prompt, file)
    may_be_prompt = arguments and named_model is None and prompt is None
    default = endpoint.model if endpoint else None
    model, prompt = split_model_and_prompt(arguments, default, model=named_model, prompt=prompt)
    try:
        prompt = read_prompt(prompt)
    except NoPrompt as error:
        if not may_be_prompt or _is_model_name(arguments[0]):
            raise
        raise NoPrompt(f"{error.message}; {_default_model_advice(arguments)}") from error
    from localgen.cli.one_shot import answer_prompt, stderr_console
    from localgen.hub.packaged import default_model
    from localgen.repl.load_progress import LoadProgressLine

    loading = LoadProgressLine(stderr_console(), model or default_model())
    with closing(create_client(endpoint, loading.notify)) as client:

        def answer() -> None:
            answer_prompt(client, loading, model, prompt, options, json_output=json)

        if endpoint is not None:
            answer()
            return
        try:
            run_or_offer_pull(model, answer, draft=options.load.draft)
        except ModelNotFound as error:
            if not may_be_prompt or error.param == "draft" or _is_model_name(arguments[0]):
                raise
            raise ModelNotFound(f"{error.message}; {_default_model_advice(arguments)}") from error


def _default_model_advice(words: Sequence[str]) -> str:
    return f"`localgen run -p {shlex.join([' '.join(words)])}` asks the default model"


def _is_model_name(name: str) -> bool:
    from localgen.client.pullable_models import can_pull
    from localgen.hub.resolve import is_path

    return is_path(name) or can_pull(name)
