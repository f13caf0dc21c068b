"""Greedy text of localgen with its defaults, against llama.cpp's llama-completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

from benchmarks.agreement_parts.subject import Subject
from benchmarks.gguf_model import llama_cpp_logits, llama_cpp_tokenizer
from benchmarks.llamacpp_tools import Tools
from benchmarks.session import Session
from localgen.backends.engine.draft_loading import create_drafters
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.text.detokenize import Detokenizer

ROOT = Path(__file__).parents[2]
ANSWER_TOKENS, PROMPT_CHARS = 64, 1600
_ASSISTANT = "<|im_start|>assistant\n"
# rounding moves logits by about as much where llama.cpp chooses kernels by the size of a batch
TIE = 0.1
CTX = 2048
# printed after the text
_END = b"\n\n"


def prompts(count: int) -> list[str]:
    """Pieces of real texts in turn: English prose, chats, and code."""
    mixed = (ROOT / "benchmarks/data/heldout.txt").read_text(encoding="utf-8")
    chats = [part for part in mixed.split("\n\n") if part.startswith("<|im_start|>")]
    code = [part for part in mixed.split("\n\n") if "<|im_start|>" not in part]
    prose = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    each = -(-count // 3)
    sides = (
        _pieces("\n\n".join(prose), each),
        [piece + "\n" + _ASSISTANT for piece in _pieces("\n".join(chats), each)],
        _pieces("\n\n".join(code), each),
    )
    return [piece for three in zip(*sides, strict=True) for piece in three][:count]


def _pieces(text: str, count: int) -> list[str]:
    """Pieces of PROMPT_CHARS, evenly spread over a text, each cut before the end of a line."""
    stride = (len(text) - PROMPT_CHARS) // count
    found = [text[at * stride : at * stride + PROMPT_CHARS] for at in range(count)]
    return [piece[piece.index("\n") + 1 : piece.rindex("\n")] for piece in found]


def greedy(subject: Subject, tools: Tools, count: int) -> None:
    """Compare answers; where they part, see how close the two best tokens were."""
    texts = prompts(count)
    with llama_cpp_tokenizer(subject.path) as vocabulary:
        encoded = [vocabulary.encode(text) for text in texts]
        gaps = [
            _gap(subject, vocabulary, ids, ours, theirs)
            for text, ids, ours in zip(texts, encoded, _answers(subject, encoded), strict=True)
            if _text(vocabulary, ours) != (theirs := completion(subject, tools, text))
        ]
    report, ties = subject.report, sum(gap < TIE for gap in gaps)
    report.add("greedy text", "prompt", "tokens", [float(len(ids)) for ids in encoded])
    report.add("greedy text", f"differs at a tie of < {TIE:g}", f"of {count}", [ties])
    if gaps:
        report.add("greedy text", "best logits apart, where it differs", "", gaps)
    otherwise = "differs from llama-completion otherwise"
    subject.none_of("greedy text", otherwise, len(gaps) - ties, count)


def _answers(subject: Subject, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The tokens of localgen, one request at a time, with drafts as they are by default."""
    request = ModelLoadRequest("", str(subject.path), LoadOptions(threads=subject.threads))
    model = load_llamacpp_model(request, lambda _: None)
    target_ms = model.info.options.itl_target_ms
    assert target_ms is not None
    session = Session(
        model.runner,
        model.info.vocab,
        itl_target_ms=target_ms,
        drafters=create_drafters(model),
    )
    with session:
        return [session.ask([ids], ANSWER_TOKENS)[0].tokens for ids in prompts]


def completion(subject: Subject, tools: Tools, prompt: str) -> str:
    """The greedy text of llama-completion."""
    with NamedTemporaryFile() as file:
        # the option for text files drops the last newline
        file.write(prompt.encode())
        file.flush()
        said = tools.output(
            "llama-completion", "-m", str(subject.path), "--binary-file", file.name,
            "--no-escape", "-no-cnv", "--no-display-prompt", "--temp", "0", "--ignore-eos",
            "-n", str(ANSWER_TOKENS), "-c", str(CTX), "-t", str(subject.threads),
        )  # fmt: skip
    return Detokenizer().feed(said.removesuffix(_END))


def _text(vocabulary: LlamaCppTokenizer, tokens: Sequence[int]) -> str:
    return Detokenizer().feed(b"".join(map(vocabulary.piece, tokens)))


def _gap(
    subject: Subject, vocabulary: LlamaCppTokenizer, prompt: list[int], ours: list[int], theirs: str
) -> float:
    """How far the logits of the two best tokens are apart where the answers part; infinite if
    the two sides did not choose these."""
    same = next(
        n for n in range(len(ours)) if not theirs.startswith(_text(vocabulary, ours[: n + 1]))
    )
    logits = llama_cpp_logits(subject.path, prompt + ours[:same], CTX)[-1]
    (first, second), best = (found.tolist() for found in logits.topk(2))
    others = [token for token in best if token != ours[same]]
    taken = _text(vocabulary, [*ours[:same], *others])
    return first - second if len(others) == 1 and theirs.startswith(taken) else math.inf
