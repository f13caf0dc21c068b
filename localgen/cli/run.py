"""`localgen run`."""

from __future__ import annotations

from contextlib import closing

from localgen.cli.arguments import (
    JsonFlag,
    ModelArgument,
    PromptArgument,
    model_and_prompt,
    whole_prompt,
)
from localgen.cli.options import takes_model_options
from localgen.cli.pull import or_fetch
from localgen.repl.session import ModelOptions


@takes_model_options
def command(
    options: ModelOptions,
    model: ModelArgument = None,
    prompt: PromptArgument = None,
    json: JsonFlag = False,
) -> None:
    """Answer one prompt and print the answer.

    The model comes first. A single argument with blanks in it is a prompt for the built-in
    model; a single word is a model, and the prompt is read from standard input. Given a prompt
    and piped input, the input follows the prompt after a blank line.
    """
    model, prompt = model_and_prompt(model, prompt)
    prompt = whole_prompt(prompt)
    from localgen.cli.one_shot import answer_one, stderr_console
    from localgen.client import Client
    from localgen.repl.loading import Loading

    loading = Loading(stderr_console(), model or "the built-in model")
    with closing(Client(say=loading.say)) as client:
        or_fetch(model, lambda: answer_one(client, loading, model, prompt, options, as_json=json))
