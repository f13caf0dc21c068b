"""`localgen run`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import closing

import typer

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.chat.parameters import ModelOptions
from localgen.cli.arguments import (
    JsonFlag,
    ModelArgument,
    ModelOption,
    NoPrompt,
    PromptArgument,
    PromptFileOption,
    PromptOption,
    is_file,
    is_model_name,
    read_prompt,
    require_one_prompt,
    split_model_and_prompt,
    stdin_is_terminal,
)
from localgen.cli.batch_jobs import (
    BatchOption,
    ConcurrencyOption,
    OutOption,
    require_no_prompt_options,
    run_batch,
)
from localgen.cli.mcp_options import McpAllowOption, McpOption, open_chat_tools
from localgen.cli.options import takes_model_options
from localgen.cli.pull import run_or_offer_pull
from localgen.cli.remote_options import (
    KeyEnvOption,
    UrlOption,
    create_client,
    endpoint_from_options,
    is_from_command_line,
    launch_server_early,
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
    batch: BatchOption = None,
    out: OutOption = None,
    concurrency: ConcurrencyOption = None,
    url: UrlOption = None,
    api_key_env: KeyEnvOption = None,
    mcp: McpOption = None,
    mcp_allow: McpAllowOption = None,
) -> None:
    """Answer one prompt and print the answer.

    The model comes first, unless -m names it. A single argument with spaces in it is a prompt for
    the default model; a single word is a model, and the prompt is read from standard input. If
    there is both a prompt and piped input, the input is appended to the prompt after a blank line.

    With --batch, answer the requests of a file: MODEL replaces the model of each.
    """
    endpoint = endpoint_from_options(context, url, api_key_env)
    options = options_for_endpoint(options, endpoint)
    if batch is not None:
        given = {"a prompt": words or prompt, "--file": file, "--json": json, "--mcp": mcp}
        require_no_prompt_options(context, given)
        if model is not None and named_model is not None:
            raise InvalidRequest(f"two models: {model!r} and that of --model")
        run_batch(
            *(batch, out, named_model or model, options, endpoint, concurrency),
            has_priority=is_from_command_line(context, "priority"),
        )
        return
    if out is not None or concurrency is not None:
        raise InvalidRequest(f"{'--out' if out else '--concurrency'} needs --batch FILE")
    arguments = [word for word in (model, *(words or ())) if word is not None]
    prompt = require_one_prompt(prompt, file)
    may_be_prompt = arguments and named_model is None and prompt is None
    default = endpoint.model if endpoint else None
    model, prompt = split_model_and_prompt(arguments, default, model=named_model, prompt=prompt)

    def advice() -> str:
        is_empty = not may_be_prompt or not arguments[0].strip()
        if is_empty or (endpoint is None and is_model_name(arguments[0])):
            return ""
        return _default_model_advice(arguments, _server_options(context, url, api_key_env))

    prompt = _read_prompt(prompt, model, advice, is_local=endpoint is None)
    early = launch_server_early(endpoint)
    from localgen.cli.one_shot import answer_prompt, stderr_console
    from localgen.hub.packaged import default_model
    from localgen.repl.load_progress import LoadProgressLine

    loading = LoadProgressLine(stderr_console(), model or default_model())
    with (
        open_chat_tools(mcp, mcp_allow, options.params) as tools,
        closing(create_client(endpoint, loading.notify, early)) as client,
    ):

        def answer() -> None:
            answer_prompt(client, loading, model, prompt, options, tools, json_output=json)

        if endpoint is not None:
            answer()
            return
        _run_local(model, answer, advice, draft=options.load.draft)


def _read_prompt(
    prompt: str | None, model: str | None, advice: Callable[[], str], *, is_local: bool
) -> str:
    """Return the prompt of the arguments and standard input.

    advice: what to type if the first word was meant as a prompt; empty if it is a model.
    Raises NoPrompt, or ModelNotFound before a user at a terminal is asked for a prompt.
    """
    from localgen.hub.resolve import resolve_model

    def check() -> None:
        resolve_model(model)

    if is_local and model is not None and prompt is None and stdin_is_terminal():
        _run_local(model, check, advice)
    try:
        return read_prompt(prompt)
    except NoPrompt as error:
        command = advice()
        if not command:
            raise
        reason = f"no prompt, and {model!r} is no model" if is_local else error.message
        raise NoPrompt(f"{reason}; {command}") from error


def _run_local(
    model: str | None,
    action: Callable[[], None],
    advice: Callable[[], str],
    *,
    draft: str | None = None,
) -> None:
    """run_or_offer_pull(), with the advice in the error for a word that is no model."""
    try:
        run_or_offer_pull(model, action, draft=draft)
    except ModelNotFound as error:
        command = "" if error.param == "draft" else advice()
        if not command:
            raise
        raise ModelNotFound(f"{error.message}; {command}") from error


def _server_options(context: typer.Context, url: str | None, api_key_env: str | None) -> list[str]:
    """The options of the server on the command line."""
    given = {"--url": ("url", url), "--api-key-env": ("api_key_env", api_key_env)}
    return [
        part
        for option, (field, value) in given.items()
        if value is not None and is_from_command_line(context, field)
        for part in (option, value)
    ]


def _default_model_advice(words: Sequence[str], server_options: Sequence[str]) -> str:
    one_file = len(words) == 1 and is_file(words[0])
    prompt = ["-f" if one_file else "-p", " ".join(words)]
    command = shlex.join(["localgen", "run", *server_options, *prompt])
    return f"`{command}` asks the default model{' what the file says' if one_file else ''}"
