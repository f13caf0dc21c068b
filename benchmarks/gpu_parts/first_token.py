"""Measure the time from process start to the first token, in a new process.

python -m benchmarks.gpu_parts.first_token FOLDER STARTED [--cpu]

STARTED: start time of the process on the monotonic clock. Prints the seconds of each phase as JSON.
"""

from __future__ import annotations

import time

_BEGUN_S = time.monotonic()

import argparse  # noqa: E402 - import time is measured from here on
import json  # noqa: E402
from pathlib import Path  # noqa: E402

from benchmarks.answers import Answer  # noqa: E402
from benchmarks.gpu_parts.device import Device  # noqa: E402
from benchmarks.gpu_parts.loaded import engine_session  # noqa: E402
from localgen.backends.cuda.loader import load_cuda_model  # noqa: E402
from localgen.backends.cuda.runner import CudaRunner  # noqa: E402
from localgen.backends.model_info import LoadOptions, ModelLoadRequest  # noqa: E402

_PROMPT, _ANSWER = 32, 40


def main() -> None:
    """Load the model as the engine process does, generate, and print the durations."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("started", type=float)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    imported_s = time.monotonic()
    device = Device.found(gpu=not options.cpu)
    device.synchronize()
    ready_s = time.monotonic()
    read_s: list[float] = []

    def record_read(share: float) -> None:
        device.synchronize()
        read_s.append(time.monotonic())

    requested = LoadOptions(backend="cuda", device=str(device.torch))
    model = load_cuda_model(ModelLoadRequest("model", str(options.folder), requested), record_read)
    device.synchronize()
    loaded_s = time.monotonic()
    assert isinstance(model.runner, CudaRunner)
    vocab = model.info.vocab
    with engine_session(model.runner, vocab) as session:
        (answer,) = session.ask([[i % vocab for i in range(_PROMPT)]], _ANSWER)
    print(
        json.dumps(
            {
                "first_token_s": answer.first_s - options.started,
                "python_s": _BEGUN_S - options.started,
                "imports_s": imported_s - _BEGUN_S,
                "device_s": ready_s - imported_s,
                "weights_s": read_s[-1] - ready_s,
                "pool_s": loaded_s - read_s[-1],
                "prompt_s": answer.first_s - loaded_s,
                "capture_s": _capture_s(answer),
            }
        )
    )


def _capture_s(answer: Answer) -> float:
    """Time that the first half of the answer took longer than the second, by their tokens:
    compiling, capturing. An event may have several tokens; 0 if all came in one or two."""
    half = len(answer.arrivals) // 2
    (first_s, first), (half_s, middle), (last_s, last) = (
        answer.arrivals[at] for at in (0, half, -1)
    )
    if last == middle:
        return 0.0
    usual_s = (last_s - half_s) / (last - middle)
    return max(0.0, half_s - first_s - usual_s * (middle - first))


if __name__ == "__main__":
    main()
