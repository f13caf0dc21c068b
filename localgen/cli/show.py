"""`localgen show`."""

from __future__ import annotations

import json as jsonlib
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localgen.backends.errors import InvalidRequest, ModelNotFound
from localgen.cli.arguments import JsonFlag
from localgen.cli.completion_values import complete_model

if TYPE_CHECKING:
    from localgen.backends.formats.model_files import ModelFile
    from localgen.hub.reference import HubReference

QuantsFlag = Annotated[
    bool, typer.Option("--quants", help="List quantizations and the memory they need.")
]
TemplateFlag = Annotated[bool, typer.Option("--template", help="Print only the chat template.")]


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="Model name or path; it need not be downloaded.", autocompletion=complete_model
        ),
    ],
    quants: QuantsFlag = False,
    template: TemplateFlag = False,
    json: JsonFlag = False,
) -> None:
    """Show a model's metadata: size, quantization, context, sampling defaults, chat template."""
    from localgen.backends.terminal_text import one_line
    from localgen.cli import quant_table, tables
    from localgen.hub.reference import resolve_reference
    from localgen.hub.resolve import expand_alias, find_adapter, find_preset, resolve_model

    if quants:
        quant_table.print_quant_table(model, as_json=json)
        return
    wanted = resolve_reference(expand_alias(model))
    try:
        file = resolve_model(model)
    except ModelNotFound:
        if wanted is None or wanted.entry is None or template:
            raise
        facts = _catalog_facts(wanted)
    else:
        if template:
            _print_template(file)
            return
        facts = _local_facts(file)
    preset = find_preset(model)
    if preset is not None:
        facts = {"preset": preset.to_table(), **facts}
    adapter = find_adapter(model)
    if adapter is not None:
        facts = {"adapter": {"name": adapter[0], **asdict(adapter[1])}, **facts}
    if json:
        typer.echo(tables.json_text(facts, indent=2))
        return
    for name, value in facts.items():
        label = name.removesuffix("_bytes").replace("_", " ")
        typer.echo(f"{label:<15} {one_line(_format_value(name, value))}")


def _local_facts(file: ModelFile) -> dict[str, Any]:
    from localgen.hub.metadata import catalog_entry_of, read_metadata

    found = asdict(read_metadata(file))
    entry = catalog_entry_of(file)
    for name in ("bits", "group_size", "bits_per_weight", "tensor_types", "note"):
        if found[name] is None:
            del found[name]
    known = {"name": file.name, "path": str(file.path), "size_bytes": file.size_bytes}
    known |= {"files": max(1, len(file.shards)), "source": file.source}
    if entry is not None:
        found["license"] = found["license"] or entry.license
        found["params"] = found["params"] or entry.params
        known["also"] = [entry.alias, *entry.names]
    return known | found


def _catalog_facts(model_ref: HubReference) -> dict[str, Any]:
    entry = model_ref.entry
    assert entry is not None, "checked by the caller"
    return {
        "name": model_ref.name,
        "here": False,
        "fetches": model_ref.description,
        "also": [entry.alias, *entry.names],
        "title": entry.title,
        "architecture": entry.architecture or None,
        "params": entry.params,
        "context": entry.context,
        "license": entry.license,
    }


def _print_template(file: ModelFile) -> None:
    from localgen.backends.terminal_text import escape_control_chars
    from localgen.hub.metadata import read_metadata

    template = read_metadata(file).chat_template
    if template is None:
        raise InvalidRequest(f"{file.name} has no chat template")
    typer.echo(escape_control_chars(template) if sys.stdout.isatty() else template)


def _format_value(name: str, value: Any) -> str:
    from localgen.backends.units import format_size

    match value:
        case None:
            return "unknown"
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(value)
        case dict():
            pairs = [f"{key} {jsonlib.dumps(each)}" for key, each in value.items()]
            return ", ".join(pairs) or "none"
        case int():
            return format_size(value) if name == "size_bytes" else f"{value:,}"
    if name == "chat_template":
        return f"{len(value):,} characters (--template prints it)"
    return str(value)
