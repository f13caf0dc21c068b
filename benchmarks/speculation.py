"""Speed-up of speculative decoding: the same answers with and without drafts, alternating.

python -m benchmarks.speculation [--quick] [--rounds N]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import interleave, random_gguf
from benchmarks.answers import Answer
from benchmarks.forced_output import ForcedOutputRunner, Text, copies, prose
from benchmarks.interleave import EngineSide
from benchmarks.measure import RATE, ModelLine, Report, command
from benchmarks.scripted_draft import FORCED_SAMPLING, FORCED_TOKEN, ScriptedDraftRunner
from benchmarks.session import GREEDY
from localgen.backends.engine.loaded_model import LoadedModel
from localgen.backends.engine.speculation.draft_model import ModelDrafter
from localgen.backends.engine.speculation.drafter import Drafter
from localgen.backends.engine.speculation.ngram import NgramDrafter
from localgen.backends.errors import LocalgenError
from localgen.backends.llamacpp.loader import load_llamacpp_model
from localgen.backends.model_info import DraftModelRequest, LoadOptions, ModelLoadRequest
from localgen.backends.runner.interface import ModelRunner
from localgen.backends.sampling_params import SamplingParams

KV_TOKENS, CTX = 8192, 2048
# share of edited tokens in a copy
EDITED = 1 / 40
# speed-up over plain decoding that each case must reach
COPIES, EDITED_COPIES, HARMLESS = 2.0, 1.3, 0.97
PLAIN, DRAFTED = "plain", "drafts"


@dataclass(frozen=True, slots=True)
class DraftCase:
    """Requests that are answered one after the other, with and without drafts.

    create: returns a new drafter. prompts: those of one round. tokens: of each answer. least:
    minimum speed-up, or None.
    """

    name: str
    create: Callable[[], Drafter]
    params: SamplingParams
    prompts: Seq[Seq[int]]
    tokens: int
    least: float | None


def cases(model: LoadedModel, runner: ForcedOutputRunner, *, quick: bool) -> list[DraftCase]:
    """All cases. runner: gets the answers of the n-gram cases."""
    size, vocab = (24 if quick else 256), model.info.vocab
    copy = [copies(size, vocab, edited=0.0, seed=1)]
    edited = [copies(size, vocab, edited=EDITED, seed=2 + number) for number in range(4)]
    natural = prose(size // 4, size // 2, 2, vocab=vocab)
    for prompt, answer in [*copy, *edited, *natural]:
        runner.force(prompt, answer)
    assert model.draft is not None
    scripted = partial(_scripted_drafter, model.draft.runner)
    unknown = [[(101 + at) % vocab for at in range(size // 4)]]
    ngram = partial(DraftCase, create=NgramDrafter, params=GREEDY)
    return [
        ngram("a copy", prompts=_prompts(copy), tokens=size, least=COPIES),
        ngram("a copy with changes", prompts=_prompts(edited), tokens=size, least=EDITED_COPIES),
        ngram("prose", prompts=_prompts(natural), tokens=size // 2, least=HARMLESS),
        *(
            DraftCase(
                f"draft model, acceptance {alpha:g}",
                partial(scripted, alpha),
                FORCED_SAMPLING,
                unknown,
                size // 2,
                least,
            )
            for alpha, least in ((0.0, HARMLESS), (0.7, HARMLESS), (0.9, HARMLESS))
        ),
    ]


def _prompts(texts: Seq[Text]) -> list[Seq[int]]:
    return [prompt for prompt, _ in texts]


def _scripted_drafter(runner: ModelRunner, alpha: float) -> ModelDrafter:
    return ModelDrafter(ScriptedDraftRunner(runner, FORCED_TOKEN, alpha), "scripted")


def compare(case: DraftCase, runner: ModelRunner, vocab: int, report: Report, rounds: int) -> None:
    """Measure the tokens/s of a case without and with drafts, alternating.

    The first round is a warm-up: drafters learn acceptance, the policy measures step times.
    """
    print(case.name, file=sys.stderr, flush=True)
    sides = [EngineSide.from_runner(runner, vocab, drafters) for drafters in ([], [case.create()])]
    chance = random.Random(0)
    rates: tuple[list[float], list[float]] = ([], [])
    same = []
    for number in range(1 + rounds):
        asked = [
            interleave.ask(sides, [prompt], case.tokens, case.params, chance)
            for prompt in case.prompts
        ]
        by_side = list(zip(*asked, strict=True))
        if number:
            for values, answers in zip(rates, by_side, strict=True):
                values.append(_tokens_per_s(answers))
            same.append(_same_text(*by_side))
    stats = sides[1].session.stats.speculation
    for side in sides:
        side.session.stop()
    plain, drafted = (
        report.add(case.name, name, RATE, values)
        for name, values in zip((PLAIN, DRAFTED), rates, strict=True)
    )
    report.add(case.name, "same text", "of the answers", same)
    report.add(case.name, "acceptance", "", [stats.acceptance])
    report.add(case.name, "tokens a step", "", [stats.tokens_per_step])
    report.add(case.name, "speed-up estimated by the engine", "", [stats.speedup])
    if case.least is not None:
        report.ratio(drafted, plain, case.least, at_least=True)


def _same_text(plain: Seq[Seq[Answer]], drafted: Seq[Seq[Answer]]) -> float:
    pairs = [
        (a.text, b.text)
        for p, d in zip(plain, drafted, strict=True)
        for a, b in zip(p, d, strict=True)
    ]
    return sum("".join(a) == "".join(b) for a, b in pairs) / len(pairs)


def _tokens_per_s(asked: Seq[Seq[Answer]]) -> float:
    """Decode speed, from the first token of each request to its last."""
    answers = [answer for group in asked for answer in group]
    tokens = sum(answer.finished.completion_tokens - 1 for answer in answers)
    return tokens / sum(answer.last_s - answer.first_s for answer in answers)


def _load(*, quick: bool, threads: int | None) -> LoadedModel:
    names = ("quick", "quick") if quick else ("1b", "draft")
    target, draft = (random_gguf.cached(random_gguf.SHAPES[name]) for name in names)
    options = LoadOptions(ctx=CTX, kv_tokens=KV_TOKENS, threads=threads)
    request = ModelLoadRequest(
        "target", str(target), options, draft=DraftModelRequest("draft", str(draft))
    )
    return load_llamacpp_model(request, lambda _: None)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark. Returns 0 even if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.speculation")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one short round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each comparison")
    parser.add_argument("--only", action="append", help="a case by name; may be repeated")
    parser.add_argument("--threads", type=int, help="threads (default: localgen's)")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    try:
        model = _load(quick=options.quick, threads=options.threads)
    except LocalgenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    info, rounds = model.info, 1 if options.quick else options.rounds
    line = ModelLine(f"{info.description}, random", info.size_bytes, info.params)
    report = Report(line, rounds, options.quick, info.options.threads or 0, {})
    report.commands.append(command("benchmarks.speculation", arguments))
    runner = ForcedOutputRunner(model.runner)
    chosen = cases(model, runner, quick=options.quick)
    if unknown := set(options.only or ()) - {case.name for case in chosen}:
        parser.error(f"no case {', '.join(sorted(unknown))}: {', '.join(c.name for c in chosen)}")
    for case in chosen:
        if options.only and case.name not in options.only:
            continue
        compare(case, runner, info.vocab, report, rounds)
    print(report.text())
    report.save("speculation", options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
