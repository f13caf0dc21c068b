"""KL divergence of `localgen quantize --gguf TYPE --gptq` and of llama.cpp's rounding of that type.

python -m benchmarks.gguf_gptq [--model tiny|smollm2|smollm2-wide] [--types Q2_K] [--steps 200]

Both have the same calibration text: llama.cpp rounds with its importance matrix, for which it gives
a few tensors of Q4_0 and Q5_0 files another type. With --steps a third file has codes whose
rounding is learned. All are compared with the 16-bit file on held-out text in llama.cpp. Intervals
are of the mean difference per window, from a paired bootstrap over windows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.measure import table
from benchmarks.mixed_gguf import bootstrap_interval, print_progress, save_record, window_kls
from benchmarks.model_folders import NAMES, model_folder
from localgen.quant.gguf.requantize import make_gguf
from localgen.quant.gguf_job import prepare_gguf_job
from localgen.quant.request.recipe import CalibrationConfig, QuantizeMethod
from localgen.quant.request.request import QuantizeRequest

TYPES = "Q2_K,Q3_K_M,Q4_0,Q4_K_M,Q5_K_M"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A type, rounded by llama.cpp and by GPTQ.

    num_bytes: size of the larger file. matrix_kl, gptq_kl: mean KL divergence from the 16-bit file,
    in nats. low, high: 95 % interval of gptq_kl - matrix_kl. learned_kl, learned_low, learned_high:
    the same for learned rounding, and of learned_kl - gptq_kl; None without it.
    """

    file_type: str
    num_bytes: int
    matrix_kl: float
    gptq_kl: float
    low: float
    high: float
    learned_kl: float | None = None
    learned_low: float | None = None
    learned_high: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        learned = ("", "")
        if self.learned_kl is not None:
            assert self.learned_low is not None
            assert self.learned_high is not None
            learned = (
                _with_change(self.learned_kl, self.gptq_kl),
                _interval(self.learned_low, self.learned_high),
            )
        return (
            self.file_type,
            f"{self.num_bytes / 1e6:.1f} MB",
            f"{1e3 * self.matrix_kl:.1f}",
            _with_change(self.gptq_kl, self.matrix_kl),
            _interval(self.low, self.high),
            *learned,
        )


HEAD = (
    *("type", "size", "KL with matrix", "KL with --gptq", "95 % interval"),
    *("KL, rounding learned", "95 % interval"),
)


def _with_change(kl: float, other: float) -> str:
    return f"{1e3 * kl:.1f} ({kl / other - 1:+.0%})"


def _interval(low: float, high: float) -> str:
    return f"{1e3 * low:+.1f} to {1e3 * high:+.1f}"


def write(
    folder: Path,
    output: Path,
    file_type: str,
    methods: Sequence[QuantizeMethod],
    calibration: CalibrationConfig,
    steps: int | None = None,
) -> Path:
    """Write a file as `localgen quantize` does, without evaluation."""
    request = QuantizeRequest(
        model=None,
        gguf=file_type,
        calibration=calibration,
        output=output,
        resume=True,
        eval_set=None,
    ).with_method(methods, rounding_steps=steps, calibrate=True)
    job = prepare_gguf_job(request, folder.name, folder, "cpu", print_progress)
    job.run(print_progress, resume=True)
    return output


def compared(
    folder: Path,
    types: Sequence[str],
    place: Path,
    calibration: CalibrationConfig,
    windows: int,
    steps: int,
) -> list[Comparison]:
    """Write all files and compare them. steps: of learned rounding; 0 for none."""
    wide = place / "16bit.gguf"
    make_gguf(folder, wide, "F16")
    files: list[Path] = []
    for name in types:
        files.append(write(folder, place / f"matrix-{name}.gguf", name, [], calibration))
        for count in (0, steps) if steps else (0,):
            output = place / f"gptq-{count}-{name}.gguf"
            files.append(write(folder, output, name, ["gptq"], calibration, count))
    kls = dict(zip(files, window_kls(folder, [wide, *files], windows), strict=True))
    found = []
    for name in types:
        matrix, gptq, *learned = (each for each in files if each.stem.endswith(f"-{name}"))
        low, high = bootstrap_interval(kls[gptq] - kls[matrix])
        size = max(each.stat().st_size for each in (matrix, gptq))
        one = Comparison(name, size, float(kls[matrix].mean()), float(kls[gptq].mean()), low, high)
        for each in learned:
            low, high = bootstrap_interval(kls[each] - kls[gptq])
            mean = float(kls[each].mean())
            one = replace(one, learned_kl=mean, learned_low=low, learned_high=high)
        found.append(one)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Write, compare, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf_gptq", description=__doc__)
    parser.add_argument("--model", choices=NAMES, default="tiny")
    parser.add_argument("--types", default=TYPES, help="of GPTQ_TYPES, separated by commas")
    parser.add_argument("--samples", type=int, default=128, help="calibration sequences")
    parser.add_argument("--windows", type=int, default=48, help="windows of held-out text")
    parser.add_argument("--steps", type=int, default=0, help="of learned rounding (default: none)")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        calibration = CalibrationConfig(samples=options.samples)
        folder = model_folder(options.model, place)
        types, windows = options.types.split(","), options.windows
        found = compared(folder, types, place, calibration, windows, options.steps)
    print(table(HEAD, [each.cells for each in found]))
    record = {"model": options.model, "windows": options.windows}
    comparisons = [asdict(each) for each in found]
    save_record("gguf_gptq", arguments, record | {"comparisons": comparisons}, options.output)


if __name__ == "__main__":
    main()
