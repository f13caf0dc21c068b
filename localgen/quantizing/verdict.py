"""What models are worth beside each other: size, loss on held-out text, speed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from localgen.backends.cuda.tokenizer import HfTokenizer
from localgen.backends.errors import InvalidRequest
from localgen.quant import evaluate
from localgen.quant.calibration import held_out_windows
from localgen.quant.source import Source

# model, layers done, layers in all
OnLayer = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One model. perplexity, kl, tokens_per_s: None where not measured, or where it cannot be.

    kl: from the first row's model, in nats. bits_per_weight: of everything in its files.
    """

    name: str
    path: str
    size_bytes: int
    bits_per_weight: float
    perplexity: float | None = None
    kl: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What to measure on. path: None: the text that ships with localgen."""

    path: Path | None = None
    windows: int = 16
    length: int = 512


def rows(
    models: Sequence[tuple[str, Path]],
    text: HeldOut,
    device: str = "cpu",
    on_layer: OnLayer = lambda *_: None,
) -> list[Row]:
    """Size and loss of folders in Hugging Face's format; the first is the original.

    Errors: those of reading a model and a text.
    """
    read = []
    for name, path in models:
        source = Source(path)
        tokenizer = HfTokenizer.of_folder(path, source.spec.vocab)
        length = min(text.length, source.spec.max_len)
        windows = held_out_windows(text.path, tokenizer, length, text.windows)
        layers = source.spec.layers

        def tell(done: int, name: str = name, layers: int = layers) -> None:
            on_layer(name, done, layers)

        read.append(evaluate.read(source, windows.ids, device, tell))
    found = evaluate.losses(read, device)
    return [
        replace(size_row(name, path), perplexity=loss.perplexity, kl=loss.kl)
        for (name, path), loss in zip(models, found, strict=True)
    ]


def size_row(name: str, path: Path) -> Row:
    """What is known of a folder without running it."""
    source = Source(path)
    size = source.size_bytes
    return Row(name, str(path), size, 8 * size / source.spec.num_params)


def refuse_files(models: Sequence[tuple[str, Path]]) -> None:
    """InvalidRequest: a model is no folder."""
    for name, path in models:
        if not path.is_dir():
            raise InvalidRequest(f"{name} is a file: only folders can be compared", param="model")
