"""`localgen quantize`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from localgen.backends.errors import InvalidRequest
from localgen.cli.arguments import JsonFlag
from localgen.cli.completion_values import complete_model
from localgen.cli.remote_options import is_from_command_line

ModelsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="Name or folder of a 16-bit model (default: the built-in one); with --compare, "
        "models of any format.",
        autocompletion=complete_model,
    ),
]
_METHOD_PANEL, _TEXT_PANEL = "Methods", "Calibration and evaluation"
AwqFlag = Annotated[
    bool,
    typer.Option(
        "--awq",
        help="AWQ: scale weights to minimize each layer's output error.",
        rich_help_panel=_METHOD_PANEL,
    ),
]
GptqFlag = Annotated[
    bool,
    typer.Option(
        "--gptq",
        help="GPTQ: compensate each rounding error in the weights not yet rounded.",
        rich_help_panel=_METHOD_PANEL,
    ),
]
RtnFlag = Annotated[
    bool,
    typer.Option(
        "--rtn", help="Round to nearest, without calibration.", rich_help_panel=_METHOD_PANEL
    ),
]
Fp8Flag = Annotated[
    bool,
    typer.Option(
        "--fp8",
        help="FP8 (e4m3) with one scale per output, without calibration.",
        rich_help_panel=_METHOD_PANEL,
    ),
]
SmoothQuantFlag = Annotated[
    bool,
    typer.Option(
        "--smoothquant",
        help="SmoothQuant: int8 weights and activations.",
        rich_help_panel=_METHOD_PANEL,
    ),
]
GgufTypeOption = Annotated[
    str | None,
    typer.Option(
        "--gguf",
        metavar="TYPE",
        help="GGUF file of this type, e.g. Q4_K_M; can be combined with --awq or --gptq. "
        "auto: a type for each tensor, by measured loss; can be combined with --gptq.",
        rich_help_panel=_METHOD_PANEL,
    ),
]
TargetSizeOption = Annotated[
    str | None,
    typer.Option(
        "--target-size",
        metavar="SIZE",
        help="--gguf auto: largest file, e.g. 3.4G (1024-based).",
        rich_help_panel=_METHOD_PANEL,
    ),
]
TargetBpwOption = Annotated[
    float | None,
    typer.Option(
        "--target-bpw",
        metavar="BITS",
        help="--gguf auto: most bits per weight, embedding included (default: 4.5).",
        rich_help_panel=_METHOD_PANEL,
    ),
]
TargetKlOption = Annotated[
    float | None,
    typer.Option(
        "--target-kl",
        metavar="NATS",
        help="--gguf auto: smallest file whose KL divergence from the original, on the "
        "calibration text, is at most this.",
        rich_help_panel=_METHOD_PANEL,
    ),
]
BitsOption = Annotated[
    int | None,
    typer.Option(
        "--bits", help="Bits per weight: 4, 3, 2 or 8 (default: 4; --fp8 and --smoothquant: 8)."
    ),
]
GroupSizeOption = Annotated[
    int | None,
    typer.Option(
        "--group-size", help="Inputs that share a scale; -1: the whole row (default: 128)."
    ),
]
ActOrderFlag = Annotated[
    bool | None,
    typer.Option(
        "--act-order/--no-act-order",
        help="GPTQ: quantize the inputs with the largest activations first (default: on).",
    ),
]
RoundingStepsOption = Annotated[
    int | None,
    typer.Option(
        "--rounding-steps",
        metavar="<int>",
        min=0,
        help="AWQ and GPTQ: improve the rounding of each layer in this many gradient steps; 0: "
        "none (default: 200 for 2 and 3 bits, 50 for AWQ with 4, else 0; with --gguf 0).",
    ),
]
CalibOption = Annotated[
    str | None,
    typer.Option(
        "--calib",
        metavar="FILE",
        help="Calibration text file, or builtin (default: builtin; --gguf alone: none).",
        rich_help_panel=_TEXT_PANEL,
    ),
]
SamplesOption = Annotated[
    int | None,
    typer.Option(
        "--samples",
        help="Maximum number of calibration sequences (default: 128).",
        metavar="<int>",
        min=1,
        rich_help_panel=_TEXT_PANEL,
    ),
]
SeqLenOption = Annotated[
    int,
    typer.Option(
        "--seq-len",
        help="Tokens per calibration and evaluation sequence.",
        metavar="<int>",
        min=2,
        rich_help_panel=_TEXT_PANEL,
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "-s",
        "--seed",
        help="Seed for drawing the calibration sequences (default: 0).",
        metavar="<int>",
        rich_help_panel=_TEXT_PANEL,
    ),
]
EvalTextOption = Annotated[
    Path | None,
    typer.Option(
        help="Evaluation text file (default: a built-in text).", rich_help_panel=_TEXT_PANEL
    ),
]
EvalSamplesOption = Annotated[
    int,
    typer.Option(
        help="Maximum number of evaluation sequences, in equal shares by domain of the text.",
        metavar="<int>",
        min=1,
        rich_help_panel=_TEXT_PANEL,
    ),
]
NoEvalFlag = Annotated[
    bool, typer.Option("--no-eval", help="Skip the evaluation.", rich_help_panel=_TEXT_PANEL)
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Output folder or .gguf file (default: ./MODEL-METHOD, e.g. tiny-awq-4bit)."
    ),
]
QuantizeDevice = Annotated[
    str | None,
    typer.Option("--device", help="cuda, cuda:N or cpu (default: cuda if available)."),
]
ResumeFlag = Annotated[bool, typer.Option("--resume", help="Resume an unfinished run.")]
CompareFlag = Annotated[
    bool,
    typer.Option("--compare", help="Evaluate local models instead; the first is the reference."),
]
RecommendFlag = Annotated[
    bool,
    typer.Option("--recommend", help="List the methods that fit this machine and recommend one."),
]

# parameters of the command that a report reads
_READ_BY_REPORT = {
    "compare": {"models", "json", "eval_text", "eval_samples", "seq_len", "device"},
    "recommend": {"models", "json"},
}


def command(
    context: typer.Context,
    models: ModelsArgument = None,
    awq: AwqFlag = False,
    gptq: GptqFlag = False,
    rtn: RtnFlag = False,
    fp8: Fp8Flag = False,
    smoothquant: SmoothQuantFlag = False,
    gguf: GgufTypeOption = None,
    target_size: TargetSizeOption = None,
    target_bpw: TargetBpwOption = None,
    target_kl: TargetKlOption = None,
    bits: BitsOption = None,
    group_size: GroupSizeOption = None,
    act_order: ActOrderFlag = None,
    rounding_steps: RoundingStepsOption = None,
    calib: CalibOption = None,
    samples: SamplesOption = None,
    seq_len: SeqLenOption = 512,
    seed: SeedOption = None,
    eval_text: EvalTextOption = None,
    eval_samples: EvalSamplesOption = 36,
    no_eval: NoEvalFlag = False,
    out: OutOption = None,
    device: QuantizeDevice = None,
    resume: ResumeFlag = False,
    compare: CompareFlag = False,
    recommend: RecommendFlag = False,
    json: JsonFlag = False,
) -> None:
    """Quantize a 16-bit model layer by layer and measure the quality loss."""
    from localgen.quant.originals import require_packages

    names = list(models or ())
    _require_read_options(context)
    if recommend:
        from localgen.cli import quantize_report

        quantize_report.print_advice(_single_model(names), as_json=json)
        return
    require_packages()
    from localgen.cli.quantize_report import QuantizePrinter
    from localgen.quant import run
    from localgen.quant.request.recipe import METHODS, CalibrationConfig
    from localgen.quant.request.request import EvalSet, QuantizeRequest
    from localgen.quant.request.target import parse_gguf_target

    held_out = EvalSet(eval_text, eval_samples, seq_len)
    if compare:
        with QuantizePrinter(as_json=json) as printer:
            run.compare_models(names, held_out, device, printer)
        return
    flags = {"awq": awq, "gptq": gptq, "rtn": rtn, "fp8": fp8, "smoothquant": smoothquant}
    path = Path(os.path.expanduser(calib)) if calib not in (None, "builtin") else None
    drawing = {
        name: value for name, value in (("samples", samples), ("seed", seed)) if value is not None
    }
    request = QuantizeRequest(
        model=_single_model(names),
        gguf=gguf,
        target=parse_gguf_target(gguf, target_size, target_bpw, target_kl),
        calibration=CalibrationConfig(path=path, seq_len=seq_len, **drawing),
        output=out,
        device=device,
        resume=resume,
        eval_set=None if no_eval else held_out,
    ).with_method(
        [method for method in METHODS if flags[method]],
        bits=bits,
        group_size=group_size,
        act_order=act_order,
        rounding_steps=rounding_steps,
        calibrate=calib is not None,
    )
    if request.recipe is None or not request.recipe.needs_calibration:
        _refuse_calibration_options(drawing)
    with QuantizePrinter(as_json=json) as printer:
        run.run_quantization(request, printer)


def _refuse_calibration_options(options: Iterable[str]) -> None:
    """Raise InvalidRequest if options are given that only a calibration reads."""
    for name in options:
        raise InvalidRequest(
            f"--{name} is for calibration, which this method does without: leave it out, or "
            "choose --awq, --gptq or --smoothquant, or --gguf with --calib",
            param=name,
        )


def _require_read_options(context: typer.Context) -> None:
    """Raise InvalidRequest if an option is given that another one leaves without effect."""
    given = {
        each.name: max(each.opts, key=len)
        for each in context.command.params
        if each.name is not None and is_from_command_line(context, each.name)
    }
    unread = {name: given.keys() - read for name, read in _READ_BY_REPORT.items()}
    unread["no_eval"] = given.keys() & {"eval_text", "eval_samples"}
    for name, others in unread.items():
        if name in given and (left := sorted(others - {name})):
            raise InvalidRequest(f"{given[name]} and {given[left[0]]} exclude each other")


def _single_model(names: list[str]) -> str | None:
    if len(names) > 1:
        raise InvalidRequest(
            f"give one model, not {len(names)}; only --compare takes several", param="model"
        )
    return names[0] if names else None
