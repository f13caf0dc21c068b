"""Tokenizers: llama.cpp's, the CUDA backend's, and that of the model's authors."""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits

from benchmarks.adversarial_text import adversarial_texts
from benchmarks.agreement_parts.compared_model import ComparedModel
from benchmarks.gguf_model import llama_cpp_tokenizer
from localgen.backends.formats.gguf.file import GgufFile
from localgen.backends.formats.hf.tokenizer import HfTokenizer
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.text.detokenize import Detokenizer

# by the name in GGUF files; as in the tokenizer.json of the model's authors
_PUBLISHED = {"smollm": (Digits(individual_digits=True), ByteLevel(add_prefix_space=False))}
NO_TOKENIZER = "known tokenizer of the model's authors"
_CONTROL = 3


def tokens(model: ComparedModel, count: int) -> None:
    """Compare token ids of adversarial texts, and the decoded texts.

    Texts with bytes without a token are counted separately: llama.cpp does not merge across such a
    byte, the `tokenizers` library does.
    """
    texts = adversarial_texts(count)
    own = model.source.load_tokenizer()
    published = published_tokenizer(model.path)
    with llama_cpp_tokenizer(model.path) as theirs:
        pieces = set(map(theirs.piece, range(theirs.vocab_size)))
        encodable = [_without_unknown(text, pieces) for text in texts]
        ids = [theirs.encode(text) for text in texts]
        for name, side in (("engine", own), ("llama.cpp", theirs)):
            _decoding(model, name, side, ids, encodable)
    rows = list(zip(texts, [own.encode(text) for text in texts], ids, encodable, strict=True))
    whole = [(t, a, b) for t, a, b, known in rows if known == t.encode()]
    gaps = [(t, a, b) for t, a, b, known in rows if known != t.encode()]
    model.none_of("tokens", "engine's differ from llama.cpp's", _differing(whole), len(whole))
    model.report.add(
        "tokens",
        "engine's differ from llama.cpp's, bytes that no token has",
        f"of {len(gaps):,}",
        [_differing(gaps)],
    )
    if published is None:
        model.report.not_compared.append(f"tokens with its authors': no {NO_TOKENIZER}")
    else:
        found = [published.encode(t, add_special_tokens=False).ids for t in texts]
        pairs = [(t, a, b) for (t, a, _, _), b in zip(rows, found, strict=True)]
        model.none_of(
            "tokens",
            "engine's differ from its authors'",
            _differing(pairs),
            len(pairs),
        )


def _differing(rows: Sequence[tuple[str, list[int], list[int]]]) -> int:
    """Number of texts with different tokens; prints the first three."""
    found = [text for text, ours, theirs in rows if ours != theirs]
    for text in found[:3]:
        print(f"tokens differ: {text[-200:]!a}")
    return len(found)


def _decoding(
    model: ComparedModel,
    name: str,
    side: HfTokenizer | LlamaCppTokenizer,
    ids: Sequence[list[int]],
    encodable: Sequence[bytes],
) -> None:
    """Count the texts that do not round-trip, decoded at once or token by token."""
    lost = streamed = 0
    for row, known in zip(ids, encodable, strict=True):
        lost += b"".join(side.piece(token) or side.id_to_token(token) for token in row) != known
        pieces = [side.piece(token) for token in row]
        detokenizer, whole = Detokenizer(), codecs.getincrementaldecoder("utf-8")("replace")
        text = "".join(map(detokenizer.feed, pieces))
        streamed += text != whole.decode(b"".join(pieces))
    model.none_of("decode(encode(text)) is not the text", name, lost, len(ids))
    model.none_of("streamed text differs", name, streamed, len(ids))


def _without_unknown(text: str, pieces: Set[bytes]) -> bytes:
    """UTF-8 of a text without bytes that have no token: every tokenizer drops them."""
    return b"".join(byte for byte in (bytes([b]) for b in text.encode()) if byte in pieces)


def published_tokenizer(path: Path) -> tokenizers.Tokenizer | None:
    """The file's vocabulary with the pre-tokenizer of the model's authors; None if unknown."""
    values = GgufFile(path).section("tokenizer.ggml.").values
    steps = _PUBLISHED.get(str(values.get("pre")))
    if steps is None:
        return None
    texts, kinds = values["tokens"], values["token_type"]
    merges = [tuple(merge.split(" ")) for merge in values["merges"]]
    vocabulary = {text: token for token, text in enumerate(texts)}
    found = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    found.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    found.decoder = decoders.ByteLevel()
    control = [text for text, kind in zip(texts, kinds, strict=True) if kind == _CONTROL]
    found.add_special_tokens(control)
    return found
