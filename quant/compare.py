"""What models are worth beside each other: size, loss on held-out text, speed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from localgen.backends.errors import InvalidRequest, LocalgenError
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.backends.model_info import LoadOptions
from localgen.backends.sampling_params import SamplingParams
from localgen.client import Client, Completion
from localgen.placement.backend_choice import detect_hardware
from localgen.quant import evaluate
from localgen.quant.calibrate.text_windows import held_out_windows
from localgen.quant.evaluate_gguf import gguf_metrics, gguf_weights_and_bytes
from localgen.quant.files.layerwise_checkpoint import LayerwiseCheckpoint
from localgen.quant.report import EvalRow
from localgen.quant.request.request import EvalSet

_PROMPT = "Once upon a time"
_TOKENS = 64
_CTX = 512
# model, steps done, steps in all
OnLayer = Callable[[str, int, int], None]


def measure_tokens_per_s(path: Path) -> float | None:
    """Of one answer of 64 tokens by whatever backend runs it; None: nothing here does, or fast
    enough to be worth asking (a folder without a GPU)."""
    if path.is_dir() and detect_hardware().cuda_unavailable_reason is not None:
        return None
    name = str(path.absolute())
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, min_tokens=_TOKENS, seed=0)
    try:
        with Client() as client:
            client.load(name, LoadOptions(ctx=_CTX), keep_alive="1m")
            rates = [_decode_rate(client, name, params) for _ in range(2)]
            client.unload(name)
    except LocalgenError:
        return None
    # the first answer may have had something to compile
    return rates[-1]


def _decode_rate(client: Client, name: str, params: SamplingParams) -> float | None:
    answers = [
        piece for piece in client.complete(name, _PROMPT, params) if isinstance(piece, Completion)
    ]
    return answers[-1].timings.predicted_per_second or None if answers else None


def evaluate_models(
    models: Sequence[tuple[str, Path]],
    eval_set: EvalSet,
    device: str = "cpu",
    on_layer: OnLayer = lambda *_: None,
) -> list[EvalRow]:
    """Size and loss of folders in Hugging Face's format and of GGUF files; the first folder is the
    original.

    Errors: those of reading a model and a text.
    """
    folders = [(name, path) for name, path in models if path.is_dir()]
    if not folders:
        raise InvalidRequest(
            "GGUF files are measured beside the folder that they were made of: name it first",
            param="model",
        )
    read = _read_models(folders, eval_set, device, on_layer)
    losses = dict(
        zip([path for _, path in folders], evaluate.compute_metrics(read, device), strict=True)
    )
    for name, path in models:
        if path.is_file():
            windows = len(read[0].ids)

            def tell(done: int, name: str = name, windows: int = windows) -> None:
                on_layer(name, done, windows)

            losses[path] = gguf_metrics(path, read[0], device, tell)
    return [
        replace(unmeasured_row(name, path), perplexity=losses[path].perplexity, kl=losses[path].kl)
        for name, path in models
    ]


def _read_models(
    folders: Sequence[tuple[str, Path]], eval_set: EvalSet, device: str, on_layer: OnLayer
) -> list[evaluate.FinalStates]:
    read = []
    for name, path in folders:
        source = LayerwiseCheckpoint(path)
        tokenizer = HfTokenizer.from_folder(path, source.spec.vocab_size)
        length = min(eval_set.seq_len, source.spec.max_len)
        windows = held_out_windows(eval_set.path, tokenizer, length, eval_set.samples)
        layers = source.spec.num_layers

        def tell(done: int, name: str = name, layers: int = layers) -> None:
            on_layer(name, done, layers)

        read.append(evaluate.compute_final_states(source, windows.ids, device, tell))
    return read


def unmeasured_row(name: str, path: Path) -> EvalRow:
    """What is known of a model without running it. ModelNotFound, LoadFailed: it is none."""
    if path.is_file():
        count, size = gguf_weights_and_bytes(path)
        return EvalRow(name, str(path), size, 8 * size / count)
    source = LayerwiseCheckpoint(path)
    size = source.size_bytes
    return EvalRow(name, str(path), size, 8 * size / source.spec.num_params)
