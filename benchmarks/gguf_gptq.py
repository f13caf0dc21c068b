"""KL divergence of `localgen quantize --gguf TYPE --gptq` and of llama.cpp's rounding of that type.

python -m benchmarks.gguf_gptq [--model tiny|smollm2|smollm2-wide] [--types Q2_K,Q4_K_M]

Both have the same calibration text: llama.cpp rounds with its importance matrix, for which it gives
a few tensors of Q4_0 and Q5_0 files another type. They are compared with the 16-bit file on
held-out text in llama.cpp. Intervals are of the mean difference per window, from a paired bootstrap
over windows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    in nats. low, high: 95 % interval of gptq_kl - matrix_kl.
    """

    file_type: str
    num_bytes: int
    matrix_kl: float
    gptq_kl: float
    low: float
    high: float

    @property
    def cells(self) -> tuple[str, ...]:
        change = self.gptq_kl / self.matrix_kl - 1
        return (
            self.file_type,
            f"{self.num_bytes / 1e6:.1f} MB",
            f"{1e3 * self.matrix_kl:.1f}",
            f"{1e3 * self.gptq_kl:.1f} ({change:+.0%})",
            f"{1e3 * self.low:+.1f} to {1e3 * self.high:+.1f}",
        )


HEAD = ("type", "size", "KL with matrix", "KL with --gptq", "95 % interval")


def write(
    folder: Path,
    output: Path,
    file_type: str,
    methods: Sequence[QuantizeMethod],
    calibration: CalibrationConfig,
) -> Path:
    """Write a file as `localgen quantize` does, without evaluation."""
    request = QuantizeRequest(
        model=None,
        gguf=file_type,
        calibration=calibration,
        output=output,
        resume=True,
        eval_set=None,
    ).with_method(methods, calibrate=True)
    job = prepare_gguf_job(request, folder.name, folder, "cpu", print_progress)
    job.run(print_progress, resume=True)
    return output


def compared(
    folder: Path, types: Sequence[str], place: Path, calibration: CalibrationConfig, windows: int
) -> list[Comparison]:
    """Write all files and compare them."""
    files = [place / "16bit.gguf"]
    make_gguf(folder, files[0], "F16")
    for name in types:
        files.append(write(folder, place / f"matrix-{name}.gguf", name, [], calibration))
        files.append(write(folder, place / f"gptq-{name}.gguf", name, ["gptq"], calibration))
    kls = window_kls(folder, files, windows)
    found = []
    for index, name in enumerate(types):
        matrix, gptq = kls[2 * index], kls[2 * index + 1]
        low, high = bootstrap_interval(gptq - matrix)
        sizes = [each.stat().st_size for each in files[2 * index + 1 : 2 * index + 3]]
        means = (float(matrix.mean()), float(gptq.mean()))
        found.append(Comparison(name, max(sizes), *means, low, high))
    return found


def main(arguments: list[str] | None = None) -> None:
    """Write, compare, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf_gptq", description=__doc__)
    parser.add_argument("--model", choices=NAMES, default="tiny")
    parser.add_argument("--types", default=TYPES, help="of GPTQ_TYPES, separated by commas")
    parser.add_argument("--samples", type=int, default=128, help="calibration sequences")
    parser.add_argument("--windows", type=int, default=48, help="windows of held-out text")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        calibration = CalibrationConfig(samples=options.samples)
        folder = model_folder(options.model, place)
        found = compared(folder, options.types.split(","), place, calibration, options.windows)
    print(table(HEAD, [each.cells for each in found]))
    record = {"model": options.model, "windows": options.windows}
    comparisons = [asdict(each) for each in found]
    save_record("gguf_gptq", arguments, record | {"comparisons": comparisons}, options.output)


if __name__ == "__main__":
    main()
