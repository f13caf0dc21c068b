"""Check decoder and engine against a float64 reference: logits, then greedy tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_parts.device import Device, relative_error
from benchmarks.gpu_parts.loaded import DTYPE, cache_dtype, engine_session, watched_runner
from benchmarks.gpu_parts.modes import DEPENDENT_MODE, GRAPHS_CHECK, MODES, Mode
from benchmarks.gpu_parts.probe import Probe, exact, randomize_norms
from benchmarks.gpu_parts.progress import case_begins
from benchmarks.gpu_parts.report import CorrectnessCheck
from benchmarks.gpu_parts.shapes import Shape
from localgen.backends.cuda.model.weights import DecoderWeights, random_weights
from localgen.backends.formats.architecture.model_spec import ModelSpec

# maximum relative error of the logits of a few layers in bfloat16. ROUGH_LOGITS: random 4-bit
# values have a mean that cancels out; FP8 also rounds activations of prompts; and in MoE layers
# rounding may select another one of two experts with nearly equal scores
LOGITS = 4e-2
ROUGH_LOGITS = 0.15
# maximum gap of a greedy token's logit to the largest one, in standard deviations of the
# row: of a thousand random logits the largest two differ by about 1/3, and a wrong token's is about
# 3 below
NEARLY_BEST = 0.5
_PROMPTS = (90, 33, 150, 5)
_ANSWER, _SHARED = 14, 64


@dataclass(slots=True)
class CheckedModel:
    """A small model, its float64 reference, and prompts. cache: data type of its KV cache."""

    name: str
    spec: ModelSpec
    cache: torch.dtype
    weights: DecoderWeights
    reference: Probe
    texts: list[list[int]] = field(default_factory=list)
    _exact: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, shape: Shape, device: Device, seed: int) -> CheckedModel:
        spec = shape.spec
        plain = random_weights(spec, device=device.torch, dtype=DTYPE, seed=seed)
        generator = torch.Generator(device.torch).manual_seed(seed)
        weights = randomize_norms(plain, generator)
        draw = random.Random(seed)
        prefix = draw.choices(range(spec.vocab_size), k=_SHARED)
        texts = [draw.choices(range(spec.vocab_size), k=length) for length in _PROMPTS]
        texts += [prefix + draw.choices(range(spec.vocab_size), k=9) for _ in range(2)]
        reference = Probe(spec, exact(weights), max_len=512, dtype=torch.float64)
        return cls(shape.name, spec, cache_dtype(shape), weights, reference, texts)

    def below_best(self, prompt: Sequence[int], answer: Sequence[int]) -> float:
        """Largest gap to the reference's best logit over an answer, in standard deviations."""
        text = (*prompt, *answer[:-1])
        if text not in self._exact:  # most configurations give the same answers
            self._exact[text] = self.reference.text(text)
        logits = self._exact[text][len(prompt) - 1 :]
        answered = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        return float(((logits.amax(-1) - answered) / logits.std(-1)).max())


def decoders(device: Device, seed: int, shape: Shape) -> Iterator[CorrectnessCheck]:
    """Check a model: chunked prefill, decoding, CUDA graphs, the whole engine in every mode."""
    try:
        model = CheckedModel.of(shape, device, seed)
    except Exception as error:
        yield CorrectnessCheck.raised(f"{shape.name}: create", error)
        return
    for name, check in CHECKS.items():
        title = f"{shape.name}: {name}"
        case_begins(title)
        try:
            yield CorrectnessCheck(title, *check(model, device))
        except Exception as error:
            yield CorrectnessCheck.raised(title, error)


def _logits(model: CheckedModel, device: Device) -> tuple[float, float]:
    """Prefill two texts in the same steps, one in two chunks; then decode 8 tokens of each."""
    probe = Probe(model.spec, model.weights, max_len=512, sequences=2, dtype=model.cache)
    one, other = model.texts[0], model.texts[2]
    middle, end = len(other) // 2, len(other) - 8
    first = probe.step([(0, 0, one[:-8]), (1, 0, other[:middle])])
    second = probe.step([(1, middle, other[middle:end])])
    rest: list[list[Tensor]] = [[], []]
    for i in range(8):
        at = (len(one) - 8 + i, end + i)
        found = probe.step([(0, at[0], [one[at[0]]]), (1, at[1], [other[at[1]]])])
        for one_of, logits in zip(rest, found, strict=True):
            one_of.append(logits)
    whole = torch.cat([first[0], *rest[0]]), torch.cat([first[1], second[0], *rest[1]])
    errors = [
        relative_error(logits.cpu(), model.reference.text(text))
        for logits, text in zip(whole, (one, other), strict=True)
    ]
    return max(errors), _most(model.spec)


def _most(spec: ModelSpec) -> float:
    return ROUGH_LOGITS if spec.moe or spec.quant else LOGITS


def _graphs(model: CheckedModel, device: Device) -> tuple[float, float]:
    """Compare an eager decode step with the same step captured and replayed as a CUDA graph."""
    texts = model.texts[:3]
    found = []
    for graphs in (False, True):
        probe = Probe(
            *(model.spec, model.weights),
            max_len=512,
            sequences=3,
            graphs=graphs,
            dtype=model.cache,
        )
        probe.step([(i, 0, text[:-1]) for i, text in enumerate(texts)])
        for _ in range(3 if graphs else 1):
            last = [(i, len(text) - 1, text[-1:]) for i, text in enumerate(texts)]
            found.append(torch.cat(probe.step(last)))
            probe.capture()
    return max(relative_error(logits, found[0]) for logits in found[1:]), LOGITS


def _answers(model: CheckedModel, device: Device, mode: Mode) -> list[tuple[list[int], list[int]]]:
    """Return prompts with greedy answers; the prefix of the last prompt is cached.

    All are asked twice: with CUDA graphs, the first answers run without them.
    """
    runner = watched_runner(
        *(model.spec, model.weights, device),
        kv_tokens=4096,
        graphs=mode.graphs,
        ahead=mode.ahead,
        dependent=mode.dependent,
        dtype=model.cache,
    )
    with engine_session(runner, model.spec.vocab_size) as session:
        answers = [*session.ask(model.texts[:-1], _ANSWER), *session.ask(model.texts[-1:], 8)]
        cached = answers[-1].finished.timings.cache_n
        assert cached == _SHARED, f"{cached} of {_SHARED} tokens came from the cache"
        answers += session.ask(model.texts, _ANSWER)
        return [(text, a.tokens) for text, a in zip(model.texts * 2, answers, strict=True)]


def _greedy(model: CheckedModel, device: Device, *, mode: Mode) -> tuple[float, float]:
    """Check that every greedy token is nearly the reference's best after the same text."""
    pairs = _answers(model, device, mode)
    return max(model.below_best(*pair) for pair in pairs), NEARLY_BEST


CHECKS: dict[str, Callable[[CheckedModel, Device], tuple[float, float]]] = {
    # the simplest first: where one hangs, those after it are lost
    "logits of a prompt, in parts, and decoding": _logits,
    **{mode.check: partial(_greedy, mode=mode) for mode in reversed(MODES) if not mode.graphs},
    GRAPHS_CHECK: _graphs,
    **{mode.check: partial(_greedy, mode=mode) for mode in reversed(MODES) if mode.graphs},
    DEPENDENT_MODE.check: partial(_greedy, mode=DEPENDENT_MODE),
}
