"""`localgen plan`."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from localgen.cli.arguments import JsonFlag, ModelArgument
from localgen.cli.options import Backend

CtxOption = Annotated[
    int | None, typer.Option("-c", "--ctx", help="Context in tokens; 0: the largest.")
]
CacheTypeKOption = Annotated[
    str | None, typer.Option("-ctk", "--cache-type-k", help="Type of the cached keys: f16, q8_0, …")
]
CacheTypeVOption = Annotated[
    str | None, typer.Option("-ctv", "--cache-type-v", help="Type of the cached values.")
]
QuantsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--quant", metavar="<str>", help="A quantization to compare (may be repeated), or all."
    ),
]
DraftModelOption = Annotated[
    str | None,
    typer.Option(
        "-md",
        "--draft",
        help="A model to draft for it, which is counted too; auto, the catalog's.",
    ),
]
BackendOption = Annotated[Backend | None, typer.Option("--backend", help="What would run it.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cuda, cuda:N or cpu.")]
MeasureFlag = Annotated[bool, typer.Option("--measure", help="Measure the memory's speed again.")]


def command(
    model: ModelArgument = None,
    ctx: CtxOption = None,
    cache_type_k: CacheTypeKOption = None,
    cache_type_v: CacheTypeVOption = None,
    quant: QuantsOption = None,
    draft: DraftModelOption = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
    measure: MeasureFlag = False,
    json: JsonFlag = False,
) -> None:
    """Show what a model would take here and how fast it can be, beside what it takes if loaded."""
    from localgen.backends.errors import OutOfMemory
    from localgen.backends.model_info import LoadOptions
    from localgen.cli import plan_report
    from localgen.client import Client
    from localgen.planning.planner import plan_model

    asked = LoadOptions(
        ctx=ctx or None,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        backend=backend,
        device=device,
        draft=draft,
    )
    with closing(Client()) as client:
        stats = client.stats() if client.health() else {"models": []}
    found = plan_model(model, tuple(quant or ()), asked, stats, plan_report.print_notice, measure)
    typer.echo(plan_report.plans_json(found) if json else plan_report.plans_text(found))
    refused = [one.refusal for one in found.plans if one.refusal is not None]
    if len(refused) == len(found.plans):
        raise OutOfMemory(refused[0])
