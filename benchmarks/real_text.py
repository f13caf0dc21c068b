"""Effect of drafts, prefix cache and JSON schemas on a real model.

python -m benchmarks.real_text [--only PART ...] [--rounds N] [--quick]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.answers import Answer, AnswerFailed, decode_tok_s
from benchmarks.constrained import MIN_SHARE, SCHEMA
from benchmarks.measure import RATE, ModelLine, Report, command
from benchmarks.real_prompts import code, prose
from benchmarks.session import GREEDY, Session
from benchmarks.speculation import DraftCase, compare
from localgen.backends.engine.loaded_model import LoadedModel
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.errors import LocalgenError
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.model_info import LoadOptions, ModelLoadRequest
from localgen.backends.text.grammar import GrammarCompiler
from localgen.backends.types import Message
from localgen.hub.packaged import SMOLLM2, packaged_model

PARTS = ("drafts", "prefix", "grammar")
CTX, KV_TOKENS = 2048, 8192
_ITL_TARGET_MS = 2000.0
QUESTIONS = (
    "What is a prefix cache?",
    "Say that again in one sentence.",
    "Name three things that it makes faster.",
    "And what does it cost?",
)


@dataclass(frozen=True, slots=True)
class RealTextBench:
    """A model file and the sizes of a run."""

    path: Path
    threads: int | None
    rounds: int
    quick: bool

    def load(self, *, prefix_cache: bool = True) -> LoadedModel:
        """Load the model with its other defaults."""
        options = LoadOptions(
            ctx=CTX, kv_tokens=KV_TOKENS, threads=self.threads, prefix_cache=prefix_cache
        )
        return load_llamacpp_model(ModelLoadRequest("", str(self.path), options), lambda _: None)

    def describe(self) -> tuple[ModelLine, int]:
        """The model's line in a report, and the number of threads."""
        model = self.load()
        info = model.info
        model.runner.close()
        return ModelLine(info.description, info.size_bytes, info.params), info.options.threads or 0

    @property
    def tokens(self) -> int:
        """Maximum number of tokens of an answer."""
        return 24 if self.quick else 256

    @property
    def texts(self) -> int:
        """Number of requests of each kind of text."""
        return 1 if self.quick else 4


def drafts(bench: RealTextBench, report: Report) -> None:
    """Each kind of text with and without n-gram drafts, alternating, up to the end of the text."""
    model = bench.load()
    params = replace(GREEDY, stop_token_ids=tuple(model.tokenizer.eos_token_ids))
    ask, encode = partial(_chat, model), model.tokenizer.encode
    edits = [_edit(text) for text in code(bench.texts)]
    kinds = {
        "code edit": [ask(edit) for edit in edits],
        "summary": [ask(f"Summarize this text:\n\n{text}") for text in prose(bench.texts)],
        "chat": [ask(question) for question in QUESTIONS[: bench.texts]],
        "prose": [encode(text) for text in prose(bench.texts)],
    }
    for name, prompts in kinds.items():
        case = DraftCase(name, NgramDrafter, params, prompts, bench.tokens, None)
        compare(case, model.runner, model.info.vocab, report, bench.rounds)
    model.runner.close()


def _edit(text: str) -> str:
    """Prompt: repeat this code with its most frequent name changed."""
    words = [word for word in text.split() if word.isidentifier() and len(word) > 3]
    name = max(words, key=words.count)
    return f"Repeat this file with the name {name} changed to renamed:\n\n{text}"


def _chat(model: LoadedModel, *texts: str) -> list[int]:
    """Tokens of a conversation: user and assistant, alternating."""
    assert model.template is not None
    roles = ("user", "assistant")
    messages = [Message(roles[at % 2], text) for at, text in enumerate(texts)]
    return model.tokenizer.encode(model.template.render(messages))


def prefix(bench: RealTextBench, report: Report) -> None:
    """A chat of several turns that sends its whole history, with and without the prefix cache."""
    models = {
        "prefix cache": bench.load(),
        "no prefix cache": bench.load(prefix_cache=False),
    }
    found: dict[str, list[list[Answer]]] = {name: [] for name in models}
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(
                Session(model.runner, model.info.vocab, itl_target_ms=_ITL_TARGET_MS)
            )
            for name, model in models.items()
        }
        for number in range(bench.rounds):
            for name in sorted(models, reverse=bool(number % 2)):
                found[name].append(_conversation(sessions[name], models[name], bench, number))
    for name, rounds in found.items():
        for at, answers in enumerate(zip(*rounds, strict=True), start=1):
            timings = [answer.finished.timings for answer in answers]
            ttft_ms = [(answer.first_s - answer.sent_s) * 1e3 for answer in answers]
            report.add(f"turn {at}: TTFT", name, "ms", ttft_ms)
            whole = [float(answer.finished.prompt_tokens) for answer in answers]
            report.add(f"turn {at}: prompt", name, "tokens", whole)
            reused = [float(timing.cache_n) for timing in timings]
            report.add(f"turn {at}: prompt reused", name, "tokens", reused)
            computed = [float(timing.prompt_n) for timing in timings]
            report.add(f"turn {at}: prompt computed", name, "tokens", computed)


def _conversation(
    session: Session, model: LoadedModel, bench: RealTextBench, number: int
) -> list[Answer]:
    """Answers of one chat about a text. number: of the text; each round has another one."""
    text = prose(bench.rounds)[number]
    history, answers = [f"{text}\n\n{QUESTIONS[0]}"], []
    params = replace(GREEDY, stop_token_ids=tuple(model.tokenizer.eos_token_ids))
    for question in (*QUESTIONS[1:], None):
        (answer,) = session.ask([_chat(model, *history)], bench.tokens, params)
        answers.append(answer)
        reply = b"".join(map(model.tokenizer.piece, answer.tokens)).decode(errors="replace")
        history += [reply, question or ""]
    return answers


def grammar(bench: RealTextBench, report: Report) -> None:
    """One greedy answer without and one with a JSON schema, alternating."""
    model = bench.load()
    sides = {
        "unconstrained": GREEDY,
        "constrained to a JSON schema": replace(GREEDY, json_schema=SCHEMA),
    }
    prompt = _chat(model, "List the people of a village as JSON.")
    rates: dict[str, list[float]] = {name: [] for name in sides}
    compiler = GrammarCompiler(model.tokenizer)
    with Session(
        model.runner,
        model.info.vocab,
        itl_target_ms=_ITL_TARGET_MS,
        grammar_compiler=compiler,
    ) as session:
        for number in range(1 + bench.rounds):
            order: Seq[str] = list(sides) if number % 2 else list(sides)[::-1]
            for name in order:
                answers = session.ask([prompt], bench.tokens, sides[name])
                if number:
                    rates[name].append(decode_tok_s(answers))
    free, constrained = (
        report.add("tg, JSON schema", name, RATE, found) for name, found in rates.items()
    )
    report.ratio(constrained, free, MIN_SHARE, at_least=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.real_text")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--model", type=Path, help=f"a GGUF file (default: {SMOLLM2})")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each comparison")
    parser.add_argument("--threads", type=int, help="threads (default: localgen's)")
    parser.add_argument("--quick", action="store_true", help="one short round of few texts")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    parts = {"drafts": drafts, "prefix": prefix, "grammar": grammar}
    try:
        path = options.model or packaged_model(SMOLLM2).path
        bench = RealTextBench(
            path, options.threads, 1 if options.quick else options.rounds, options.quick
        )
        line, threads = bench.describe()
        load_options = {"ctx": CTX, "kv_tokens": KV_TOKENS}
        report = Report(line, bench.rounds, options.quick, threads, load_options)
        for part in options.only:
            print(part, file=sys.stderr, flush=True)
            parts[part](bench, report)
    except (AnswerFailed, LocalgenError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report.commands.append(command("benchmarks.real_text", arguments))
    print(report.text())
    report.save("real-text", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
