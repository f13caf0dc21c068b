"""`localgen quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.cli.arguments import JsonFlag
from localgen.cli.completion_values import any_model

Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]",
        help="A name or folder of a model in 16 bits; with --compare several of any kind.",
        autocompletion=any_model,
    ),
]
_METHOD, _TEXT = "Methods", "Calibration and evaluation"
Awq = Annotated[
    bool, typer.Option("--awq", help="Scales searched by output error.", rich_help_panel=_METHOD)
]
Gptq = Annotated[
    bool, typer.Option("--gptq", help="Errors cancelled as it goes.", rich_help_panel=_METHOD)
]
Rtn = Annotated[
    bool, typer.Option("--rtn", help="Round to nearest: no calibration.", rich_help_panel=_METHOD)
]
Fp8 = Annotated[
    bool, typer.Option("--fp8", help="FP8 with a scale for each output.", rich_help_panel=_METHOD)
]
SmoothQuant = Annotated[
    bool, typer.Option("--smoothquant", help="Weights and inputs in int8.", rich_help_panel=_METHOD)
]
GgufType = Annotated[
    str | None,
    typer.Option("--gguf", metavar="TYPE", help="A GGUF file: Q4_K_M, …", rich_help_panel=_METHOD),
]
Bits = Annotated[int | None, typer.Option("--bits", help="Of a weight: 4, 3 or 8; usually 4.")]
GroupSize = Annotated[
    int | None,
    typer.Option("--group-size", help="Inputs that share a scale, usually 128; -1: a whole row."),
]
ActOrder = Annotated[
    bool | None,
    typer.Option("--act-order/--no-act-order", help="gptq: the strongest inputs first, usually."),
]
Calib = Annotated[
    str | None,
    typer.Option("--calib", metavar="FILE", help="Text, or builtin.", rich_help_panel=_TEXT),
]
Samples = Annotated[
    int, typer.Option("--samples", help="Most sequences of it.", min=1, rich_help_panel=_TEXT)
]
SeqLen = Annotated[
    int, typer.Option("--seq-len", help="Tokens of each.", min=2, rich_help_panel=_TEXT)
]
Seed = Annotated[int, typer.Option("-s", "--seed", help="Draws them.", rich_help_panel=_TEXT)]
EvalText = Annotated[
    Path | None,
    typer.Option(help="Held-out text; usually localgen's own.", rich_help_panel=_TEXT),
]
EvalSamples = Annotated[
    int, typer.Option(help="Most sequences to measure on.", min=1, rich_help_panel=_TEXT)
]
NoEval = Annotated[
    bool, typer.Option("--no-eval", help="Do not measure the result.", rich_help_panel=_TEXT)
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder or .gguf file to be made.")]
Device = Annotated[str | None, typer.Option("--device", help="cuda, cuda:N or cpu.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run.")]
Compare = Annotated[
    bool, typer.Option("--compare", help="Measure models that are here, the first as original.")
]
Recommend = Annotated[
    bool, typer.Option("--recommend", help="Show what fits this machine, and the trade.")
]


def command(
    models: Models = None,
    awq: Awq = False,
    gptq: Gptq = False,
    rtn: Rtn = False,
    fp8: Fp8 = False,
    smoothquant: SmoothQuant = False,
    gguf: GgufType = None,
    bits: Bits = None,
    group_size: GroupSize = None,
    act_order: ActOrder = None,
    calib: Calib = None,
    samples: Samples = 128,
    seq_len: SeqLen = 512,
    seed: Seed = 0,
    eval_text: EvalText = None,
    eval_samples: EvalSamples = 16,
    no_eval: NoEval = False,
    out: Out = None,
    device: Device = None,
    resume: Resume = False,
    compare: Compare = False,
    recommend: Recommend = False,
    json: JsonFlag = False,
) -> None:
    """Make a smaller model of one in 16 bits, a layer at a time, and measure what it lost."""
    from localgen.quant.originals import require_packages

    names = list(models or ())
    flags = {"awq": awq, "gptq": gptq, "rtn": rtn, "fp8": fp8, "smoothquant": smoothquant}
    wanted = {**flags, "gguf": gguf, "bits": bits, "group-size": group_size, "calib": calib}
    _refuse_together(
        {"compare": compare, "recommend": recommend},
        wanted | {"out": out, "resume": resume, "no-eval": no_eval},
    )
    if recommend:
        from localgen.cli import quantize_report

        quantize_report.show(_one(names), as_json=json)
        return
    require_packages()
    from localgen.cli.quantize_report import Printer
    from localgen.quant import run
    from localgen.quant.request import request
    from localgen.quant.request.recipe import Calibration
    from localgen.quant.request.request import Asked, HeldOut

    held_out = HeldOut(eval_text, eval_samples, seq_len)
    if compare:
        with Printer(as_json=json) as printer:
            run.compare(names, held_out, device, printer)
        return
    path = Path(calib).expanduser() if calib not in (None, "builtin") else None
    recipe = request.recipe(flags, gguf, bits, group_size, act_order, calib is not None)
    if calib is not None and not (recipe is not None and recipe.calibrated):
        raise InvalidRequest("--calib: --rtn and --fp8 look at no text")
    asked = Asked(
        model=_one(names),
        recipe=recipe,
        gguf=gguf,
        mode=request.mode_of(gguf, folds=awq),
        calibration=Calibration(path=path, samples=samples, seq_len=seq_len, seed=seed),
        out=out,
        device=device,
        resume=resume,
        held_out=None if no_eval else held_out,
    )
    with Printer(as_json=json) as printer:
        run.make(asked, printer)


def _refuse_together(shows: dict[str, bool], making: dict[str, object]) -> None:
    """InvalidRequest: something is to be shown and made at once."""
    shown = [name for name, asked in shows.items() if asked]
    made = [name for name, asked in making.items() if asked not in (None, False)]
    if len(shown) > 1 or (shown and made):
        other = [*shown[1:], *made][0]
        raise InvalidRequest(f"--{shown[0]} and --{other} exclude each other")


def _one(names: list[str]) -> str | None:
    if len(names) > 1:
        raise InvalidRequest(
            f"one model at a time, not {len(names)}; --compare takes several", param="model"
        )
    return names[0] if names else None
