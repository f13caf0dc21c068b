"""`localgen plan`."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from localgen.cli import tables
from localgen.cli.arguments import JsonFlag, ModelArgument
from localgen.cli.options import Backend

CtxOption = Annotated[
    int | None,
    typer.Option(
        "-c", "--ctx", help="Context length in tokens (default: 0 = as the loader would choose)."
    ),
]
CacheTypeKOption = Annotated[
    str | None,
    typer.Option(
        "-ctk",
        "--cache-type-k",
        help="KV cache data type for K: f16, q8_0, … (default: f16; cuda: the model's).",
    ),
]
CacheTypeVOption = Annotated[
    str | None,
    typer.Option(
        "-ctv",
        "--cache-type-v",
        help="KV cache data type for V (default: f16; cuda: the model's).",
    ),
]
QuantsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--quant", metavar="<str>", help="Quantization to compare, or all (may be repeated)."
    ),
]
DraftModelOption = Annotated[
    str | None,
    typer.Option(
        "-md",
        "--draft",
        help="Draft model to include in the estimate; auto: the catalog's draft model.",
    ),
]
BackendOption = Annotated[
    Backend | None, typer.Option("--backend", help="Inference backend (default: auto).")
]
PlanDevice = Annotated[
    str | None,
    typer.Option(
        "--device", help="cuda, cuda:N or cpu (default: the GPU with the most free memory)."
    ),
]
MeasureFlag = Annotated[
    bool,
    typer.Option("--measure", help="Measure memory bandwidth again (default: measure once)."),
]


def command(
    model: ModelArgument = None,
    ctx: CtxOption = None,
    cache_type_k: CacheTypeKOption = None,
    cache_type_v: CacheTypeVOption = None,
    quant: QuantsOption = None,
    draft: DraftModelOption = None,
    backend: BackendOption = None,
    device: PlanDevice = None,
    measure: MeasureFlag = False,
    json: JsonFlag = False,
) -> None:
    """Estimate the memory use and speed of a model on this machine.

    If the model is loaded, its actual memory use is shown next to the estimate. The model is
    neither downloaded nor loaded. Exit status 9 if it does not fit.
    """
    from localgen.backends.errors import OutOfMemory
    from localgen.backends.model_info import LoadOptions
    from localgen.cli import plan_report
    from localgen.client import LocalClient
    from localgen.planning.planner import plan_model

    options = LoadOptions(
        ctx=ctx or None,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        backend=backend,
        device=device,
        draft=draft,
    )
    with closing(LocalClient()) as client:
        stats = client.stats() if client.health() else {"models": []}
    found = plan_model(model, tuple(quant or ()), options, stats, tables.print_notice, measure)
    typer.echo(plan_report.plans_json(found) if json else plan_report.plans_text(found))
    refused = [one.refusal for one in found.plans if one.refusal is not None]
    if len(refused) == len(found.plans):
        raise OutOfMemory(refused[0])
