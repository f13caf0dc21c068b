"""`localgen preset`: names for a model with settings of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.chat.parameters import ModelOptions
from localgen.cli.arguments import JsonFlag
from localgen.cli.completion_values import complete_model, complete_preset
from localgen.cli.options import takes_preset_options

_THINK = {"on": True, "off": False}
ThinkOption = Annotated[
    str | None,
    typer.Option(
        "--think",
        help="Reasoning: on, off, or an effort: low, medium, high (default: the model's).",
        metavar="<str>",
    ),
]
PresetName = Annotated[
    str, typer.Argument(help="Name of the preset.", autocompletion=complete_preset)
]

group = typer.Typer(rich_markup_mode=None, add_completion=False)


@group.callback()
def preset() -> None:
    """Manage presets: names for a model with a system prompt, sampling, context and thinking.

    They are tables of models.toml in LOCALGEN_STATE_DIR, which may be edited: an edit applies from
    the next request.
    """


@group.command("add")
@takes_preset_options
def add(
    options: ModelOptions,
    name: Annotated[str, typer.Argument(help="Name of the preset.")],
    model: Annotated[
        str, typer.Argument(help="Model name or path.", autocompletion=complete_model)
    ],
    think: ThinkOption = None,
) -> None:
    """Add a preset. Several presets of one model share it: it is loaded once."""
    from localgen.cli import tables
    from localgen.hub.latest_tag import without_latest
    from localgen.hub.preset import THINK_EFFORTS, Preset
    from localgen.hub.presets import add_preset
    from localgen.hub.reference import resolve_reference
    from localgen.hub.resolve import expand_alias, is_installed, name_for_server, resolve_model

    if think not in (None, *_THINK, *THINK_EFFORTS):
        raise InvalidRequest(f"--think {think}: give on, off, {', '.join(THINK_EFFORTS)}")
    model = without_latest(model)
    new = Preset(
        model=name_for_server(model) or model,
        system=options.system or "",
        think=_THINK.get(think or "", think),
        ctx=options.ctx,
        params=options.params,
    )
    is_here = is_installed(model)
    if not is_here and resolve_reference(expand_alias(model)) is None:
        resolve_model(model)  # raises the error that says what is known
    add_preset(name, new)
    tables.print_line(f"{name} is a preset of {model}: localgen chat {name}")
    if not is_here:
        tables.print_notice(f"{model} is not installed: localgen pull {model}")


@group.command("list")
def list_(json: JsonFlag = False) -> None:
    """List the presets and their settings."""
    from localgen.backends.terminal_text import escape_name, one_line
    from localgen.cli import tables
    from localgen.hub.models_file import read_models_file

    known = {name: each.to_table() for name, each in read_models_file().presets.items()}
    if json:
        records = [{"name": name, **table} for name, table in known.items()]
        typer.echo(tables.json_text(records, indent=2))
        return
    rows = [
        (escape_name(name), escape_name(table.pop("model")), one_line(_settings(table)))
        for name, table in known.items()
    ]
    tables.print_table(("NAME", "MODEL", "SETTINGS"), rows)


@group.command("rm")
def rm(name: PresetName) -> None:
    """Remove a preset. Its model is kept."""
    from localgen.cli import tables
    from localgen.hub.presets import remove_preset

    removed = remove_preset(name)
    tables.print_line(f"{name} is no longer a preset; {removed.model} is kept")


def _settings(table: dict[str, object]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in table.items()) or "-"


def _short(value: object) -> str:
    match value:
        case bool():
            return "on" if value else "off"
        case str():
            return repr(value if len(value) <= 40 else f"{value[:39]}…")
    return str(value)
