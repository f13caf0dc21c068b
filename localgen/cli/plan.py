"""`localgen plan`."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localgen.backends.errors import InvalidRequest, OutOfMemory
from localgen.cli import tables
from localgen.cli.arguments import JsonFlag, ModelArgument
from localgen.cli.options import Backend

if TYPE_CHECKING:
    from localgen.bench.saved_results import MeasuredRates
    from localgen.planning.curves import Devices
    from localgen.planning.roofline import Roofline

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
CurveFlag = Annotated[
    bool,
    typer.Option(
        "--curve", help="Draw the most tokens/s over the number of requests, and what limits them."
    ),
]
GpuOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        metavar="NAME[=PRICE]",
        help="With --curve: draw this GPU as well, such as h100, 4090 or m4-max; its price per "
        "hour gives the cost of a million tokens (may be repeated).",
    ),
]
TpOption = Annotated[
    int | None,
    typer.Option("--tp", help="With --gpu: tensor parallelism, the number of each GPU.", min=1),
]
PriceOption = Annotated[
    float | None,
    typer.Option("--price", help="With --curve: price of this machine per hour."),
]
BenchOption = Annotated[
    Path | None,
    typer.Option(
        "--bench", metavar="FILE", help="With --curve: mark what `bench --save FILE` measured."
    ),
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
    curve: CurveFlag = False,
    gpu: GpuOption = None,
    tp: TpOption = None,
    price: PriceOption = None,
    bench: BenchOption = None,
    json: JsonFlag = False,
) -> None:
    """Estimate the memory use and speed of a model on this machine.

    If the model is loaded, its actual memory use is shown next to the estimate. The model is
    neither downloaded nor loaded. Exit status 9 if it does not fit.
    """
    from localgen.backends.model_info import LoadOptions
    from localgen.cli import plan_report
    from localgen.client import LocalClient
    from localgen.planning.curves import model_curves
    from localgen.planning.planner import find_model, plan_model

    devices = _devices(gpu, tp, price)
    if not curve and (gpu or tp or price is not None or bench is not None):
        raise InvalidRequest(
            "--gpu, --tp, --price and --bench are about --curve: give that as well"
        )
    measured = None if bench is None else _read_measured(bench)
    options = LoadOptions(
        ctx=ctx or (measured.ctx if measured else None),
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        backend=backend,
        device=device,
        draft=draft,
    )
    with closing(LocalClient()) as client:
        stats = client.stats() if client.health() else {"models": []}
    found = find_model(model, tuple(quant or ()), options, stats, tables.print_notice, measure)
    if curve:
        curves = model_curves(found, devices, tables.print_notice)
        _print_curves(curves, measured, json_output=json)
        return
    report = plan_model(found)
    typer.echo(plan_report.plans_json(report) if json else plan_report.plans_text(report))
    refused = [one.refusal for one in report.plans if one.refusal is not None]
    if len(refused) == len(report.plans):
        raise OutOfMemory(refused[0])


def _devices(gpus: list[str] | None, tp: int | None, price: float | None) -> Devices:
    """Raises InvalidRequest if an option is invalid."""
    from localgen.planning.curves import Devices, parse_gpu

    if tp is not None and not gpus:
        raise InvalidRequest("--tp is the number of each --gpu: give that as well")
    if price is not None and not 0 < price < float("inf"):
        raise InvalidRequest(f"--price {price:g}: give a price per hour, above 0")
    return Devices(tuple(parse_gpu(one) for one in gpus or ()), tp or 1, price)


def _read_measured(path: Path) -> MeasuredRates:
    from localgen.bench.saved_results import read_decode_rates

    return read_decode_rates(path)


def _print_curves(
    curves: list[Roofline], measured: MeasuredRates | None, *, json_output: bool
) -> None:
    """Raises OutOfMemory, after printing, if the model fits nowhere."""
    from localgen.cli import curve_report

    rates = () if measured is None else measured.rates
    if measured is not None and measured.model not in {one.name for one in curves}:
        tables.print_notice(f"--bench: measured with {measured.model}, not {curves[0].name}")
    if json_output:
        typer.echo(curve_report.curves_json(curves, rates))
    else:
        width = shutil.get_terminal_size().columns
        typer.echo(curve_report.curves_text(curves, rates, width))
    if not any(one.fits for one in curves):
        raise OutOfMemory(f"{curves[0].name} fits on none of these devices")
