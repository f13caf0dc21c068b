"""A process that loads a checkpoint and says a token: python -m benchmarks.gpu_parts.first_token
FOLDER STARTED [--cpu]

STARTED: when it was started, on the monotonic clock. It prints how long everything took, as JSON.
"""

from __future__ import annotations

import time

_BEGUN_S = time.monotonic()

import argparse  # noqa: E402 - from here on, importing counts
import json  # noqa: E402
from pathlib import Path  # noqa: E402

from benchmarks.gpu_parts.answers import Answer  # noqa: E402
from benchmarks.gpu_parts.device import Device  # noqa: E402
from benchmarks.gpu_parts.session import DTYPE, Session, watched_runner  # noqa: E402
from localgen.backends.cuda.spec import read_config  # noqa: E402
from localgen.backends.cuda.weights import load_weights  # noqa: E402

_KV_TOKENS, _PROMPT, _ANSWER = 32_768, 32, 40


def main() -> None:
    """Load, answer, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("started", type=float)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    imported_s = time.monotonic()
    device = Device.found(gpu=not options.cpu)
    device.synchronize()
    ready_s = time.monotonic()
    spec = read_config(options.folder)
    weights = load_weights(options.folder, spec, device=device.torch, dtype=DTYPE)
    device.synchronize()
    loaded_s = time.monotonic()
    runner = watched_runner(spec, weights, device, kv_tokens=min(_KV_TOKENS, spec.max_len))
    with Session(runner, spec.vocab) as session:
        (answer,) = session.ask([[i % spec.vocab for i in range(_PROMPT)]], _ANSWER)
    print(
        json.dumps(
            {
                "first_token_s": answer.first_s - options.started,
                "python_s": _BEGUN_S - options.started,
                "imports_s": imported_s - _BEGUN_S,
                "device_s": ready_s - imported_s,
                "weights_s": loaded_s - ready_s,
                "prompt_s": answer.first_s - loaded_s,
                "capture_s": _over_usual_s(answer),
            }
        )
    )


def _over_usual_s(answer: Answer) -> float:
    """What the first tokens took longer than the later ones do: compiling and capturing."""
    times = [at_s for at_s, _ in answer.arrivals]
    half = len(times) // 2
    usual_s = (times[-1] - times[half]) / (len(times) - 1 - half)
    return max(0.0, times[half] - times[0] - usual_s * half)


if __name__ == "__main__":
    main()
