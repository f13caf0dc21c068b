"""Greedy text of localgen with its defaults, against llama.cpp's llama-completion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from tempfile import NamedTemporaryFile

from benchmarks.agreement_parts.compared_model import ComparedModel
from benchmarks.gguf_model import llama_cpp_logits, llama_cpp_tokenizer
from benchmarks.llamacpp_tools import Tools
from benchmarks.real_prompts import chats, code, prose
from benchmarks.session import GREEDY, Session
from localgen.backends.engine.draft_loading import create_drafters
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.llamacpp.vocab import LlamaCppTokenizer
from localgen.backends.model_info import DRAFT_NONE, LoadOptions, ModelLoadRequest
from localgen.backends.text.detokenize import Detokenizer

ANSWER_TOKENS = 64
# llama.cpp chooses kernels by the size of a batch: given a prompt in parts of 64 tokens, or its
# last token in a batch of its own, it moves logits of smollm2 by up to 0.8
TIE = 0.5
# number of best tokens among which both sides' tokens are searched
_CANDIDATES = 8
CTX = 2048
# what llama-completion prints after the text
_END, _END_OF_TEXT = b"\n\n", b" [end of text]\n"


def prompts(count: int) -> list[str]:
    """Prose, chats and code, alternating."""
    each = -(-count // 3)
    turns = zip(prose(each), chats(each), code(each), strict=True)
    return [text for three in turns for text in three][:count]


def greedy(model: ComparedModel, tools: Tools, count: int) -> None:
    """Compare answers of two configurations.

    In an empty KV cache and without drafts, llama.cpp gets the same batches from both sides: the
    text must be the same. With localgen's defaults, requests reuse the cached prefixes of others,
    and drafts are verified in larger batches: the text may differ from a near tie on.
    """
    texts = prompts(count)
    with llama_cpp_tokenizer(model.path) as vocabulary:
        encoded = [vocabulary.encode(text) for text in texts]
        theirs = [completion(model, tools, text) for text in texts]
        alone = _answers(model, encoded, LoadOptions(draft=DRAFT_NONE, prefix_cache=False))
        pairs = zip(alone, theirs, strict=True)
        apart = sum(_text(vocabulary, ours) != text for ours, text in pairs)
        gaps = [
            _gap(model, vocabulary, ids, ours, text)
            for ids, ours, text in zip(
                encoded, _answers(model, encoded, LoadOptions()), theirs, strict=True
            )
            if _text(vocabulary, ours) != text
        ]
    test, ties = "greedy text, defaults", [gap for gap in gaps if gap < TIE]
    # JSON has no infinity
    others = [min(gap, 1e9) for gap in gaps if gap >= TIE]
    model.report.add("prompts", "length", "tokens", [float(len(ids)) for ids in encoded])
    model.none_of("greedy text, same batches", "not llama-completion's", apart, count)
    model.report.add(test, f"parts at a tie of < {TIE:g}", f"of {count}", [len(ties)])
    if ties:
        model.report.add(test, "logits apart, where it parts", "", ties)
    if others:
        model.report.add(test, "logits apart, where it parts otherwise", "", others)
    model.none_of(test, "parts otherwise", len(others), count)


def _answers(
    model: ComparedModel, prompts: Sequence[list[int]], options: LoadOptions
) -> list[list[int]]:
    """Tokens of localgen, one request at a time, up to the end of the text."""
    options = replace(options, threads=model.threads)
    loaded = load_llamacpp_model(ModelLoadRequest("", str(model.path), options), lambda _: None)
    target_ms, ends = loaded.info.options.itl_target_ms, loaded.tokenizer.eos_token_ids
    assert target_ms is not None
    session = Session(
        loaded.runner,
        loaded.info.vocab,
        itl_target_ms=target_ms,
        drafters=create_drafters(loaded),
    )
    params = replace(GREEDY, stop_token_ids=tuple(ends))
    with session:
        return [session.ask([ids], ANSWER_TOKENS, params)[0].tokens for ids in prompts]


def completion(model: ComparedModel, tools: Tools, prompt: str) -> str:
    """The greedy text of llama-completion."""
    with NamedTemporaryFile() as file:
        # the option for text files drops the last newline
        file.write(prompt.encode())
        file.flush()
        output = tools.output(
            "llama-completion", "-m", str(model.path), "--binary-file", file.name,
            "--no-escape", "-no-cnv", "--no-display-prompt", "--temp", "0",
            "-n", str(ANSWER_TOKENS), "-c", str(CTX), "-t", str(model.threads),
        )  # fmt: skip
    return Detokenizer().feed(output.removesuffix(_END).removesuffix(_END_OF_TEXT))


def _text(vocabulary: LlamaCppTokenizer, tokens: Sequence[int]) -> str:
    return Detokenizer().feed(b"".join(map(vocabulary.piece, tokens)))


def _gap(
    model: ComparedModel,
    vocabulary: LlamaCppTokenizer,
    prompt: list[int],
    ours: list[int],
    theirs: str,
) -> float:
    """Largest logit gap to the best token, over both sides, at the first difference.

    Infinite if a side's token is not among the _CANDIDATES best.
    """
    starts = [_text(vocabulary, ours[:n]) for n in range(len(ours) + 1)]
    same = sum(map(theirs.startswith, starts)) - 1
    logits = llama_cpp_logits(model.path, prompt + ours[:same], CTX)[-1]
    values, tokens = (found.tolist() for found in logits.topk(_CANDIDATES))
    ends = vocabulary.eos_token_ids

    def is_next(token: int, text: str) -> bool:
        if token in ends:
            return text == starts[same]
        return text.startswith(_text(vocabulary, [*ours[:same], token])) and text != starts[same]

    found = [
        next((value for value, token in zip(values, tokens, strict=True) if is_next(token, text)),
             -math.inf)
        for text in (starts[-1], theirs)
    ]  # fmt: skip
    return float(values[0] - min(found))
