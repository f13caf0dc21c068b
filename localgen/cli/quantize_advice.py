"""`localgen quantize --recommend`."""

from __future__ import annotations

from dataclasses import asdict

import typer

from localgen.backends.errors import OutOfMemory
from localgen.chats.report import size
from localgen.cli import tables
from localgen.cli.plan_report import tell
from localgen.hub.quant_choice import room_here
from localgen.quant.advice import advice, recommended
from localgen.quant.originals import original


def show(model: str | None, *, as_json: bool) -> None:
    """Every way with what it needs, and the one to take. OutOfMemory: none fits."""
    name, folder = original(model)
    found = advice(folder, room_here())
    best = recommended(found)
    if as_json:
        record = {
            "model": name,
            "ways": [asdict(one) for one in found],
            "recommended": best and best.option,
        }
        typer.echo(tables.json_text(record, indent=2))
    else:
        head = ("OPTION", "SIZE", "NEEDS", "RUNS ON", "TRADE")
        cells = [
            (one.option, size(one.size_bytes), size(one.need_bytes), one.place or "–", one.trade)
            for one in found
        ]
        for line in tables.aligned([head, *cells]):
            typer.echo(line)
    if best is None:
        least = found[-1]
        raise OutOfMemory(
            f"nothing of {name} fits: {least.option} would need {size(least.need_bytes)}"
        )
    tell(f"take {best.option}: localgen quantize {name} {best.option}")
