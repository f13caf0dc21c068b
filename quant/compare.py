"""Comparison of models: size, loss on held-out text, speed on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.client import Completion, LocalClient
from localgen.placement.backend_choice import detect_hardware
from localgen.quant import evaluate
from localgen.quant.calibrate.text_windows import TokenWindows, held_out_windows
from localgen.quant.evaluate_gguf import gguf_metrics, gguf_weights_and_bytes
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.request.events import EvalEvent, EvalRow, OnEvent, ProgressEvent
from localgen.quant.request.request import EvalSet
from localgen.quant.verdict import summarize

_PROMPT = "Once upon a time"
_TOKENS = 64
_CTX = 512


def measure_tokens_per_s(path: Path) -> float | None:
    """Decode speed for 64 tokens on the model's default backend; None if no backend runs it, or for
    a folder without a GPU, which is too slow to measure."""
    if path.is_dir() and detect_hardware().cuda_unavailable_reason is not None:
        return None
    name = str(path.absolute())
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, min_tokens=_TOKENS, seed=0)
    try:
        with LocalClient() as client:
            client.load(name, LoadOptions(ctx=_CTX), keep_alive="1m")
            rates = [_decode_rate(client, name, params) for _ in range(2)]
            client.unload(name)
    except LocalgenError:
        return None
    # the first completion may include compilation
    return rates[-1]


def _decode_rate(client: LocalClient, name: str, params: SamplingParams) -> float | None:
    answers = [
        piece for piece in client.complete(name, _PROMPT, params) if isinstance(piece, Completion)
    ]
    return answers[-1].timings.predicted_per_second or None if answers else None


def evaluate_models(
    models: Sequence[tuple[str, Path]],
    eval_set: EvalSet,
    device: str = "cpu",
    on_event: OnEvent = lambda event: None,
) -> EvalEvent:
    """Size and loss of Hugging Face folders and GGUF files; the first is the original, a folder.

    Raises InvalidRequest if it is none, and as LayerwiseCheckpoint and held_out_windows.
    """
    folders = [(name, path) for name, path in models if path.is_dir()]
    if not models[0][1].is_dir():
        raise InvalidRequest(
            "GGUF files are compared with the folder that they were made from: name it first",
            param="model",
        )
    windows = [eval_windows(path, eval_set) for _, path in folders]
    states = [
        _final_states(name, path, ids.ids, device, on_event)
        for (name, path), ids in zip(folders, windows, strict=True)
    ]
    found = evaluate.compute_metrics(states, device)
    losses = {str(path): loss for (_, path), loss in zip(folders, found, strict=True)}
    for name, path in models:
        if path.is_file():
            on_window = _step_counter(name, len(states[0].ids), on_event)
            losses[str(path)] = gguf_metrics(path, states[0], device, on_window)
    rows = [unmeasured_row(name, path) for name, path in models]
    return summarize(rows, losses, windows[0].domains)


def eval_windows(folder: Path, eval_set: EvalSet) -> TokenWindows:
    """Text for the evaluation of a model folder. Raises as LayerwiseCheckpoint and
    held_out_windows."""
    spec = LayerwiseCheckpoint(folder).spec
    tokenizer = HfTokenizer.from_folder(folder, spec.vocab_size)
    length = min(eval_set.seq_len, spec.max_len)
    return held_out_windows(eval_set.path, tokenizer, length, eval_set.samples)


def _final_states(
    name: str, folder: Path, ids: Tensor, device: str, on_event: OnEvent
) -> evaluate.FinalStates:
    source = LayerwiseCheckpoint(folder)
    on_layer = _step_counter(name, source.spec.num_layers, on_event)
    return evaluate.compute_final_states(source, ids, device, on_layer)


def _step_counter(name: str, total: int, on_event: OnEvent) -> Callable[[int], None]:
    return lambda done: on_event(ProgressEvent(f"measuring {name}", done, total, "steps"))


def unmeasured_row(name: str, path: Path) -> EvalRow:
    """Size of a model, without running it. Raises ModelNotFound or LoadFailed if it is damaged."""
    if path.is_file():
        count, size = gguf_weights_and_bytes(path)
        return EvalRow(name, str(path), path.stat().st_size, 8 * size / count)
    source = LayerwiseCheckpoint(path)
    size = source.size_bytes
    return EvalRow(name, str(path), size, 8 * size / source.spec.num_params)
