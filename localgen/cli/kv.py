"""`localgen kv`: the computed prefixes (KV cache) that are kept on disk."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.errors import InvalidRequest, LocalgenError, ModelNotFound
from localgen.cli.arguments import JsonFlag
from localgen.cli.completion_values import complete_stored_model
from localgen.cli.rm import YesFlag, confirm

if TYPE_CHECKING:
    from localgen.backends.kv_store.inventory import CheckedModel, RemovedFiles, StoredModel

StoredModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="Model, or an id of `localgen kv list`.", autocompletion=complete_stored_model
    ),
]
AllFlag = Annotated[bool, typer.Option("--all", help="Remove those of all models.")]
RemoveFlag = Annotated[bool, typer.Option("--remove", help="Remove the refused blocks.")]
_HEADER = ("NAME", "ID", "TOKENS", "PREFIXES", "SIZE", "LAST USED", "KV TYPE", "BUILD", "NOTE")

group = typer.Typer(rich_markup_mode=None, add_completion=False)


@group.callback()
def kv() -> None:
    """Manage the computed prefixes (KV cache) that are kept on disk and survive a restart."""


@group.command("list")
def list_(model: StoredModelArgument = None, json: JsonFlag = False) -> None:
    """List what is kept: a row for each model, and for each build and KV type that computed it.

    A prefix is a prompt or its beginning; tokens that several begin with are stored once. The limit
    in the last row is that of the model that was loaded last.
    """
    from localgen.backends.kv_store.inventory import latest_limit
    from localgen.cli import tables

    models = _find(model)
    found = [each for each in models if each.blocks]
    if json:
        tables.print_json(found)
    elif found:
        limit = latest_limit(models) if model is None else None
        tables.print_table(_HEADER, [*map(_cells, found), _total_cells(found, limit)])
    else:
        tables.print_notice(_nothing_stored())


@group.command("rm")
def rm(model: StoredModelArgument = None, all_: AllFlag = False, yes: YesFlag = False) -> None:
    """Remove what is kept of a model, or of all.

    A loaded model forgets it within seconds, but for its KV cache: what a request uses of that is
    kept again.
    """
    from localgen.backends.units import format_size
    from localgen.cli import tables

    if (model is None) != all_:
        raise InvalidRequest("give either a model or --all: `localgen kv list` shows the models")
    found = _find(model)
    if not found:
        tables.print_notice(_nothing_stored())
        return
    number = sum(each.prefixes for each in found)
    what = f"{number:,} stored prefix{'' if number == 1 else 'es'} of {_names(found)}"
    if not yes:
        confirm(f"Remove {what} ({format_size(sum(each.size_bytes for each in found))})?")
    removed = _remove(found)
    freed = format_size(sum(each.freed_bytes for each in removed))
    tables.print_line(f"{what} removed, {freed} freed")
    for path in [path for each in removed for path in each.kept]:
        tables.print_notice(f"kept: {path} is no file of localgen")


@group.command("verify")
def verify(
    model: StoredModelArgument = None, remove: RemoveFlag = False, json: JsonFlag = False
) -> None:
    """Read every block and check it with your key, as an engine does before it uses one.

    Refused blocks are harmless: their tokens are computed again. The exit status is 1 if there are
    some and they are not removed.
    """
    from localgen.cli import tables

    found = [each for each in _find(model) if each.blocks]
    checked = _check(found, remove=remove)
    if json:
        tables.print_json(checked)
    elif not checked:
        tables.print_notice(_nothing_stored())
    else:
        _print_checked(checked)
    left = sum(not block.removed for each in checked for block in each.refused)
    if left and not json:
        tables.print_notice("`localgen kv verify --remove` removes the refused blocks")
    if left:
        raise typer.Exit(1)


def _kv_folder() -> Path:
    from localgen.config import ServerSettings, require_private_dir

    settings = ServerSettings.from_environment()
    require_private_dir(settings.state_dir, "LOCALGEN_STATE_DIR")
    return settings.kv_dir


@contextlib.contextmanager
def _using(folder: Path) -> Iterator[None]:
    """Explain what the system refuses. Raises BadSetting."""
    from localgen.config import BadSetting

    try:
        yield
    except OSError as error:
        raise BadSetting(
            f"cannot use {error.filename or folder} ({error.strerror}): give yourself access to "
            f"{folder}, or set LOCALGEN_STATE_DIR"
        ) from error


def _find(wanted: str | None) -> list[StoredModel]:
    """What is stored of a model, or of all. Raises ModelNotFound, naming those that exist."""
    from localgen.backends.kv_store.inventory import matching, stored_models

    folder = _kv_folder()
    with _using(folder):
        models = stored_models(folder)
    if wanted is None:
        return models
    found = matching(models, wanted) or matching(models, _path_of(wanted))
    if not found:
        known = f"stored are those of {_names(models)}" if models else "nor of any other model"
        raise ModelNotFound(f"no prefixes of {wanted!r} are stored; {known}")
    return found


def _path_of(name: str) -> str:
    """Path of a model by any of its names, or the name."""
    from localgen.hub.resolve import resolve_model

    try:
        return str(resolve_model(name).path)
    except LocalgenError:
        return name


def _names(models: Sequence[StoredModel]) -> str:
    return ", ".join(dict.fromkeys(model.name for model in models))


def _nothing_stored() -> str:
    from localgen.backends.kv_store.store import MIN_PREFIX_TOKENS

    return (
        f"no prefixes are stored: a model that is loaded with --kv-disk above 0, the default, "
        f"stores prompts of {MIN_PREFIX_TOKENS} tokens and more; if the disk cannot be written, "
        "localgen top and the log say why"
    )


def _cells(model: StoredModel) -> tuple[str, ...]:
    from localgen.backends.terminal_text import escape_name
    from localgen.backends.units import format_size
    from localgen.cli import tables

    return (
        escape_name(model.name),
        model.id,
        f"{model.tokens:,}",
        f"{model.prefixes:,}",
        format_size(model.size_bytes),
        tables.format_age(time.time() - model.used_s),
        model.cache_type or "-",
        model.build or "-",
        "model file is gone" if model.is_model_gone else "",
    )


def _total_cells(models: Sequence[StoredModel], limit: int | None) -> tuple[str, ...]:
    from localgen.backends.units import format_size

    size = format_size(sum(model.size_bytes for model in models))
    return (
        "total",
        "",
        f"{sum(model.tokens for model in models):,}",
        f"{sum(model.prefixes for model in models):,}",
        size if limit is None else f"{size} of {format_size(limit)}",
        *[""] * 4,
    )


def _remove(models: Sequence[StoredModel]) -> list[RemovedFiles]:
    from localgen.backends.kv_store.inventory import remove_model

    with _using(_kv_folder()):
        return [remove_model(model) for model in models]


def _check(models: Sequence[StoredModel], *, remove: bool) -> list[CheckedModel]:
    """Check models, and say on standard error why all are refused if there is no key.

    Raises LocalgenError if the key cannot be used.
    """
    from localgen.backends.kv_store.block_file import BlockRefused
    from localgen.backends.kv_store.inventory import check_model, read_key
    from localgen.cli import tables

    folder = _kv_folder()
    with _using(folder):
        try:
            key = read_key(folder)
        except BlockRefused as reason:
            raise LocalgenError(
                f"no block can be checked: the key in {folder} is refused ({reason}); make it a "
                "file of yours with mode 600, or remove it and the blocks"
            ) from reason
        if key is None and models:
            tables.print_notice(
                f"the key is missing in {folder}: no block can be checked, and none is loaded; "
                "put the file back, or remove the blocks"
            )
        return [check_model(model, key, remove=remove) for model in models]


def _print_checked(checked: Sequence[CheckedModel]) -> None:
    from localgen.backends.terminal_text import escape_name
    from localgen.backends.units import format_count
    from localgen.cli import tables

    rows = [
        (escape_name(each.name), each.id, f"{each.whole:,}", f"{len(each.refused):,}")
        for each in checked
    ]
    tables.print_table(("NAME", "ID", "WHOLE", "REFUSED"), rows)
    for each in checked:
        for (reason, removed), count in Counter(
            (block.reason, block.removed) for block in each.refused
        ).items():
            done = "removed" if removed else "refused"
            tables.print_line(f"{format_count(count, 'block')} of {each.name} {done}: {reason}")
