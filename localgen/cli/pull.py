"""`localgen pull`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.errors import ModelNotFound
from localgen.cli.completion_values import complete_catalog_model

if TYPE_CHECKING:
    from localgen.hub.pull import PullPlan

PullArgument = Annotated[
    str,
    typer.Argument(
        help="llama-8b, llama-8b:q8_0, llama-8b:auto or user/repo[:QUANT].",
        autocompletion=complete_catalog_model,
    ),
]


def command(model: PullArgument) -> None:
    """Fetch a model from the hub into the Hugging Face cache.

    Without a quantization it is Q4_K_M; `auto` takes the best that fits memory. What was
    interrupted goes on from where it stopped.
    """
    pull_with_progress(model)


def pull_with_progress(model: str) -> None:
    """Pull a model, with a bar on a terminal and lines elsewhere, on stderr."""
    from localgen.hub import pull
    from localgen.hub.hf_client import HubUnavailable
    from localgen.hub.resolve import is_installed

    try:
        plan = pull.plan_pull(model, _print_notice)
    except HubUnavailable as error:
        if not is_installed(model):
            raise
        _print_notice(f"{model} is here; whether it is the newest was not checked: {error.message}")
        return
    if plan.quant_reason:
        _print_notice(plan.quant_reason)
    if plan.is_cached:
        _print_notice(f"{plan.name} is here and up to date")
        return
    _download(model, plan)


def run_or_offer_pull(
    model: str | None, action: Callable[[], None], *, draft: str | None = None
) -> None:
    """Run what needs a model, and perhaps one that drafts for it. On a terminal, offer to pull what
    is not here, and run again."""
    from localgen.client.pullable_models import can_pull

    try:
        action()
    except ModelNotFound as error:
        wanted = draft if error.param == "draft" else model
        if wanted is None or not _is_terminal() or not can_pull(wanted):
            raise
        _print_notice(error.message)
        if not typer.confirm("Pull it now?", default=True, err=True):
            raise typer.Exit(1) from None
        pull_with_progress(wanted)
        # of two that are missing the other may be next
        run_or_offer_pull(model, action, draft=draft)


def _download(model: str, plan: PullPlan) -> None:
    from localgen.cli.download_progress import DownloadProgress
    from localgen.hub import pull

    transfer = DownloadProgress(plan.name, plan.size_bytes, plan.size_bytes - plan.remaining_bytes)
    try:
        with transfer:
            pull.run_pull(plan, transfer.update, transfer.notify)
    except KeyboardInterrupt:
        _print_notice(f"stopped at {transfer.position}: localgen pull {model} goes on from there")
        raise
    _print_notice(f"{plan.name} is here")


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def _print_notice(line: str) -> None:
    from localgen.backends.terminal_text import one_line

    print(one_line(line), file=sys.stderr, flush=True)
